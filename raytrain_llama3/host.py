"""What the driver and the ranks both ask of the host that they run on: processes to end, logs to read."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

_LOOK_S = 0.1
_TAIL_LINES = 20
_TAIL_BYTES = 16_384


def end_pids(pids: Iterable[int], patience_s: float) -> list[int]:
    """`end_processes` of those of `pids` that are there; those that remain."""
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    return end_processes(processes, patience_s)


def end_processes(processes: Iterable[psutil.Process], patience_s: float) -> list[int]:
    """See that `processes` are gone within `patience_s`; kill what is not. Those that remain after as long again."""
    alive = _wait_gone(list(processes), patience_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return [process.pid for process in _wait_gone(alive, patience_s)]


def _wait_gone(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that are still there after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while left := [process for process in processes if not _is_gone(process)]:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            break
        # A child of ours is waited for, which also takes it off the process table.
        psutil.wait_procs(left[:1], timeout=min(remaining_s, _LOOK_S))
    return left


def _is_gone(process: psutil.Process) -> bool:
    """Whether it has ended. As process 1 of a container we inherit orphans: zombies until they are asked for."""
    try:
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            return False
        os.waitpid(process.pid, os.WNOHANG)
    except (psutil.NoSuchProcess, ChildProcessError):
        pass
    return True


def log_tail(path: Path) -> tuple[str, ...]:
    """The last lines of a rank's log, where this host can read it."""
    return tuple(end_of(path, _TAIL_BYTES).splitlines()[-_TAIL_LINES:])


def end_of(path: Path, size_bytes: int) -> str:
    """The last `size_bytes` of a file as text; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size_bytes))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
