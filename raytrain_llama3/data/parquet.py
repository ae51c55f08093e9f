"""Parquet shards, read by row group."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raytrain_llama3.data.filesystem import Place
from raytrain_llama3.data.shard import Counts, Unit, check_type, column_name, unit_of
from raytrain_llama3.errors import DataError


class ParquetShard:
    """A Parquet file with a column of token ids, whose row groups hold `units` of (documents, tokens).

    What they hold is in the file's footer too, and is taken from there where `units` is None: only in a process that
    may die, as pyarrow ends it over some damaged footers when it is asked for a row group's metadata.
    """

    is_mapped = False

    def __init__(self, place: Place, path: str, column: str | None, units: tuple[tuple[int, int], ...] | None) -> None:
        self._place, self._name = place, place.name(path)
        # A ParquetFile is not made for several threads.
        self._lock = threading.Lock()
        try:
            self._file: Any = place.reading(self._name, lambda: pq.ParquetFile(place.open(path)))
            schema = self._file.schema_arrow
        except pa.ArrowException as error:
            raise DataError(
                f"shard {self._name} is not a Parquet file ({error}); restore it or make the dataset again"
            ) from error
        self._column = column_name(self._name, schema.names, column)
        check_type(self._name, self._column, schema.field(self._column).type)
        groups = self._file.metadata.num_row_groups
        if units is None:
            self._measure(groups)
        elif len(units) != groups:
            raise DataError(
                f"shard {self._name} has {groups} row groups, and it had {len(units)}; restore it or make the dataset "
                f"again"
            )
        else:
            known = np.array(units, dtype=np.int64).reshape(-1, 2)
            self._set_rows(known[:, 0])
            self.tokens: Counts = known[:, 1]

    def _set_rows(self, rows: Counts) -> None:
        self.rows: Counts = rows
        self._first_rows = np.concatenate([[0], np.cumsum(rows)])

    def _measure(self, count: int) -> None:
        metadata = self._file.metadata
        groups = [metadata.row_group(i) for i in range(count)]
        if any(group.num_columns != metadata.num_columns for group in groups):
            raise DataError(f"shard {self._name} is damaged (its row groups lack columns); restore it")
        leaf = next((i for i in range(metadata.num_columns) if _root(metadata, i) == self._column), 0)
        self._set_rows(np.array([group.num_rows for group in groups], dtype=np.int64))
        self.tokens = np.array([self._count(i, group.column(leaf)) for i, group in enumerate(groups)], dtype=np.int64)

    def load(self, unit: int) -> Unit:
        """Read and decode one row group."""
        found = self._read(unit)
        if len(found.ids) != self.tokens[unit]:
            raise DataError(
                f"shard {self._name}, row group {unit} holds {len(found.ids)} tokens, and its footer says "
                f"{self.tokens[unit]}; restore the shard"
            )
        return found

    def _read(self, group: int) -> Unit:
        name = f"shard {self._name}, row group {group}"

        def read() -> Any:
            with self._lock:
                return self._file.read_row_group(group, columns=[self._column]).column(0)

        try:
            column = self._place.reading(name, read)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{name}: damaged ({error}); restore it") from error
        array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
        if isinstance(array, pa.ChunkedArray):
            array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], column.type)
        return unit_of(self._name, int(self._first_rows[group]), int(self.rows[group]), array)

    def _count(self, group: int, chunk: Any) -> int:
        statistics = chunk.statistics if chunk.is_stats_set else None
        if statistics is not None and statistics.has_null_count:
            # An empty list takes a place among the values, and counts as a null there.
            return int(chunk.num_values - statistics.null_count)
        return len(self._read(group).ids)


def _root(metadata: Any, column: int) -> str:
    """The name of the top column that the leaf `column` is part of."""
    return str(metadata.schema.column(column).path).split(".", 1)[0]
