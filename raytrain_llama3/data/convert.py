"""From Megatron's `.bin` and `.idx` to Arrow, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from raytrain_llama3.data.catalog import Dataset, open_dataset
from raytrain_llama3.data.encoders import open_encoder
from raytrain_llama3.data.manifest import Manifest, Shard, write_manifest
from raytrain_llama3.data.shard import Ids, open_shard
from raytrain_llama3.data.shard_writer import ShardWriter
from raytrain_llama3.data.workfolder import work_folder
from raytrain_llama3.errors import DataError

_SHARD_TOKENS = 1 << 28


def to_arrow(
    source: str, output: Path, tokenizer: str, *, overwrite: bool = False, log: Callable[[str], None]
) -> Manifest:
    """Write the documents of `source`, in their order, to the dataset folder `output`.

    `tokenizer` says what the ids mean: vocabulary, and the id that documents end with, if the first of them do.
    Raises `DataError` when `source` cannot be read, an id does not fit the tokenizer, or `output` is taken.
    """
    dataset, encoder = open_dataset([source], None, retries=5), open_encoder(tokenizer)
    id_type = Manifest(tokenizer, encoder.vocab_size, encoder.end_of_document, ()).id_type
    shards: list[Shard] = []
    has_ends = True
    with work_folder(output, overwrite) as work:
        work.begin({"convert": source, "stamp": dataset.fingerprint()})
        documents = _documents(dataset, encoder.vocab_size)
        while True:
            writer, tokens = ShardWriter(work.path / f"shard-{len(shards):05d}.arrow", id_type), 0
            for ids in documents:
                writer.add(ids)
                tokens += len(ids)
                has_ends = has_ends and bool(len(ids)) and int(ids[-1]) == encoder.end_of_document
                if tokens >= _SHARD_TOKENS:
                    break
            if (shard := writer.finish()) is None:
                break
            shards.append(shard)
        manifest = Manifest(tokenizer, encoder.vocab_size, encoder.end_of_document, tuple(shards), has_ends)
        write_manifest(work.path, manifest)
        work.publish()
    log(f"{output}: {manifest.documents:,} documents, {manifest.tokens:,} tokens, {len(shards)} shard(s)")
    return manifest


def to_indexed(source: str, prefix: Path, *, overwrite: bool = False, log: Callable[[str], None]) -> None:
    """Write the documents of `source`, in their order, to `prefix`.bin and .idx, through Megatron's own builder.

    Raises `DataError` when `source` cannot be read, or the files are there and not to be overwritten.
    """
    files = [prefix.with_name(prefix.name + end) for end in (".bin", ".idx")]
    there = [str(file) for file in files if file.exists()]
    if there and not overwrite:
        raise DataError(f"{' and '.join(there)}: there already; choose another --output, or pass --overwrite")
    dataset = open_dataset([source], None, retries=5)
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    fresh = [file.with_name(f".{file.name}.writing") for file in files]
    builder: Any = IndexedDatasetBuilder(str(fresh[0]), dtype=DType.optimal_dtype(dataset.vocab_size or None))
    for ids in _documents(dataset, None):
        builder.add_document(np.asarray(ids), [len(ids)])
    builder.finalize(str(fresh[1]))
    for new, file in zip(fresh, files, strict=True):
        new.replace(file)
    log(f"{prefix}.bin and .idx: {dataset.documents:,} documents, {dataset.tokens:,} tokens")


def _documents(dataset: Dataset, vocab_size: int | None) -> Iterator[Ids]:
    for shard in dataset.shards:
        opened = open_shard(dataset.place, shard, dataset.column)
        row = 0
        for number in range(len(opened.rows)):
            for ids in opened.load(number).documents():
                if vocab_size is not None and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
                    raise DataError(
                        f"{dataset.place.name(shard.file)}, row {row}: ids from {ids.min()} to {ids.max()} do not fit "
                        f"the tokenizer's vocab_size {vocab_size}"
                    )
                yield ids
                row += 1
