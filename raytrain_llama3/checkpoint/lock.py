"""One run at a time may publish into a folder.

Two guards, because each has a hole. `flock` dies with its process but does not reach other hosts on every shared
filesystem. The token in the file rises with every holder and is compared before each publishing, so a driver that
was cut off from its cluster and replaced finds out that it no longer owns the folder.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from raytrain_llama3.checkpoint.durable import read_json
from raytrain_llama3.errors import CheckpointError

LOCK_NAME = ".lock"
# Mounts without flock (Lustre by default, object-store mounts) answer one of these: the token alone guards there.
_NO_FLOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a folder, as written in its lock file. `time` is Unix time in seconds."""

    token: int
    host: str
    pid: int
    time: float

    def __str__(self) -> str:
        return (
            f"process {self.pid} on {self.host}, since {datetime.fromtimestamp(self.time, UTC):%Y-%m-%d %H:%M:%S} UTC"
        )


@contextmanager
def hold(root: Path) -> Iterator[Holder]:
    """Hold the folder `root`, which is made if it is missing, until the block ends or the process dies.

    Raises `CheckpointError` naming the holder when a living process on this machine has it.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(root / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be used as the checkpoint folder: {error}") from error
    try:
        _flock(descriptor, root)
        yield _take_token(descriptor, root)
    finally:
        os.close(descriptor)


def check_held(root: Path, mine: Holder) -> None:
    """Raise `CheckpointError` when the lock file of `root` names another run than `mine`."""
    present = read_holder(root)
    if present != mine:
        raise CheckpointError(
            f"{root}: another run took over ({present or 'its lock file is gone'}), so this one (process {mine.pid} on "
            f"{mine.host}) no longer publishes. Let only one of them run, or give each a checkpoint_path of its own"
        )


def read_holder(root: Path) -> Holder | None:
    """The last run that took `root`, dead or alive; None when there was none or the file cannot be read."""
    found = read_json(root / LOCK_NAME)
    try:
        return None if found is None else Holder(**found)  # type: ignore[arg-type]
    except TypeError:
        return None


def _flock(descriptor: int, root: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise CheckpointError(
            f"{root}: another run holds this checkpoint folder: {read_holder(root) or 'unknown'}. Stop that run, or "
            f"give this one another folder (checkpoint_path)"
        ) from error
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise CheckpointError(f"{root / LOCK_NAME}: cannot be locked: {error}") from error


def _take_token(descriptor: int, root: Path) -> Holder:
    former = read_holder(root)
    # Without a readable former token, the clock is larger than any count of runs can be.
    unknown = int(time.time()) if os.fstat(descriptor).st_size else 0
    mine = Holder((former.token if former else unknown) + 1, socket.gethostname(), os.getpid(), time.time())
    content = json.dumps(asdict(mine)).encode() + b"\n"
    try:
        # In place, since a rename would leave the flock on a file that is gone; never empty in between.
        os.pwrite(descriptor, content, 0)
        os.ftruncate(descriptor, len(content))
        os.fsync(descriptor)
    except OSError as error:
        raise CheckpointError(f"{root / LOCK_NAME}: cannot be written: {error}") from error
    return mine
