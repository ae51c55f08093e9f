"""Datasets of known tokens for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from raytrain_llama3.data.manifest import Manifest, write_manifest
from raytrain_llama3.data.shard_writer import ShardWriter


def random_documents(seed: int, count: int, vocab_size: int, longest: int = 40) -> list[np.ndarray]:
    """Documents of 0 to `longest` tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, rng.integers(0, longest + 1)) for _ in range(count)]


def write_dataset(folder: Path, documents: list[np.ndarray], vocab_size: int, shard_tokens: int = 100) -> Manifest:
    """Shards of about `shard_tokens`, each in at least two record batches."""
    folder.mkdir(parents=True)
    id_type = Manifest("bytes", vocab_size, 0, ()).id_type
    with ShardWriter(folder, id_type, shard_tokens) as writer:
        for document in documents:
            writer.add(document)
    manifest = Manifest("bytes", vocab_size, 0, writer.shards)
    write_manifest(folder, manifest)
    return manifest
