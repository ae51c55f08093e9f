"""Process trees that a benchmark starts: find all of one, stop and continue it, end it; nobody else's."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).resolve().parent.parent
_POLL_S = 0.02
_GONE_S = 15


class BenchmarkError(Exception):
    """A process of the benchmark did not do what it was started for; the message says which and where to look."""


class Tree:
    """One started command and every process under it, also those whose parent has gone meanwhile."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name, self.output = name, folder / "output.txt"
        self._known: set[psutil.Process] = set()
        with self.output.open("wb") as output:
            self.started_at = time.time()
            self._root = subprocess.Popen(
                command, cwd=folder, env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        self._known.add(psutil.Process(self._root.pid))

    def processes(self) -> list[psutil.Process]:
        """Every living process of the tree."""
        children: dict[int, list[psutil.Process]] = {}
        for process in psutil.process_iter(["ppid"]):
            children.setdefault(process.info["ppid"], []).append(process)
        fresh = {process for process in self._known if _is_alive(process)}
        self._known = set(fresh)
        while fresh:
            fresh = {child for process in fresh for child in children.get(process.pid, [])} - self._known
            self._known |= fresh
        return [process for process in self._known if _is_alive(process)]

    @property
    def is_running(self) -> bool:
        """Whether the command itself has not ended."""
        return self._root.poll() is None

    def signal(self, number: int) -> None:
        """Send `number` to all processes, then to those born meanwhile."""
        done: set[psutil.Process] = set()
        while fresh := set(self.processes()) - done:
            for process in fresh:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
            done |= fresh

    def wait(self, timeout_s: float) -> int:
        """The command's exit code. Raises `BenchmarkError` when it has not ended in time."""
        try:
            return self._root.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise self.error(f"has not ended after {timeout_s:.0f} s") from None

    def wait_for(self, happened: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Wait until `happened()`. Raises `BenchmarkError` when the command ends before, or time is up."""
        deadline = time.monotonic() + timeout_s
        while not happened():
            if self._root.poll() is not None:
                raise self.error(f"ended with exit code {self._root.returncode} before {what}")
            if time.monotonic() > deadline:
                raise self.error(f"no {what} after {timeout_s:.0f} s")
            time.sleep(_POLL_S)

    def end(self, patience_s: float) -> None:
        """Ask the command to end; after `patience_s` kill whatever is left of its tree."""
        self.signal(signal.SIGCONT)
        if self._root.poll() is None:
            self._root.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._root.wait(patience_s)
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self._root.poll() is None:
            self._root.wait(_GONE_S)
        psutil.wait_procs(list(self._known), timeout=_GONE_S)

    def error(self, what: str) -> BenchmarkError:
        """An error that names the command and shows the last lines of its output."""
        lines = self.output.read_text(errors="replace").splitlines()[-15:]
        return BenchmarkError("\n  | ".join([f"{self.name}: {what}; the last lines of its output:", *lines]))


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def environment(folder: Path, bytecode: Path, threads: int | None) -> dict[str, str]:
    """What every side of a comparison is started with: this shell's, less what would send them different ways.

    Compiled modules are kept in `bytecode`, as an installed package's are, whatever PYTHONDONTWRITEBYTECODE says here.
    Temporary files go to `folder`.
    """
    ours = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RAY_", "TORCHELASTIC_", "OMP_")) and name != "PYTHONDONTWRITEBYTECODE"
    }
    paths = [str(REPOSITORY), *filter(None, [ours.get("PYTHONPATH")])]
    ours |= {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONPYCACHEPREFIX": str(bytecode)}
    ours |= {"TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}
    return ours | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})


def free_ports(count: int) -> list[int]:
    """Ports that are free now: all are held at once, so that no two are the same, and let go together."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def end_on_sigterm() -> None:
    """Take SIGTERM as a reason to clean up and go."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
