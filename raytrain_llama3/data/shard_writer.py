"""Writing a dataset: documents into record batches, record batches into shards, all of it at once into place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raytrain_llama3.data.manifest import MANIFEST_FILE, Shard
from raytrain_llama3.data.shard import COLUMN, Ids, TokenHash
from raytrain_llama3.errors import DataError

_BATCH_TOKENS = 1 << 20
_MAX_DOCUMENT_TOKENS = (1 << 31) - 1 - _BATCH_TOKENS
"""Offsets of an Arrow list are 32-bit and a record batch holds whole documents."""


class ShardWriter:
    """Writes documents to `folder`/shard-00000.arrow and on, each shard of at least `shard_tokens` but the last.

    A context manager: leaving it normally finishes the last shard, after which `shards` lists them all.
    """

    def __init__(self, folder: Path, id_type: np.dtype[Any], shard_tokens: int) -> None:
        self._folder, self._id_type, self._shard_tokens = folder, id_type, shard_tokens
        self._batch_tokens = max(1, min(_BATCH_TOKENS, shard_tokens // 4))
        self._schema = pa.schema([pa.field(COLUMN, pa.list_(pa.from_numpy_dtype(id_type)), nullable=False)])
        self._file: Any = None
        self._shards: list[Shard] = []
        self._pending: list[Ids] = []
        self._pending_tokens = self._documents = self._tokens = 0
        self._hash = TokenHash()

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The shards finished so far."""
        return tuple(self._shards)

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
        self._documents += 1
        self._tokens += len(ids)
        if self._pending_tokens >= self._batch_tokens:
            self._write_batch()
        if self._tokens >= self._shard_tokens:
            self._finish_shard()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._finish_shard()
        elif self._file is not None:
            self._file.close()

    @property
    def _name(self) -> str:
        return f"shard-{len(self._shards):05d}.arrow"

    def _write_batch(self) -> None:
        if not self._pending:
            return
        if self._file is None:
            self._file = pa.ipc.new_file(str(self._folder / self._name), self._schema)
        offsets = np.cumsum([0, *map(len, self._pending)], dtype=np.int64).astype(np.int32)
        column = pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(self._pending)))
        self._file.write_batch(pa.record_batch([column], schema=self._schema))
        self._pending, self._pending_tokens = [], 0

    def _finish_shard(self) -> None:
        self._write_batch()
        if self._file is None:
            return
        self._file.close()
        size = (self._folder / self._name).stat().st_size
        self._shards.append(Shard(self._name, self._documents, self._tokens, size, self._hash.hexdigest()))
        self._file, self._documents, self._tokens, self._hash = None, 0, 0, TokenHash()


@contextmanager
def replacing(output: Path, overwrite: bool) -> Iterator[Path]:
    """An empty folder beside `output` to write into, renamed to `output` when the block ends well, else removed.

    Raises `DataError`, before anything is written, when `output` is there and is not ours to replace: a dataset
    without `overwrite`, or a folder with something else in it.
    """
    output = output.expanduser().resolve()
    _check_free(output, overwrite)
    fresh = output.with_name(f".{output.name}.writing-{os.getpid()}")
    former = output.with_name(f".{output.name}.former-{os.getpid()}")
    fresh.mkdir(parents=True)
    try:
        yield fresh
        if output.exists():
            output.rename(former)
        fresh.rename(output)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        if output.exists():
            shutil.rmtree(former, ignore_errors=True)


def _check_free(output: Path, overwrite: bool) -> None:
    if not output.exists():
        return
    if (output / MANIFEST_FILE).is_file():
        if not overwrite:
            raise DataError(f"{output} holds a dataset already; choose another --output, or pass --overwrite")
    elif not output.is_dir() or any(output.iterdir()):
        raise DataError(f"{output} is there and is no dataset, so it is left alone; choose another --output")
