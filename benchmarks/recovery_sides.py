"""The three trainings whose recovery is compared: ours, torchrun's and Ray Train's."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faults
import records
import tiny
from processes import Tree, environment

OURS, TORCHRUN, RAY_TRAIN = "ours", "torchrun", "Ray Train"
_TIMEOUT_S = 300.0
_ACCOUNT_S = 5.0
_SETTLE_S = 3.0
_MANY = 1_000_000

MODEL: dict[str, Any] = tiny.MODEL | {
    "train-iters": _MANY,
    "save-interval": 20,
    "max-checkpoints": 3,
    "exp-name": "run",
}
OWN_FLAGS: dict[str, Any] = {"standby-processes": 1, "max-restarts": _MANY, "log-interval": 20}


@dataclass(frozen=True, slots=True)
class Recovery:
    """One fault got over. A phase that its system does not tell of is missing in `phases`."""

    rank: int
    seconds: float
    phases: dict[str, float]
    repeated_steps: int
    """Steps that had been told of and were trained again."""
    processes: dict[str, int]
    """Ours: how many of the ranks' processes were kept, had stood by, or were started."""


Phases = Callable[["Struck"], tuple[dict[str, float], dict[str, int]]]
"""Seconds by phase, and our processes by what became of them; empty where they are not told."""


@dataclass(frozen=True, slots=True)
class Struck:
    """A rank that was killed at a Unix time, and the first step of the attempt that followed."""

    rank: int
    killed_at: float
    step: dict[str, Any]
    repeated_steps: int


