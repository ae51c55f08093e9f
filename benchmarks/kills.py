"""A soak: whatever is killed around a save, and whenever, the run goes on from the newest published checkpoint.

Two ranks on two Ray nodes of this machine, asynchronous saves every few steps. Of a rank, its writer, the driver and
a node, one is killed at a random moment, fifty times; what and when follows from a seed that is printed. Run it as
`python benchmarks/kills.py [--kills 50] [--seed S]`.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import faults
import psutil
import records
import tiny
from cluster import SETTINGS, TwoNodes
from processes import BenchmarkError, Tree, end_on_sigterm, environment

from raytrain_llama3.checkpoint.folder import damaged_files, iteration_path
from raytrain_llama3.checkpoint.store import CheckpointStore

KINDS = ("rank", "writer", "driver", "node")
_MANY = 1_000_000
_TIMEOUT_S = 300.0
_LOOK_S = 0.002
_LATER_S = 0.25
_CALM_S = 3.0
_GONE_S = 20.0

FLAGS: dict[str, Any] = tiny.MODEL | {
    "num-nodes": 2,
    "gpus-per-node": 1,
    "global-batch-size": 4,
    "learning-rate": 1e-3,
    "log-interval": 1000,
    "save-interval": 3,
    "async-save": 1,
    "max-checkpoints": 2,
    "keep-every": 60,
    "standby-processes": 1,
    "max-restarts": _MANY,
    "max-preemptions": _MANY,
    "node-strikes": _MANY,
    "max-failed-saves": _MANY,
    "node-rejoin-timeout-s": 120,
    "train-iters": _MANY,
    "exp-name": "run",
}


class Run:
    """The command, started again after each kill of its driver, in one folder."""

    def __init__(self, folder: Path, address: str, variables: dict[str, str]) -> None:
        self._folder, self._variables = folder, variables
        self._command = [sys.executable, "-m", "raytrain_llama3"]
        for flag, value in (FLAGS | {"exp-dir": str(folder), "ray-address": address}).items():
            self._command += [f"--{flag}", str(value)]
        board = folder / "run" / "tensorboard"
        self._steps, self._accounts = records.Tail(board / "metrics.jsonl"), records.Tail(board / "events.jsonl")
        self.store = CheckpointStore(folder / "run" / "checkpoints", None)
        self._starts = 0
        self.start()

    def start(self) -> None:
        """Start the command, as a platform does after a driver was lost."""
        self._starts += 1
        self.tree = Tree(f"driver {self._starts}", self._command, self._variables, self._folder / f"d{self._starts}")

    def resumes(self) -> list[int]:
        """The step that each attempt so far resumed from."""
        return [line["resume_step"] for line in self._accounts.read() if line["kind"] == "attempt"]

    def losses(self) -> list[records.Step]:
        """Every step so far, also those that were trained again."""
        return records.steps(self._steps.read())

    def published(self) -> int:
        """The newest complete checkpoint; 0: none yet."""
        return max(self.store.complete(), default=0)

    def await_save(self) -> None:
        """Wait until a save is under way."""
        deadline = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline:
            if self.store.wrecks():
                return
            if not self.tree.is_running:
                raise self.tree.error("ended")
            time.sleep(_LOOK_S)
        raise self.tree.error("does not save")


class Kills:
    """Kills, and looks at what the run does after."""

    def __init__(self, run: Run, nodes: TwoNodes, seed: int) -> None:
        self._run, self._nodes, self._chance = run, nodes, random.Random(seed)
        self.problems: list[str] = []
        self.done: Counter[str] = Counter()

    def one(self, kind: str) -> None:
        """One kill, and the resume after it."""
        run, before = self._run, self._run.published()
        run.tree.wait_for(lambda: run.published() > before, "next checkpoint", _TIMEOUT_S)
        if self._chance.random() < 0.7:
            run.await_save()
            time.sleep(self._chance.uniform(0, _LATER_S))
        else:
            time.sleep(self._chance.uniform(0, _CALM_S))
        victim = self._victim(kind)
        published, attempts = run.published(), len(run.resumes())
        if kind == "node":
            self._nodes.kill_raylet()
        elif victim is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        self.done[kind] += 1
        if kind == "node":
            self._nodes.add()
        if kind == "driver":
            run.tree.wait(_GONE_S)
            self._see_ranks_gone()
            run.start()
        if kind == "writer":
            run.tree.wait_for(lambda: run.published() > published, "checkpoint after a lost writer", _TIMEOUT_S)
            resumed = published
        else:
            run.tree.wait_for(lambda: len(run.resumes()) > attempts, "next attempt", _TIMEOUT_S)
            resumed = run.resumes()[attempts]
        wrong = "" if resumed and resumed >= published else "  WRONG"
        print(
            f"{sum(self.done.values()):3} {kind:7} at published {published:6}: resumed at {resumed:6}{wrong}",
            flush=True,
        )
        if wrong:
            self.problems.append(f"after a kill of {kind}: {published} was published, resumed at {resumed}")

    def _victim(self, kind: str) -> psutil.Process | None:
        deadline = time.monotonic() + _TIMEOUT_S
        while kind != "node" and time.monotonic() < deadline:
            if kind == "driver":
                return next(p for p in self._run.tree.processes() if "raytrain_llama3" in p.cmdline())
            found = faults.ranks(self._nodes.processes())
            rank = found.get(self._chance.randrange(2))
            if rank is not None and kind == "rank":
                return rank
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in rank.children() if rank else ():
                    if any("checkpoint.writer" in word for word in child.cmdline()):
                        return child
            time.sleep(0.05)
        return None

    def _see_ranks_gone(self) -> None:
        deadline = time.monotonic() + _GONE_S
        while faults.ranks(self._nodes.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)

    def examine(self) -> None:
        """At the end: every step gave one loss, however often it was trained; what is kept is whole."""
        seen: dict[int, float] = {}
        for step in self._run.losses():
            if seen.setdefault(step.step, step.loss) != step.loss:
                self.problems.append(f"step {step.step} gave {seen[step.step]} and {step.loss}")
        root = self._run.store.root
        for step in self._run.store.complete():
            self.problems += damaged_files(iteration_path(root, step))


def main() -> int:
    """Run the soak; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=50, help="how many (default 50)")
    parser.add_argument("--seed", type=int, help="chooses them (default: a new one, which is printed)")
    given = parser.parse_args()
    seed = secrets.randbelow(2**31) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    end_on_sigterm()
    chance = random.Random(seed)
    kinds = [KINDS[i % len(KINDS)] for i in range(given.kills)]
    chance.shuffle(kinds)
    folder = Path(tempfile.mkdtemp(prefix="rb-"))
    (folder / "tmp").mkdir()
    variables = environment(folder / "tmp", folder / "bytecode", 1) | SETTINGS
    try:
        nodes = TwoNodes(folder, 1, variables)
        try:
            run = Run(folder, nodes.address, variables)
            kills = Kills(run, nodes, seed)
            try:
                for kind in kinds:
                    kills.one(kind)
                kills.examine()
            finally:
                run.tree.end(patience_s=60)
        finally:
            nodes.end()
    except BenchmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for problem in kills.problems:
        print(f"WRONG {problem}")
    print(", ".join(f"{count} × {kind}" for kind, count in sorted(kills.done.items())), "killed;", end=" ")
    print("nothing wrong" if not kills.problems else f"{len(kills.problems)} problems")
    return 1 if kills.problems else 0


if __name__ == "__main__":
    sys.exit(main())
