"""Looking at data: what is in it, how long it lasts, and whether all of it can be trained on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from raytrain_llama3.data.catalog import Dataset, open_dataset
from raytrain_llama3.data.encoders import BYTES, open_encoder
from raytrain_llama3.data.manifest import MANIFEST_FILE, Shard, read_manifest
from raytrain_llama3.data.shard import TokenHash, Unit, open_shard
from raytrain_llama3.errors import DataError

_SHOWN_IDS = 200
_SHOWN_CHARACTERS = 200
_SHOWN_LINES = 3


def inspect(
    place: str,
    *,
    column: str | None = None,
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    seq_length: int = 8192,
    global_batch_size: int = 128,
    train_samples: int | None = None,
) -> str:
    """Read all of a dataset, check it against its manifest where it has one, and describe it in a few lines.

    Raises `DataError`, naming file and row, at the first thing that is not as it should be: among them an id that is
    not below `vocab_size` (the manifest's, unless given).
    """
    dataset = open_dataset([place], column, retries=5)
    limit = vocab_size or dataset.vocab_size or None
    largest = max((_check(dataset, shard, limit) for shard in dataset.shards), default=-1)
    windows = max(dataset.tokens - 1, 0) // seq_length
    steps = windows / global_batch_size
    mean = dataset.tokens / max(dataset.documents, 1)
    ends = f"documents end with {dataset.end_of_document}" if dataset.end_of_document is not None else "no manifest"
    lines = [
        f"dataset      {place}",
        f"tokenizer    {dataset.tokenizer or tokenizer or 'unknown'}",
        f"vocab_size   {f'{limit:,}' if limit else 'unknown'}, {ends}",
        f"ids          0 to {largest:,}" + ("" if limit is None else f", none above {limit - 1:,}"),
        f"shards       {len(dataset.shards):,}, {sum(shard.bytes for shard in dataset.shards):,} bytes",
        f"documents    {dataset.documents:,}, {mean:,.1f} tokens each on average",
        f"tokens       {dataset.tokens:,}",
        f"windows      {windows:,} at seq_length {seq_length:,}",
        f"an epoch     {steps:,.1f} steps at global_batch_size {global_batch_size:,}",
    ]
    if train_samples:
        lines.append(f"epochs       {train_samples / max(windows, 1):,.2f} in {train_samples:,} samples")
    if dataset.tokenizer and (Path(place) / MANIFEST_FILE).is_file():
        lines.append(f"fingerprint  {read_manifest(Path(place)).fingerprint()}")
    return "\n".join([*lines, *_beginnings(dataset, tokenizer)])


def _check(dataset: Dataset, shard: Shard, limit: int | None) -> int:
    """The largest id of a shard. Raises `DataError` for one that is too large, and for another digest."""
    found, largest, row = TokenHash(), -1, 0
    for unit in _units(dataset, shard):
        if len(unit.ids):
            least, most = int(unit.ids.min()), int(unit.ids.max())
            if least < 0 or (limit is not None and most >= limit):
                token = int(np.argmax((unit.ids < 0) | (unit.ids >= (limit or most + 1))))
                at = row + int(np.searchsorted(unit.ends, token, side="right"))
                raise DataError(
                    f"{dataset.place.name(shard.file)}, row {at}: token id {unit.ids[token]} does not fit vocab_size "
                    f"{limit}; make the dataset again, or give the vocab_size of its tokenizer"
                )
            largest = max(largest, most)
        if shard.sha256:
            for ids in unit.documents():
                found.add(ids)
        row += len(unit.ends)
    if shard.sha256 and found.hexdigest() != shard.sha256:
        raise DataError(
            f"shard {dataset.place.name(shard.file)} does not hold the tokens that were written (SHA-256 "
            f"{found.hexdigest()}, the manifest says {shard.sha256}); copy it again or make the dataset again"
        )
    return largest


def _units(dataset: Dataset, shard: Shard) -> Iterator[Unit]:
    opened = open_shard(dataset.place, shard, dataset.column)
    yield from map(opened.load, range(len(opened.rows)))


def _beginnings(dataset: Dataset, tokenizer: str | None) -> list[str]:
    """How the first documents begin, decoded where there is a tokenizer to do it."""
    name = tokenizer or dataset.tokenizer
    if not name or (name != BYTES and not Path(name).expanduser().exists()):
        return []
    encoder, lines = open_encoder(name), []
    for shard in dataset.shards:
        for unit in _units(dataset, shard):
            for start, end in zip([0, *unit.ends[:-1].tolist()], unit.ends.tolist(), strict=True):
                ids = unit.ids[start : min(end, start + 4 * _SHOWN_IDS)]
                text = encoder.decode(ids[ids < encoder.vocab_size].tolist())[:_SHOWN_CHARACTERS]
                lines.append(f"begins with  {text!r}")
                if len(lines) == _SHOWN_LINES:
                    return lines
    return lines