class Side:
    """One of the three trainings, whose steps and saves are JSON lines in `file`."""

    def __init__(self, name: str, tree: Tree, file: Path, phases: Phases) -> None:
        self.name, self.tree = name, tree
        self.standby: faults.Standby | None = None
        self.steps: list[dict[str, Any]] = []
        self._phases, self._tail, self._read = phases, records.Tail(file), 0
        self._firsts: list[dict[str, Any]] = []
        self._saved: set[Any] = set()

    def has_saved(self) -> bool:
        """Whether the present attempt has published a checkpoint."""
        self._update()
        return bool(self._firsts) and self._firsts[-1]["attempt"] in self._saved

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let it run within the block, ready for a fault."""
        self.tree.signal(signal.SIGCONT)
        try:
            time.sleep(_SETTLE_S)
            self.tree.wait_for(self.has_saved, "checkpoint", _TIMEOUT_S)
            if self.standby is not None:
                self.standby.wait()
            yield
        finally:
            self.tree.signal(signal.SIGSTOP)

    def strike(self, rank: int) -> Struck:
        """Kill `rank` now, and see a step finished again. Raises `BenchmarkError` when that fails."""
        process = faults.wait_for_rank(self.tree, rank, _TIMEOUT_S)
        if self.standby is not None:
            self.standby.fault()
        self._update()
        # Steps of the present attempt are told with half a second's delay: they are no recovery.
        attempts = len(self._firsts)
        killed_at = time.time()
        process.kill()
        self.tree.wait_for(lambda: self._attempts() > attempts, "recovery", _TIMEOUT_S)
        step = self._firsts[attempts]
        last = self.steps[self.steps.index(step) - 1]["step"]
        if not 1 < step["step"] <= last + 1:
            raise self.tree.error(f"went on with step {step['step']} after step {last}: not from the newest checkpoint")
        return Struck(rank, killed_at, step, last + 1 - step["step"])

    def account(self, struck: Struck) -> Recovery:
        """Where the seconds went."""
        phases, processes = self._phases(struck)
        seconds = struck.step["time"] - struck.killed_at
        return Recovery(struck.rank, seconds, phases, struck.repeated_steps, processes)

    def _attempts(self) -> int:
        self._update()
        return len(self._firsts)

    def _update(self) -> None:
        lines = self._tail.read()
        for line in lines[self._read :]:
            if line["kind"] == "save":
                self._saved.add(line["attempt"])
            elif line["kind"] == "step":
                if not self.steps or self.steps[-1]["attempt"] != line["attempt"]:
                    self._firsts.append(line)
                self.steps.append(line)
        self._read = len(lines)


class Sides:
    """Starts the three, each in a folder of its own."""

    def __init__(self, folder: Path, given: argparse.Namespace) -> None:
        self._folder, self._given = folder, given
        own = environment(folder, folder / "bytecode", 1)
        here = str(Path(__file__).parent)
        # Ray Train's workers import the peer's modules. Ray's workers run at nice 15 otherwise; ours do not.
        more = {"PYTHONPATH": os.pathsep.join([own["PYTHONPATH"], here]), "RAY_worker_niceness": "0"}
        more |= {"TORCHDYNAMO_DISABLE": "1", "RAY_AUTH_MODE": "disabled", "RAY_TRAIN_V2_ENABLED": "1"}
        more |= {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": str(given.ray_train_poll_s)}
        self._own, self._peers = own, own | more

    def ours(self) -> contextlib.AbstractContextManager[Side]:
        """Our command, with a Ray of its own."""
        folder = self._folder / "a"
        tensorboard = folder / "run" / "tensorboard"
        command = [sys.executable, "-m", "raytrain_llama3", *self._flags(folder, OWN_FLAGS)]
        phases = _told_by_us(tensorboard / "events.jsonl")
        return self._started(OURS, command, self._own, folder, tensorboard / "metrics.jsonl", phases)

    def torchrun(self) -> contextlib.AbstractContextManager[Side]:
        """The launcher that comes with torch: it restarts all processes."""
        folder = self._folder / "b"
        script, file = str(Path(__file__).with_name("torchrun_train.py")), folder / "records.jsonl"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--monitor-interval=0.1"]
        launcher += [f"--nproc-per-node={self._given.ranks}", f"--max-restarts={_MANY}"]
        command = [*launcher, script, "--records", str(file), *self._flags(folder, {})]
        phases = _told_by_peer(file, lambda at: records.torchrun_noticed(folder / "output.txt", at))
        return self._started(TORCHRUN, command, self._peers, folder, file, phases)

    def ray_train(self) -> contextlib.AbstractContextManager[Side]:
        """Ray Train's TorchTrainer, which starts a new group of workers."""
        folder = self._folder / "c"
        script, file = str(Path(__file__).with_name("ray_train_peer.py")), folder / "records.jsonl"
        command = [sys.executable, script, "--records", str(file), "--ray-folder", str(self._folder / "r")]
        noticed = records.Tail(Path(f"{file}.noticed"))
        phases = _told_by_peer(file, lambda at: next((x["time"] for x in noticed.read() if x["time"] > at), None))
        return self._started(RAY_TRAIN, command + self._flags(folder, {}), self._peers, folder, file, phases)

    def _flags(self, folder: Path, more: Mapping[str, Any]) -> list[str]:
        ranks = self._given.ranks
        flags = {**MODEL, "exp-dir": folder, "gpus-per-node": ranks, "global-batch-size": 2 * ranks, **more}
        return [item for name, value in flags.items() for item in (f"--{name}", str(value))]

    @contextlib.contextmanager
    def _started(
        self, name: str, command: list[str], variables: Mapping[str, str], folder: Path, file: Path, phases: Phases
    ) -> Iterator[Side]:
        side = Side(name, Tree(name, command, variables, folder), file, phases)
        try:
            side.tree.wait_for(side.has_saved, "checkpoint", _TIMEOUT_S)
            if name == OURS:
                side.standby = faults.Standby(side.tree, self._given.standby_wait_s)
            side.tree.signal(signal.SIGSTOP)
            print(f"{name} trains", flush=True)
            yield side
        finally:
            side.tree.end(patience_s=60)


def _told_by_us(events: Path) -> Phases:
    """As our command accounts for a recovery, once it is over."""
    tail = records.Tail(events)

    def phases(struck: Struck) -> tuple[dict[str, float], dict[str, int]]:
        deadline = time.monotonic() + _ACCOUNT_S
        while events.exists() and time.monotonic() < deadline:
            for line in records.recoveries(tail.read()):
                if line["attempt"] == struck.step["attempt"]:
                    return {name.replace("_", " "): s for name, s in line["phases"].items()}, line["processes"]
            time.sleep(0.1)
        return {}, {}

    return phases


def _told_by_peer(file: Path, noticed: Callable[[float], float | None]) -> Phases:
    """When a peer's launcher noticed, and what the new rank 0 spent. `start` holds clearing and placing."""
    tail = records.Tail(file)

    def phases(struck: Struck) -> tuple[dict[str, float], dict[str, int]]:
        deadline = time.monotonic() + _ACCOUNT_S
        while time.monotonic() < deadline:
            told = [x for x in tail.read() if x["kind"] == "phases" and x["attempt"] == struck.step["attempt"]]
            at = noticed(struck.killed_at)
            if told and at is not None:
                seconds = told[0]["seconds"]
                last = {"load": seconds["model"] + seconds["load"], "first step": seconds["first_step"]}
                start = struck.step["time"] - sum(last.values()) - at
                return {"detect": at - struck.killed_at, "start": start} | last, {}
            time.sleep(0.1)
        return {}, {}

    return phases
