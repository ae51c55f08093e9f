"""Writing one shard: documents into record batches of an Arrow IPC file, put into place when it is whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raytrain_llama3.data.manifest import Shard
from raytrain_llama3.data.shard import COLUMNS, Ids, TokenHash
from raytrain_llama3.errors import DataError

_BATCH_TOKENS = 1 << 20
_MAX_DOCUMENT_TOKENS = (1 << 31) - 1 - _BATCH_TOKENS
"""Offsets of an Arrow list are 32-bit and a record batch holds whole documents."""


class ShardWriter:
    """Writes documents to the file `path`, which is there once `finish` has returned, and whole."""

    def __init__(self, path: Path, id_type: np.dtype[Any], batch_tokens: int = _BATCH_TOKENS) -> None:
        # Of this process alone: one that was killed with its parent may yet be at work on the same part.
        self._path, self._fresh = path, path.with_name(f".{path.name}.{os.getpid()}.writing")
        self._id_type, self._batch_tokens = id_type, batch_tokens
        self._schema = pa.schema([pa.field(COLUMNS[0], pa.list_(pa.from_numpy_dtype(id_type)), nullable=False)])
        self._file: Any = None
        self._pending: list[Ids] = []
        self._pending_tokens = 0
        self._units: list[tuple[int, int]] = []
        self._hash = TokenHash()

    def add(self, document: npt.NDArray[Any]) -> None:
        """Append one document's ids, `[tokens]`. Raises `DataError` when it is too long for one Arrow row."""
        if len(document) > _MAX_DOCUMENT_TOKENS:
            raise DataError(
                f"a document of {len(document)} tokens is longer than the {_MAX_DOCUMENT_TOKENS} that fit one row; "
                f"divide it into several files"
            )
        ids = document.astype(self._id_type)
        self._pending.append(ids)
        self._hash.add(ids)
        self._pending_tokens += len(ids)
        if self._pending_tokens >= self._batch_tokens:
            self._write_batch()

    def finish(self) -> Shard | None:
        """Put the file into place; None, and no file, where there was no document."""
        self._write_batch()
        if self._file is None:
            return None
        self._file.close()
        self._fresh.replace(self._path)
        documents, tokens = (sum(column) for column in zip(*self._units, strict=True))
        size = self._path.stat().st_size
        return Shard(self._path.name, documents, tokens, size, self._hash.hexdigest(), tuple(self._units))

    def _write_batch(self) -> None:
        if not self._pending:
            return
        if self._file is None:
            self._file = pa.ipc.new_file(str(self._fresh), self._schema)
        offsets = np.cumsum([0, *map(len, self._pending)], dtype=np.int64).astype(np.int32)
        column = pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(self._pending)))
        self._file.write_batch(pa.record_batch([column], schema=self._schema))
        self._units.append((len(self._pending), self._pending_tokens))
        self._pending, self._pending_tokens = [], 0
