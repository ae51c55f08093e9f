"""Megatron's `.bin` and `.idx`: the ids of all documents in one file, where they begin in the other.

Read here rather than by `megatron.core.datasets`, which imports torch: seconds and hundreds of megabytes for a feeder
that does nothing else with it. That both read the same is tested; `data convert` writes through Megatron's builder.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from raytrain_llama3.data.filesystem import Place
from raytrain_llama3.data.shard import Counts, Unit
from raytrain_llama3.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = "<QBQQ"
_TYPES: dict[int, Any] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_UNIT_TOKENS = 1 << 20


class IndexedShard:
    """A pair of files, both mapped; each sequence is a document. Units are cut to about a million tokens."""

    is_mapped = True

    def __init__(self, place: Place, path: str) -> None:
        self._name = place.name(path)
        if not place.is_local:
            raise DataError(f"{self._name}: .bin and .idx files must be local; copy them, or `data convert` them")
        self._lengths, pointers, type_ = _read_index(Path(path))
        self._ids = _map_ids(Path(path).with_suffix(".bin"), type_)
        size = np.dtype(type_).itemsize
        total = int(self._lengths.sum(dtype=np.int64))
        if total > len(self._ids):
            raise DataError(
                f"{Path(path).with_suffix('.bin')} is truncated: {len(self._ids)} tokens, {self._name} says {total}"
            )
        # `searchsorted` on the mapped pointers touches a few pages, whatever their number.
        marks = np.arange(0, total, _UNIT_TOKENS, dtype=np.int64) * size
        firsts = np.unique(np.searchsorted(pointers, marks)) if len(pointers) else np.zeros(0, dtype=np.int64)
        self._first_rows = np.append(firsts[firsts < len(pointers)], len(pointers)).astype(np.int64)
        self._starts: Counts = np.append(pointers[self._first_rows[:-1]] // size, total).astype(np.int64)
        self.rows: Counts = np.diff(self._first_rows)
        self.tokens: Counts = np.diff(self._starts)
        if len(self.tokens) and (int(self._starts[0]) != 0 or int(self.tokens.min()) < 0):
            raise DataError(f"{self._name} is damaged: its documents do not follow one another; restore it")

    def load(self, unit: int) -> Unit:
        """A view of the mapped file."""
        ids = self._ids[self._starts[unit] : self._starts[unit + 1]]
        lengths = self._lengths[self._first_rows[unit] : self._first_rows[unit + 1]]
        ends = np.cumsum(lengths, dtype=np.int64)
        if (int(ends[-1]) if len(ends) else 0) != len(ids):
            raise DataError(
                f"{self._name}, row {self._first_rows[unit]} and on: lengths and places contradict each other"
            )
        return Unit(ids, ends)


def _read_index(path: Path) -> tuple[Any, Any, Any]:
    """Mapped lengths (int32) and places in bytes (int64) of all sequences, and the type of an id."""
    data = _map(path, np.uint8)
    start = len(_MAGIC) + struct.calcsize(_HEADER)
    head = bytes(data[:start])
    if not head.startswith(_MAGIC) or len(head) < start:
        raise DataError(f"{path} is not one of Megatron's .idx files; restore it")
    version, code, sequences, documents = struct.unpack(_HEADER, head[len(_MAGIC) :])
    if version != 1 or code not in _TYPES:
        raise DataError(f"{path}: version {version} with ids of type {code}; only version 1 with whole numbers is read")
    wanted = start + sequences * 12 + documents * 8
    if len(data) < wanted:
        raise DataError(f"{path} is truncated: {len(data)} bytes of {wanted}; restore it")
    lengths = np.frombuffer(data, np.int32, sequences, start)
    return lengths, np.frombuffer(data, np.int64, sequences, start + 4 * sequences), _TYPES[code]


def _map_ids(path: Path, type_: Any) -> Any:
    try:
        return _map(path, type_)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); it belongs beside its .idx") from error


def _map(path: Path, type_: Any) -> Any:
    """An empty file cannot be mapped, and bytes after the last whole id are left out."""
    count = path.stat().st_size // np.dtype(type_).itemsize
    return np.memmap(path, mode="r", dtype=type_, shape=(count,)) if count else np.zeros(0, dtype=type_)
