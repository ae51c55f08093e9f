"""Datasets of known tokens for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from raytrain_llama3.data.catalog import open_dataset
from raytrain_llama3.data.manifest import Manifest, Shard, write_manifest
from raytrain_llama3.data.packed import PackedSource
from raytrain_llama3.data.shard_writer import ShardWriter


def random_documents(seed: int, count: int, vocab_size: int, longest: int = 40) -> list[np.ndarray]:
    """Documents of 0 to `longest` tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, rng.integers(0, longest + 1)) for _ in range(count)]


def write_dataset(folder: Path, documents: list[np.ndarray], vocab_size: int, shard_tokens: int = 100) -> Manifest:
    """Shards of about `shard_tokens`, each in several record batches."""
    folder.mkdir(parents=True)
    id_type = Manifest("bytes", vocab_size, 0, ()).id_type
    shards: list[Shard] = []
    rest = list(documents)
    while rest:
        writer = ShardWriter(
            folder / f"shard-{len(shards):05d}.arrow", id_type, max(1, min(1 << 20, shard_tokens // 4))
        )
        tokens = 0
        while rest and tokens < shard_tokens:
            tokens += len(rest[0])
            writer.add(rest.pop(0))
        shards += [shard] if (shard := writer.finish()) else []
    manifest = Manifest("bytes", vocab_size, 0, tuple(shards))
    write_manifest(folder, manifest)
    return manifest


def packed(folder: Path | str, documents: tuple[int, int], seq_length: int, vocab_size: int) -> PackedSource:
    """A source over a part of a dataset."""
    return PackedSource(open_dataset([str(folder)], None, retries=0), documents, seq_length, vocab_size)
