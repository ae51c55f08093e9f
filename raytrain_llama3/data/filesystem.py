"""Where shards lie: this machine's files, or any filesystem that `pyarrow.fs` knows by a URI."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import tenacity

from raytrain_llama3.errors import DataError, DataUnavailableError

_PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 10.0
_MAGIC = frozenset("*?[")


@dataclass(frozen=True)
class Place:
    """A path on this machine, or a URI such as `s3://bucket/folder`. Can be sent to another process."""

    uri: str
    retries: int = 5
    """How often a remote read that fails is tried again."""

    @property
    def is_local(self) -> bool:
        """Whether files here can be mapped into memory."""
        return "://" not in self.uri

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        """The filesystem, and the path in it."""
        from pyarrow import fs

        if self.is_local:
            return fs.LocalFileSystem(), str(Path(self.uri).expanduser().absolute())
        address, mark, query = self.uri.partition("?")
        # A pattern's own marks are no part of a URI.
        plain = address[: min((address.find(c) for c in _MAGIC if c in address), default=len(address))]
        if mark and not plain.startswith(("s3://", "gs://", "gcs://", "hdfs://", "abfs://")):
            plain, mark, query = self.uri, "", ""
        try:
            found, path = fs.FileSystem.from_uri(plain + mark + query)
        except (OSError, ValueError) as error:
            raise DataError(f"{self.uri} cannot be opened: {error}") from error
        return found, path + address[len(plain) :]

    def __getstate__(self) -> dict[str, Any]:
        return {"uri": self.uri, "retries": self.retries}

    @property
    def path(self) -> str:
        """The path within its filesystem."""
        return str(self._opened[1])

    def name(self, path: str) -> str:
        """A file of this filesystem as people would write it."""
        return path if self.is_local else f"{self.uri.partition('://')[0]}://{path}"

    def size(self, path: str) -> int | None:
        """Bytes of a file; None where there is none."""
        from pyarrow import fs

        info = self.reading(self.name(path), lambda: self._opened[0].get_file_info(path))
        return int(info.size) if info.type == fs.FileType.File else None

    def is_folder(self, path: str) -> bool:
        """Whether `path` is a folder."""
        from pyarrow import fs

        info = self.reading(self.name(path), lambda: self._opened[0].get_file_info(path))
        return bool(info.type == fs.FileType.Directory)

    def open(self, path: str) -> Any:
        """A file for random reads: mapped into memory where it is local."""
        import pyarrow as pa

        if self.is_local:
            return pa.memory_map(path)
        return self._opened[0].open_input_file(path)

    def read(self, path: str) -> bytes:
        """All of a small file. Raises `FileNotFoundError` where there is none."""

        def whole() -> bytes:
            with self._opened[0].open_input_file(path) as file:
                return bytes(file.readall())

        return self.reading(self.name(path), whole)

    def files(self, path: str, suffixes: tuple[str, ...]) -> list[tuple[str, int]]:
        """(path, bytes) of the files below a folder, or that match a pattern, sorted; hidden ones are left out."""
        if self.is_local and _MAGIC & set(path):
            root = Path(path).anchor
            found = [p for p in Path(root).glob(path.removeprefix(root)) if p.name.endswith(suffixes)]
            return sorted((str(p), p.stat().st_size) for p in found)
        from pyarrow import fs

        plain = path
        while _MAGIC & set(plain):
            plain = str(PurePosixPath(plain).parent)
        selector = fs.FileSelector(plain, recursive=True, allow_not_found=True)
        infos = self.reading(self.name(path), lambda: self._opened[0].get_file_info(selector))
        of_kind = [i for i in infos if i.type == fs.FileType.File and i.path.endswith(suffixes)]
        shown = [i for i in of_kind if not any(p.startswith((".", "_")) for p in _below(i.path, plain))]
        matching = [i for i in shown if plain == path or fnmatch.fnmatchcase(i.path, path)]
        return sorted((i.path, int(i.size)) for i in matching)

    def reading[T](self, what: str, read: Callable[[], T]) -> T:
        """`read()`, tried again where it fails for a reason that may pass.

        Raises the error itself for a reason that stays (no such file, no permission), and for a local file;
        `DataUnavailableError`, naming `what`, when all tries are used up.
        """
        if self.is_local:
            return read()
        tries = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self.retries + 1),
            wait=tenacity.wait_random_exponential(_FIRST_WAIT_S, _LONGEST_WAIT_S),
            retry=tenacity.retry_if_exception(_may_pass),
        )
        try:
            return tries(read)
        except tenacity.RetryError as error:
            last = error.last_attempt.exception()
            raise DataUnavailableError(
                f"{what} cannot be read: {last} (tried {self.retries + 1} times; see data_retries)"
            ) from last


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, OSError) and not isinstance(error, _PERMANENT)


def _below(path: str, folder: str) -> tuple[str, ...]:
    return PurePosixPath(path.removeprefix(folder)).parts
