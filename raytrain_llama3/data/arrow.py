"""Arrow IPC shards: mapped into memory where they are local, read by record batch where they are not."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pyarrow as pa

from raytrain_llama3.data.filesystem import Place
from raytrain_llama3.data.shard import Counts, Unit, check_type, column_name, unit_of
from raytrain_llama3.errors import DataError


class ArrowShard:
    """A file of record batches, or a local stream of them (what the library `datasets` writes).

    `units` are the documents and tokens of each record batch where they are known; else they are found by looking,
    which for a remote file means to read it.
    """

    def __init__(self, place: Place, path: str, column: str | None, units: tuple[tuple[int, int], ...] | None) -> None:
        self._place, self._name = place, place.name(path)
        self.is_mapped = place.is_local
        # One file position serves all reads.
        self._lock = threading.Lock()
        self._file = place.reading(self._name, lambda: place.open(path))
        self._reader = self._opened()
        self._schema = self._reader.schema
        self._column = column_name(self._name, self._schema.names, column)
        check_type(self._name, self._column, self._schema.field(self._column).type)
        counts = self._counted() if units is None else list(units)
        if len(counts) != self._reader.num_record_batches:
            raise DataError(
                f"shard {self._name} has {self._reader.num_record_batches} record batches, the manifest says "
                f"{len(counts)}; make the dataset again"
            )
        found = np.array(counts, dtype=np.int64).reshape(-1, 2)
        self.rows: Counts = found[:, 0]
        self.tokens: Counts = found[:, 1]
        self._first_rows = np.concatenate([[0], np.cumsum(self.rows)])

    def load(self, unit: int) -> Unit:
        """Read one record batch; of a local file only its place."""
        name = f"{self._name}, record batch {unit}"
        try:
            array = self._place.reading(name, lambda: self._batch(unit))
        except OSError as error:
            raise DataError(f"{name}: damaged ({error}); restore it") from error
        found = unit_of(self._name, int(self._first_rows[unit]), int(self.rows[unit]), array)
        if len(found.ids) != self.tokens[unit]:
            raise DataError(f"{name} holds {len(found.ids)} tokens, and it had {self.tokens[unit]}; restore the shard")
        return found

    def _counted(self) -> list[tuple[int, int]]:
        batches = [
            self._place.reading(self._name, lambda i=i: self._batch(i))  # type: ignore[misc]
            for i in range(self._reader.num_record_batches)
        ]
        return [(len(b), _length(b)) for b in batches]

    def _batch(self, number: int) -> Any:
        try:
            with self._lock:
                column = self._reader.get_batch(number).column(self._column)
            # Else a damaged one could tell of more ids than there are, or of fewer than none.
            column.validate()
            return column
        except pa.ArrowException as error:
            raise DataError(f"shard {self._name}, record batch {number}: damaged ({error}); restore it") from error

    def _opened(self) -> Any:
        try:
            return self._place.reading(self._name, lambda: pa.ipc.open_file(self._file))
        except pa.ArrowException as error:
            if self.is_mapped:
                try:
                    self._file.seek(0)
                    return _Stream(pa.ipc.open_stream(self._file).read_all())
                except pa.ArrowException:
                    pass
            raise DataError(
                f"shard {self._name} is not an Arrow IPC file ({error}); restore it or make the dataset again"
            ) from error


class _Stream:
    """A mapped stream, all of whose batches were found by walking through it once."""

    def __init__(self, table: Any) -> None:
        self.schema, self._batches = table.schema, table.to_batches()
        self.num_record_batches = len(self._batches)

    def get_batch(self, number: int) -> Any:
        return self._batches[number]


def _length(array: Any) -> int:
    if not len(array):
        return 0
    return int(array.offsets[-1].as_py()) - int(array.offsets[0].as_py())
