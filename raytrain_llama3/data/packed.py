"""Windows of token ids, cut from the documents of a dataset as if they were one stream."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any

import numpy as np

from raytrain_llama3.data.catalog import Dataset
from raytrain_llama3.data.manifest import Documents
from raytrain_llama3.data.shard import Counts, OpenShard, Unit, open_shard
from raytrain_llama3.data.source import Indices, Tokens
from raytrain_llama3.errors import DataError

_MAX_OPEN_SHARDS = 256
"""Each open shard costs a file descriptor, of which containers often allow 1,024."""
_READERS = 4
_CACHE_BYTES = 512 * 2**20
_LEAST_UNITS = 2
_UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class PackedSource:
    """A `TokenSource` over a range of a dataset's documents.

    The documents, in the order of the dataset's shards, are one stream of tokens, with an end-of-document id after
    each where the dataset stores none. Window i is tokens [i * seq_length, (i + 1) * seq_length + 1): neighbours share
    one token, which is target here and input there.

    `documents` is a half-open range of document numbers; every id must be below `vocab_size`.

    Nothing is opened before the first use, then shards as they are needed. Pickling leaves open files behind. Raises
    `DataError` at first use when a shard is damaged, or the range holds less than one window.
    """

    def __init__(self, dataset: Dataset, documents: Documents, seq_length: int, vocab_size: int) -> None:
        self.seq_length = seq_length
        self._dataset, self._documents, self._vocab_size = dataset, documents, vocab_size
        self._stream: _Stream | None = None

    def __len__(self) -> int:
        """Windows in one epoch."""
        return self._opened().windows(self.seq_length)

    @property
    def tokens(self) -> int:
        """Tokens of the range, ends of documents included."""
        return self._opened().tokens

    def windows(self, indices: Indices, out: Tokens | None = None) -> Tokens:
        """Read windows into `out`, or a new array: `[len(indices), seq_length + 1]`, int32.

        Raises `DataError`, naming file, row and id, when a shard is damaged or an id is not below `vocab_size`, and
        `IndexError` for an index outside [0, len(self)).
        """
        stream = self._opened()
        count = stream.windows(self.seq_length)
        tokens = np.empty((len(indices), self.seq_length + 1), dtype=np.int32) if out is None else out
        for row, index in zip(tokens, indices.tolist(), strict=True):
            if not 0 <= index < count:
                raise IndexError(f"window indices must lie in [0, {count}), got {index}")
            largest = stream.read(index * self.seq_length, row)
            if largest >= self._vocab_size:
                self._refuse(stream, index * self.seq_length)
        return tokens

    def warm(self, indices: Indices) -> None:
        """Begin to read the row groups or record batches of these windows, where they are not mapped."""
        stream = self._opened()
        if stream.is_free:
            return
        for index in indices.tolist():
            stream.warm(index * self.seq_length, self.seq_length + 1)

    def fingerprint(self) -> dict[str, Any]:
        """The dataset, the range of documents and how they are packed."""
        packing = {"seq_length": self.seq_length, "documents": list(self._documents)}
        return {"kind": "packed-2", **self._dataset.fingerprint(), **packing}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stream": None}

    def _opened(self) -> _Stream:
        if self._stream is None:
            stream = _Stream(self._dataset, self._documents)
            if stream.windows(self.seq_length) < 1:
                first, last = self._documents
                raise DataError(
                    f"documents {first} to {last} of {self._dataset.name} hold {stream.tokens} tokens, and one window "
                    f"needs {self.seq_length + 1} (seq_length + 1); add documents, give this part a larger share of "
                    f"split, or lower seq_length"
                )
            self._stream = stream
        return self._stream

    def _refuse(self, stream: _Stream, position: int) -> None:
        path, document, number = stream.first_above(position, self.seq_length + 1, self._vocab_size)
        told = self._dataset.vocab_size
        remedy = (
            f"set vocab_size to {told} or more (the dataset's tokenizer is {self._dataset.tokenizer})"
            if told > self._vocab_size
            else "set vocab_size to that of the data's tokenizer, or restore the shard"
        )
        raise DataError(
            f"{path}, row {document}: token id {number} does not fit vocab_size {self._vocab_size}; {remedy}, or "
            f"tokenize the data again"
        )


class _Stream:
    """The tokens of a range of documents, one after another."""

    def __init__(self, dataset: Dataset, documents: Documents) -> None:
        self._dataset = dataset
        self._open: OrderedDict[int, _Shard] = OrderedDict()
        mapped = dataset.place.is_local and not any(s.file.endswith(".parquet") for s in dataset.shards)
        self.is_free = mapped and dataset.append is None
        self._units = _UnitCache()
        # Tokens and documents before each shard, and in all.
        shards, ends = dataset.shards, dataset.append is not None
        self._token_starts = _starts([s.tokens + ends * s.documents for s in shards])
        self._row_starts = _starts([s.documents for s in shards])
        first, last = documents
        if not 0 <= first <= last <= dataset.documents:
            raise DataError(
                f"documents {first} to {last} were asked for, but {dataset.name} has {dataset.documents}; was the "
                f"dataset made again during the run?"
            )
        self._start = self._document_start(first)
        self.tokens = self._document_start(last) - self._start

    def windows(self, seq_length: int) -> int:
        return max(self.tokens - 1, 0) // seq_length

    def read(self, position: int, out: Tokens) -> int:
        """Fill `out` with the tokens from `position` on; the largest of them, a negative one being very large."""
        largest, done = 0, 0
        for number, unit, begin, length in self._pieces(position, len(out)):
            ids = self._load(number, unit).ids[begin : begin + length]
            out[done : done + length] = ids
            # Before the cast: an id of 64 bits may not fit.
            largest = max(largest, int(ids.view(_UNSIGNED[ids.itemsize]).max()))
            done += length
        return largest

    def warm(self, position: int, length: int) -> None:
        for number, unit, _, _ in self._pieces(position, length):
            shard = self._shard(number)
            if not shard.is_free:
                self._units.begin((number, unit), shard)

    def first_above(self, position: int, length: int, limit: int) -> tuple[str, int, int]:
        """File, row and id of the first token from `position` on that is not in [0, `limit`)."""
        for number, unit, begin, count in self._pieces(position, length):
            loaded = self._load(number, unit)
            ids = loaded.ids[begin : begin + count]
            outside = np.flatnonzero((ids < 0) | (ids >= limit))
            if outside.size:
                token = int(outside[0])
                row = int(np.searchsorted(loaded.ends, begin + token, side="right"))
                path = self._dataset.place.name(self._dataset.shards[number].file)
                return path, self._shard(number).row_starts[unit] + row, int(ids[token])
        raise AssertionError("an id was outside the vocabulary, and is not any more")

    def _pieces(self, position: int, length: int) -> list[tuple[int, int, int, int]]:
        """(shard, unit, first token within it, tokens) that together are tokens [position, position + length)."""
        return [
            (number, unit, begin, here)
            for number, first, count in _cut(self._token_starts, self._start + position, length)
            for unit, begin, here in _cut(self._shard(number).token_starts, first, count)
        ]

    def _load(self, number: int, unit: int) -> Unit:
        shard = self._shard(number)
        return shard.view(unit) if shard.is_free else self._units.get((number, unit), shard)

    def _document_start(self, document: int) -> int:
        number = bisect_right(self._row_starts, document) - 1
        row = document - self._row_starts[number]
        if not row:
            return self._token_starts[number]
        shard = self._shard(number)
        unit = bisect_right(shard.row_starts, row) - 1
        within = row - shard.row_starts[unit]
        ends = self._load(number, unit).ends if within else np.zeros(1, dtype=np.int64)
        return self._token_starts[number] + shard.token_starts[unit] + (int(ends[within - 1]) if within else 0)

    def _shard(self, number: int) -> _Shard:
        shard = self._open.get(number)
        if shard is None:
            while len(self._open) >= _MAX_OPEN_SHARDS:
                self._open.popitem(last=False)
            dataset = self._dataset
            opened = open_shard(dataset.place, dataset.shards[number], dataset.column)
            shard = self._open[number] = _Shard(opened, dataset.append)
        return shard


class _Shard:
    """An open shard as part of the stream: its units with the ends of their documents."""

    def __init__(self, opened: OpenShard, append: int | None) -> None:
        self._opened, self._append = opened, append
        self.is_free = opened.is_mapped and append is None
        self.row_starts = _starts(opened.rows.tolist())
        lengths: Counts = opened.tokens if append is None else opened.tokens + opened.rows
        self.token_starts = _starts(lengths.tolist())
        self._views: dict[int, Unit] = {}

    def view(self, unit: int) -> Unit:
        """A unit that costs nothing to keep."""
        found = self._views.get(unit)
        if found is None:
            found = self._views[unit] = self._opened.load(unit)
        return found

    def load(self, unit: int) -> Unit:
        loaded = self._opened.load(unit)
        return loaded if self._append is None else loaded.with_ends(self._append)


class _UnitCache:
    """Units that cost memory: those used last, up to `_CACHE_BYTES`, some of them still being read."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._units: OrderedDict[tuple[int, int], Future[Unit]] = OrderedDict()

    def begin(self, key: tuple[int, int], shard: _Shard) -> Future[Unit]:
        with self._lock:
            found = self._units.get(key)
            if found is None or (found.done() and found.exception() is not None):
                self._pool = self._pool or ThreadPoolExecutor(_READERS, "shard-reader")
                found = self._units[key] = self._pool.submit(shard.load, key[1])
            self._units.move_to_end(key)
            return found

    def get(self, key: tuple[int, int], shard: _Shard) -> Unit:
        unit = self.begin(key, shard).result()
        self._evict()
        return unit

    def _evict(self) -> None:
        with self._lock:
            done = [(key, f.result().ids.nbytes) for key, f in self._units.items() if f.done() and not f.exception()]
            total = sum(size for _, size in done)
            for key, size in done[:-_LEAST_UNITS]:
                if total <= _CACHE_BYTES:
                    return
                del self._units[key]
                total -= size


def _starts(counts: list[int]) -> list[int]:
    """What lies before each, and the total."""
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return starts


def _cut(starts: list[int], at: int, length: int) -> Iterator[tuple[int, int, int]]:
    """(part, first within it, count) that together are [at, at + length), where part i begins at `starts[i]`."""
    part = bisect_right(starts, at) - 1
    while length:
        here = min(length, starts[part + 1] - at)
        if here:
            yield part, at - starts[part], here
            at, length = at + here, length - here
        part += 1
