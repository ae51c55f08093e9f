"""A dataset in the making: finished shards survive a kill, and the whole appears at once."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from raytrain_llama3.data.manifest import MANIFEST_FILE, Shard
from raytrain_llama3.errors import DataError

_PLAN, _LOCK, _DONE = "plan.json", "lock", ".done.json"


class WorkFolder:
    """Where the shards of one output are written until all are there."""

    def __init__(self, output: Path, path: Path) -> None:
        self.output, self.path = output, path

    def begin(self, plan: Mapping[str, Any]) -> int:
        """Go on with what an earlier run of the same `plan` finished, dropping anything else; parts that are done."""
        told = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()
        file = self.path / _PLAN
        if not file.is_file() or file.read_text() != told:
            for path in self.path.iterdir():
                if path.name != _LOCK:
                    path.unlink()
            file.write_text(told)
        for path in self.path.glob(".*.writing"):
            path.unlink()
        return len(list(self.path.glob(f"*{_DONE}")))

    def finished(self, part: int) -> Mapping[str, Any] | None:
        """What `finish` noted of a part, if it did."""
        file = self.path / f"{part:05d}{_DONE}"
        return json.loads(file.read_bytes()) if file.is_file() else None

    def finish(self, part: int, shard: Shard | None, left_out: int) -> None:
        """Note that a part is done; after its shard is in place."""
        told = {"shard": asdict(shard) if shard else None, "left_out": left_out}
        fresh = self.path / f".{part:05d}.{os.getpid()}.writing"
        fresh.write_text(json.dumps(told))
        fresh.replace(self.path / f"{part:05d}{_DONE}")

    def publish(self) -> None:
        """Put the folder in the place of `output`."""
        for path in (*self.path.glob(f"*{_DONE}"), self.path / _PLAN, self.path / _LOCK):
            path.unlink(missing_ok=True)
        former = self.path.with_name(f".{self.output.name}.former")
        if self.output.exists():
            self.output.rename(former)
        self.path.rename(self.output)
        shutil.rmtree(former, ignore_errors=True)


@contextlib.contextmanager
def work_folder(output: Path, overwrite: bool) -> Iterator[WorkFolder]:
    """A folder beside `output` to write shards into; it stays when the run is killed, and goes when data is at fault.

    Raises `DataError`, before anything is written, when another process writes the same output, or `output` is there
    and is not ours to replace: a dataset without `overwrite`, or a folder with something else in it.
    """
    output = output.expanduser().resolve()
    _check_free(output, overwrite)
    path = output.with_name(f".{output.name}.unfinished")
    path.mkdir(parents=True, exist_ok=True)
    with (path / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DataError(
                f"{output} is being written by another process; wait, or choose another --output"
            ) from error
        try:
            yield WorkFolder(output, path)
        except DataError:
            shutil.rmtree(path, ignore_errors=True)
            raise


def _check_free(output: Path, overwrite: bool) -> None:
    if not output.exists():
        return
    if (output / MANIFEST_FILE).is_file():
        if not overwrite:
            raise DataError(f"{output} holds a dataset already; choose another --output, or pass --overwrite")
    elif not output.is_dir() or any(output.iterdir()):
        raise DataError(f"{output} is there and is no dataset, so it is left alone; choose another --output")
