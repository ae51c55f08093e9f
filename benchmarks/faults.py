"""Where faults strike: which of a run's processes is which rank, and which only stand by."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
from processes import BenchmarkError, Tree

STANDBY_READY = "standby ready"
"""What our command prints on its console when a standby process has everything imported."""
_RANK_LOG = re.compile(r"attempt_(\d+)/rank_(\d+)\.log$")
_WORKER = "TrainWorker"


def ranks(processes: Iterable[psutil.Process]) -> dict[int, psutil.Process]:
    """The living ranks among `processes`, by rank: those whose output goes to a log of the newest attempt."""
    found: dict[tuple[int, int], list[psutil.Process]] = {}
    for process in processes:
        if match := _RANK_LOG.search(_output(process)):
            found.setdefault((int(match[1]), int(match[2])), []).append(process)
    newest = max((attempt for attempt, _ in found), default=0)
    # A rank's own children write to the same file: the rank is the first of them.
    return {rank: min(own, key=_age) for (attempt, rank), own in sorted(found.items()) if attempt == newest}


def standbys(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """The processes of our command among `processes` that could be a rank and are none."""
    return [p for p in processes if _WORKER in _command(p) and not _RANK_LOG.search(_output(p))]


def _output(process: psutil.Process) -> str:
    try:
        return str(Path(f"/proc/{process.pid}/fd/1").readlink())
    except OSError:
        return ""


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def _age(process: psutil.Process) -> tuple[float, int]:
    try:
        return process.create_time(), process.pid
    except psutil.NoSuchProcess:
        return float("inf"), process.pid


class Standby:
    """Waits until the command at `tree` has filled its standby processes."""

    def __init__(self, tree: Tree, patience_s: float) -> None:
        self._tree, self._patience_s, self._seen = tree, patience_s, 0
        self.is_told = True
        """Whether the command has told of every standby process that was waited for."""

    def wait(self) -> bool:
        """Wait for a line that tells of it since the last fault; False when there was none within the patience."""
        try:
            self._tree.wait_for(lambda: self._count() > self._seen, STANDBY_READY, self._patience_s)
        except BenchmarkError:
            if not self._tree.is_running:
                raise
            self.is_told = False
            return False
        return True

    def fault(self) -> None:
        """Say that a fault strikes now: lines before it tell of what it will use up."""
        self._seen = self._count()

    def _count(self) -> int:
        return self._tree.output.read_text(errors="replace").count(STANDBY_READY)


def wait_for_rank(tree: Tree, rank: int, timeout_s: float) -> psutil.Process:
    """The process that is `rank` now. Raises `BenchmarkError` when there is none in time."""
    deadline = time.monotonic() + timeout_s
    while (found := ranks(tree.processes()).get(rank)) is None:
        if not tree.is_running:
            raise tree.error(f"ended before rank {rank} was found")
        if time.monotonic() > deadline:
            raise tree.error(f"no process of rank {rank} after {timeout_s:.0f} s")
        time.sleep(0.05)
    return found
