"""A soak: one run that suffers a hundred random faults, and must end as if there had been none.

Four ranks on two Ray nodes of this machine; the run joins their cluster. What strikes, and when, follows from a seed
that is printed. Run it as `python benchmarks/chaos.py [--faults 100] [--seed S] [--kinds kill,stop] [--json FILE]`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import chaos_plan
import chaos_report
import faults
import psutil
import records
import tiny
from chaos_plan import Fault, Kind
from chaos_report import Outcome, Struck
from cluster import SETTINGS, TwoNodes
from processes import BenchmarkError, Tree, end_on_sigterm, environment

NODES, RANKS_PER_NODE = 2, 2
RANKS = NODES * RANKS_PER_NODE
BATCH = 2 * RANKS
_MANY = 1_000_000
_PROGRESS_TIMEOUT_S = 600.0
_SAVING_TIMEOUT_S = 20.0
_STANDBY_TIMEOUT_S = 60.0
_RANK_TIMEOUT_S = 300.0
_END_TIMEOUT_S = 900.0
_GONE_S = 15.0
_LOOK_S = 0.002
_MARKER = "COMMITTED"

FLAGS: dict[str, Any] = tiny.MODEL | {
    "num-nodes": NODES,
    "gpus-per-node": RANKS_PER_NODE,
    "global-batch-size": BATCH,
    "learning-rate": 1e-3,
    "lr-warmup-samples": 80,
    "log-interval": 20,
}
CALM = {"save-interval": 0}
CHAOS = {
    "save-interval": 10,
    "max-checkpoints": 3,
    "standby-processes": 1,
    "max-restarts": _MANY,
    "max-preemptions": _MANY,
    "node-strikes": _MANY,
    "node-rejoin-timeout-s": 120,
    "hang-timeout-s": 5,
    # A rank that is stopped while it starts or saves; four that import at once take a while.
    "slow-phase-timeout-s": 60,
}


class Run:
    """One run of the command on the cluster."""

    def __init__(self, name: str, folder: Path, flags: dict[str, Any], variables: dict[str, str]) -> None:
        self.folder, self.temporary = folder / name, folder / f"{name}-tmp"
        self.temporary.mkdir(parents=True)
        command = [sys.executable, "-m", "raytrain_llama3"]
        for flag, value in (FLAGS | flags | {"exp-dir": ".", "exp-name": "run"}).items():
            command += [f"--{flag}", str(value)]
        self.tree = Tree(name, command, variables | {"TMPDIR": str(self.temporary)}, self.folder)
        self._tail = records.Tail(self.folder / "run" / "tensorboard" / "metrics.jsonl")
        self._accounts = records.Tail(self.folder / "run" / "tensorboard" / "events.jsonl")
        self._step = self._looked_at = 0
        self.checkpoints = self.folder / "run" / "checkpoints"

    def lines(self) -> list[dict[str, Any]]:
        """Everything in its metrics so far."""
        return self._tail.read()

    def accounts(self) -> list[dict[str, Any]]:
        """Everything in its own account of faults so far."""
        return self._accounts.read()

    def step(self) -> int:
        """The furthest step so far."""
        lines = self.lines()
        for line in lines[self._looked_at :]:
            self._step = max(self._step, line.get("step", 0) if line["kind"] == "step" else 0)
        self._looked_at = len(lines)
        return self._step

    def is_saving(self) -> bool:
        """Whether a checkpoint is being written now."""
        newest = max(self.checkpoints.glob("iter_*"), default=None)
        return newest is not None and not (newest / _MARKER).exists()


class Chaos:
    """Strikes one run after a plan."""

    def __init__(self, run: Run, nodes: TwoNodes) -> None:
        self._run, self._nodes = run, nodes
        self.struck: list[Struck] = []

    def strike(self, fault: Fault) -> None:
        """Wait for the moment of `fault`, and strike. Raises `BenchmarkError` when the run does not get there."""
        if (step := fault.at_step) is not None:
            self._run.tree.wait_for(lambda: self._run.step() >= step, f"step {step}", _PROGRESS_TIMEOUT_S)
        time.sleep(fault.delay_s)
        kind, told = fault.kind, f"rank {fault.rank}"
        if kind is Kind.STANDBY:
            kind, told = self._strike_standby(fault)
        elif kind is Kind.NODE:
            told = f"{fault.absence_s:.1f} s without it"
            self._nodes.kill_raylet()
        else:
            self._signal_rank(fault)
        at = time.time()
        self.struck.append(Struck(kind, at, self._run.step()))
        print(f"fault {len(self.struck)} after step {self._run.step()}: {kind} ({told})", flush=True)
        if kind is Kind.NODE:
            time.sleep(fault.absence_s)
            self._nodes.add()

    def _strike_standby(self, fault: Fault) -> tuple[Kind, str]:
        """A rank instead, where there is no standby process."""
        deadline = time.monotonic() + _STANDBY_TIMEOUT_S
        while time.monotonic() < deadline:
            for process in faults.standbys(self._nodes.processes()):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
                    return Kind.STANDBY, f"process {process.pid}"
            time.sleep(0.1)
        self._signal_rank(fault)
        return Kind.KILL, f"rank {fault.rank}, since there was no standby process"

    def _signal_rank(self, fault: Fault) -> None:
        process = self._rank(fault.rank)
        if fault.kind is Kind.KILL_SAVING:
            deadline = time.monotonic() + _SAVING_TIMEOUT_S
            while not self._run.is_saving() and process.is_running() and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
            # Looked up before, since that takes longer than a save; it may have gone meanwhile.
            process = process if process.is_running() else self._rank(fault.rank)
        number = {Kind.STOP: signal.SIGSTOP, Kind.SEGFAULT: signal.SIGSEGV, Kind.TERM: signal.SIGTERM}
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number.get(fault.kind, signal.SIGKILL))

    def _rank(self, rank: int) -> psutil.Process:
        """The process that is `rank` now, or will be in a moment."""
        deadline = time.monotonic() + _RANK_TIMEOUT_S
        while (found := faults.ranks(self._nodes.processes()).get(rank)) is None:
            if not self._run.tree.is_running:
                raise self._run.tree.error(f"ended before rank {rank} was found")
            if time.monotonic() > deadline:
                raise self._run.tree.error(f"no process of rank {rank} after {_RANK_TIMEOUT_S:.0f} s")
            time.sleep(0.05)
        return found


def soak(folder: Path, given: argparse.Namespace) -> Outcome:
    """An undisturbed run, then the same with all faults. Raises `BenchmarkError` when either does not end well."""
    planned = chaos_plan.faults(given.seed, given.faults, RANKS, given.kinds)
    target = chaos_plan.target(planned)
    shared = folder / "tmp"
    shared.mkdir()
    variables = environment(shared, folder / "bytecode", 1) | SETTINGS
    with _cluster(folder, variables) as nodes:
        flags = {"ray-address": nodes.address, "train-iters": target}
        with _running(Run("calm", folder, flags | CALM, variables)) as calm:
            _end(calm)
            # torch's own caches, which any run leaves.
            usual = set(shared.iterdir())
            print(f"undisturbed: {target} steps in {time.time() - calm.tree.started_at:.0f} s", flush=True)
        with _running(Run("chaos", folder, flags | CHAOS, variables)) as run:
            chaos = Chaos(run, nodes)
            for fault in planned:
                chaos.strike(fault)
            _end(run)
            left = _left(run, nodes, set(shared.iterdir()) - usual)
        console = run.tree.output.read_text(errors="replace")
    return Outcome(target, BATCH, chaos.struck, calm.lines(), run.lines(), run.accounts(), console, left)


def _end(run: Run) -> None:
    if code := run.tree.wait(_END_TIMEOUT_S):
        raise run.tree.error(f"ended with exit code {code}")


def _left(run: Run, nodes: TwoNodes, of_ranks: set[Path]) -> list[str]:
    """What the run has left behind, a moment after its end: processes, temporary files, saves that were cut off."""
    deadline = time.monotonic() + _GONE_S
    while True:
        processes = [*faults.standbys(nodes.processes()), *faults.ranks(nodes.processes()).values()]
        processes += run.tree.processes()
        if not processes or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    found = [f"process {process.pid}" for process in processes]
    found += [str(path) for path in (*run.temporary.iterdir(), *sorted(of_ranks))]
    return found + [str(p) for p in run.checkpoints.iterdir() if p.is_dir() and not (p / _MARKER).exists()]


@contextlib.contextmanager
def _cluster(folder: Path, variables: dict[str, str]) -> Iterator[TwoNodes]:
    nodes = TwoNodes(folder, RANKS_PER_NODE, variables)
    try:
        yield nodes
    finally:
        nodes.end()


@contextlib.contextmanager
def _running(run: Run) -> Iterator[Run]:
    try:
        yield run
    finally:
        run.tree.end(patience_s=60)


def _kinds(text: str) -> list[Kind]:
    """Of names such as `kill,kill_saving`."""
    try:
        return [Kind[name.strip().upper()] for name in text.split(",")]
    except KeyError as error:
        known = ", ".join(kind.name.lower() for kind in Kind)
        raise argparse.ArgumentTypeError(f"{error.args[0].lower()} is none of {known}") from error


def main() -> int:
    """Run the soak; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--faults", type=int, default=100, help="how many (default 100)")
    parser.add_argument("--seed", type=int, help="chooses the faults (default: a new one, which is printed)")
    parser.add_argument("--kinds", type=_kinds, default=list(Kind), help="only these, with commas (default: all)")
    parser.add_argument("--keep", action="store_true", help="leave all that the runs wrote, and say where it is")
    parser.add_argument("--json", type=Path, help="write faults, recoveries and what was found to this file")
    given = parser.parse_args()
    given.seed = secrets.randbelow(2**31) if given.seed is None else given.seed
    print(f"seed {given.seed}", flush=True)
    end_on_sigterm()
    # Short: Ray puts sockets below it, whose paths the kernel limits to 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="rb-"))
    try:
        outcome = soak(folder, given)
    except BenchmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        if given.keep:
            print(f"left in {folder}", flush=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    report = chaos_report.examine(outcome)
    print(chaos_report.table(report))
    if given.json:
        given.json.write_text(json.dumps({"seed": given.seed, **asdict(report)}, indent=1) + "\n")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
