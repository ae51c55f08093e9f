"""One open shard: Arrow record batches as numpy views of the mapped file, nothing copied."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raytrain_llama3.data.manifest import Shard
from raytrain_llama3.errors import DataError

COLUMN = "tokens"

Ids = npt.NDArray[Any]
"""Token ids as stored, uint16 or uint32, `[tokens]`."""


class OpenShard:
    """A mapped Arrow IPC file with one column `tokens: list<uint16 | uint32>`, a row a document.

    Raises `DataError` when the file is missing, cut short, not Arrow, or holds other counts than `shard` says.
    """

    def __init__(self, folder: Path, shard: Shard) -> None:
        self.path, self.shard = folder / shard.file, shard
        self._check_size()
        self._columns = self._open()
        # `flatten` honours the offsets of a slice, unlike `values`; without nulls it copies nothing.
        self._ids: list[Ids] = [column.flatten().to_numpy(zero_copy_only=True) for column in self._columns]
        self._token_starts = _starts([len(ids) for ids in self._ids])
        self._row_starts = _starts([len(column) for column in self._columns])
        self._check_counts()

    def copy_tokens(self, start: int, stop: int, out: npt.NDArray[np.int64]) -> None:
        """Write the shard's tokens [start, stop) into `out`, `[stop - start]`."""
        batch = int(np.searchsorted(self._token_starts, start, side="right")) - 1
        done = start
        while done < stop:
            base = int(self._token_starts[batch])
            ids = self._ids[batch][done - base : stop - base]
            out[done - start : done - start + len(ids)] = ids
            done += len(ids)
            batch += 1

    def row_start(self, row: int) -> int:
        """Tokens of the shard before document `row`; `row` may be the number of documents."""
        if row == self.shard.documents:
            return self.shard.tokens
        batch = int(np.searchsorted(self._row_starts, row, side="right")) - 1
        ends = self._row_ends(batch)
        within = row - int(self._row_starts[batch])
        return int(self._token_starts[batch]) + (int(ends[within - 1]) if within else 0)

    def row_of(self, token: int) -> int:
        """The document, counted within the shard, that holds token number `token` of the shard."""
        batch = int(np.searchsorted(self._token_starts, token, side="right")) - 1
        within = int(np.searchsorted(self._row_ends(batch), token - int(self._token_starts[batch]), side="right"))
        return int(self._row_starts[batch]) + within

    def documents(self) -> Iterator[Ids]:
        """Every document's ids, in order, as views."""
        for batch, ids in enumerate(self._ids):
            yield from np.split(ids, self._row_ends(batch)[:-1]) if len(self._columns[batch]) else ()

    def _row_ends(self, batch: int) -> npt.NDArray[np.int64]:
        offsets = self._columns[batch].offsets.to_numpy(zero_copy_only=True)
        return np.asarray(offsets[1:] - offsets[0], dtype=np.int64)

    def _check_size(self) -> None:
        try:
            found = self.path.stat().st_size
        except OSError as error:
            raise DataError(
                f"shard {self.path} cannot be read ({error}); restore it or make the dataset again"
            ) from error
        if found != self.shard.bytes:
            how = "truncated" if found < self.shard.bytes else "not the file that was written"
            raise DataError(
                f"shard {self.path} is {how}: {found} bytes, the manifest says {self.shard.bytes}; copy it again or "
                f"make the dataset again"
            )

    def _open(self) -> list[Any]:
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(self.path)))
            schema = reader.schema
            columns = [reader.get_batch(i).column(COLUMN) for i in range(reader.num_record_batches)]
            for column in columns:
                column.validate()
        except (OSError, pa.ArrowException, KeyError) as error:
            raise DataError(
                f"shard {self.path} is not an Arrow IPC file with a column {COLUMN!r} ({error}); make the dataset again"
            ) from error
        wanted = (pa.list_(pa.uint16()), pa.list_(pa.uint32()))
        if schema.field(COLUMN).type not in wanted or any(c.null_count or c.flatten().null_count for c in columns):
            raise DataError(
                f"shard {self.path}: column {COLUMN!r} is {schema.field(COLUMN).type}, wanted list<uint16> or "
                f"list<uint32> without nulls; make the dataset again"
            )
        return columns

    def _check_counts(self) -> None:
        found = int(self._row_starts[-1]), int(self._token_starts[-1])
        if found != (self.shard.documents, self.shard.tokens):
            raise DataError(
                f"shard {self.path} holds {found[0]} documents and {found[1]} tokens, the manifest says "
                f"{self.shard.documents} and {self.shard.tokens}; make the dataset again"
            )


class TokenHash:
    """SHA-256 over documents, the same however they are grouped into record batches."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, ids: Ids) -> None:
        """Take in one document, `[tokens]`."""
        self._hash.update(len(ids).to_bytes(8, "little"))
        self._hash.update(np.ascontiguousarray(ids))

    def hexdigest(self) -> str:
        """Of all documents so far."""
        return self._hash.hexdigest()


def _starts(counts: list[int]) -> npt.NDArray[np.int64]:
    """`[len(counts) + 1]`: what lies before each, and the total."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
