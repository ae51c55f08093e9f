"""Run the real command in a process of its own, and see what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
DEMO = (
    "--config",
    str(ROOT / "configs" / "demo.toml"),
    "--data-arg",
    "MOCK",
    "--seq-length",
    "32",
    "--eval-iters",
    "1",
)
# Standing by costs every run the imports of a process more, a dashboard some seconds: only those who look ask for them.
DEMO += ("--lr-decay-samples", "4800", "--standby-processes", "0", "--ray-dashboard", "0")
FOUR = (*DEMO, "--gpus-per-node", "4", "--micro-batch-size", "2", "--hidden-size", "64", "--ffn-hidden-size", "128")
FOUR += ("--kv-channels", "16", "--log-interval", "1", "--eval-interval", "0")
"""Four ranks that share a batch of 16; a model so small that steps take a tenth of a second."""
PATIENCE_S = 600
_MARK = "RAYTRAIN_TEST_MARK"


class Sandbox:
    """A home folder, a temporary folder and a working folder of a test's own; knows every process started in it."""

    def __init__(self, work: Path) -> None:
        self.work, self._mark = work, uuid.uuid4().hex
        # Short, as Ray's sockets want.
        self.root = Path(tempfile.mkdtemp(prefix="rt-", dir="/tmp"))
        self.home, self.temporary = self.root / "home", self.root / "t"
        self.home.mkdir()
        self.temporary.mkdir()

    def environment(self, **extra: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if k in ("PATH", "LANG", "PYTHONPATH", "VIRTUAL_ENV")}
        own = {"HOME": str(self.home), "TMPDIR": str(self.temporary), _MARK: self._mark, "PYTHON": sys.executable}
        return kept | own | {"OMP_NUM_THREADS": "1"} | extra

    def start(self, *arguments: str, **extra: str) -> Command:
        return Command([sys.executable, "-m", "raytrain_llama3", *arguments], self.work, self.environment(**extra))

    def start_program(self, program: Sequence[str], **extra: str) -> Command:
        return Command(program, self.work, self.environment(**extra))

    def run(self, *arguments: str, **extra: str) -> Command:
        command = self.start(*arguments, **extra)
        command.wait()
        return command

    def leftovers(self, patience_s: float = 5.0) -> list[str]:
        """Processes and files that are still there once the command has ended."""
        deadline = time.monotonic() + patience_s
        while (processes := self._processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        files = [str(p) for folder in (self.home, self.temporary) for p in folder.iterdir()]
        return [f"{p.pid} {' '.join(p.cmdline())[:80]}" for p in processes] + files

    def rank_process(self, attempt: int, rank: int, logs: Path | None = None) -> psutil.Process:
        """The process that is this rank: the one whose output is the rank's log."""
        log = (logs or self.work / "logs" / "demo") / f"attempt_{attempt}" / f"rank_{rank}.log"
        for process in psutil.process_iter():
            try:
                if Path(f"/proc/{process.pid}/fd/1").readlink() == log:
                    return process
            except OSError:
                continue
        raise AssertionError(f"no process writes {log}")

    def close(self) -> None:
        for process in self._processes():
            process.kill()
        shutil.rmtree(self.root, ignore_errors=True)

    def _processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(_MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found


class Command:
    """A running command and the lines that it has written."""

    def __init__(self, program: Sequence[str], folder: Path, environment: dict[str, str]) -> None:
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self.process = subprocess.Popen(
            program,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str, after: int = 0) -> re.Match[str]:
        """The first line that matches, of those after the first `after`."""
        deadline = time.monotonic() + PATIENCE_S
        with self._changed:
            while True:
                for line in self.lines[after:]:
                    if match := re.search(pattern, line):
                        return match
                if not self._reader.is_alive() or not self._changed.wait(deadline - time.monotonic()):
                    raise AssertionError(f"no line matches {pattern!r} in\n{self.output}")

    def wait_between_saves(self, interval: int) -> None:
        """Until the next save is over and two steps more are done: what happens now meets no save, and loses steps."""
        reached = max(int(step) for step in re.findall(r"^step +(\d+)/", self.output, re.MULTILINE))
        self.wait_for(rf"step +{(reached // interval + 1) * interval + 2}/")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        try:
            code = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"still running after {PATIENCE_S} s:\n{self.output}") from None
        self._reader.join(10)
        return code

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Those of one kind in the run's metrics.jsonl."""
    return _lines(folder / "metrics.jsonl", kind)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Those of one kind in the run's events.jsonl."""
    return _lines(folder / "events.jsonl", kind)


def _lines(path: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in map(json.loads, path.read_text().splitlines()) if record["kind"] == kind]
