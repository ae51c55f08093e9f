"""The same token ids in the form that each side reads, and text to tokenize."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from raytrain_llama3.data.manifest import Manifest, Shard, write_manifest
from raytrain_llama3.data.shard_writer import ShardWriter

SEQ = 8192
VOCAB = 50_000
_SHARD_TOKENS = 1 << 26
_DOCUMENT_TOKENS = 1 << 11


def documents(tokens: int) -> Iterator[np.ndarray]:
    """Random documents of 1 to 2 × 2,048 ids below `VOCAB`, uint16, `tokens` in all or a few more."""
    rng, made = np.random.default_rng(1), 0
    while made < tokens:
        block = rng.integers(0, VOCAB, 1 << 22, dtype=np.uint16)
        cuts = np.cumsum(rng.integers(1, 2 * _DOCUMENT_TOKENS, len(block) // _DOCUMENT_TOKENS))
        yield from np.split(block, cuts[cuts < len(block)])
        made += len(block)


def write_ours(folder: Path, tokens: int) -> None:
    """Arrow shards and their manifest, as `data tokenize` writes them."""
    folder.mkdir(parents=True)
    shards: list[Shard] = []
    source, is_more = documents(tokens), True
    while is_more:
        writer, written = ShardWriter(folder / f"shard-{len(shards):05d}.arrow", np.dtype(np.uint16)), 0
        is_more = False
        for document in source:
            writer.add(document)
            written += len(document)
            if written >= _SHARD_TOKENS:
                is_more = True
                break
        if (shard := writer.finish()) is not None:
            shards.append(shard)
    write_manifest(folder, Manifest("bytes", VOCAB, 0, tuple(shards)))


def rows(tokens: int) -> Iterator[np.ndarray]:
    """The same documents, packed beforehand into rows of one sample: what sides that do not pack are given."""
    rest = np.zeros(0, dtype=np.uint16)
    for document in documents(tokens):
        rest = np.concatenate([rest, document])
        while len(rest) > SEQ:
            yield rest[: SEQ + 1]
            rest = rest[SEQ:]


def write_hugging_face(folder: Path, tokens: int) -> None:
    """A `datasets` folder of packed rows."""
    import pyarrow as pa
    from datasets import Dataset

    folder.mkdir(parents=True)
    type_ = pa.list_(pa.uint16())
    with pa.ipc.new_stream(str(folder / "rows.arrow"), pa.schema([("input_ids", type_)])) as file:
        batch: list[np.ndarray] = []
        for row in rows(tokens):
            batch.append(row)
            if len(batch) == 64:
                offsets = np.arange(len(batch) + 1, dtype=np.int32) * (SEQ + 1)
                column = pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(batch)))
                file.write_batch(pa.record_batch([column], ["input_ids"]))
                batch = []
    Dataset.from_file(str(folder / "rows.arrow"))


def write_mosaic(folder: Path, tokens: int) -> None:
    """MDS shards of packed rows."""
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"tokens": f"ndarray:uint16:{SEQ + 1}"}, size_limit=1 << 27) as writer:
        for row in rows(tokens):
            writer.write({"tokens": row})


def write_megatron(folder: Path, tokens: int) -> None:
    """Documents as .bin and .idx."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    folder.mkdir(parents=True)
    builder = IndexedDatasetBuilder(str(folder / "text.bin"), dtype=np.uint16)
    for document in documents(tokens):
        builder.add_document(document, [len(document)])
    builder.finalize(str(folder / "text.idx"))


def write_text(path: Path, size: int) -> None:
    """JSON lines of made-up words, `size` bytes or a few more, and a tokenizer.json learned from the first of them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    rng = np.random.default_rng(2)
    letters = np.array(list("etaoinshrdlucmfwypvbgkqjxz"))
    words = ["".join(rng.choice(letters, n)) for n in rng.integers(1, 11, 20_000)]
    ranks = np.minimum(rng.zipf(1.2, 1 << 20) - 1, len(words) - 1)
    with path.open("w") as file:
        while file.tell() < size:
            start = int(rng.integers(0, len(ranks) - 600))
            file.write(json.dumps({"text": " ".join(words[i] for i in ranks[start : start + 500])}) + "\n")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    with path.open() as file:
        texts = [json.loads(next(file))["text"] for _ in range(500)]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=8000, special_tokens=["<|endoftext|>"]))
    tokenizer.save(str(path.with_name("tokenizer.json")))


def forget(folder: Path) -> None:
    """Take the files below `folder` out of the page cache, as far as the kernel lets one."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
