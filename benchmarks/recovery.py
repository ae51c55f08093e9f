"""Seconds from the SIGKILL of one rank to the next finished step: ours, torchrun's and Ray Train's, in one run.

All three train the same on 4 ranks of this machine's CPU, with the same code and checkpoints. They live at once and one
runs at a time: every process of the others' trees is stopped (SIGSTOP). Run it as
`python benchmarks/recovery.py [--faults 5] [--ranks 4] [--seed S] [--json FILE]`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import faults
import records
from processes import BenchmarkError, Tree, end_on_sigterm, environment

OURS, TORCHRUN, RAY_TRAIN = "ours", "torchrun", "Ray Train"
AT_ONCE = "ours, at once again"
GOALS = {TORCHRUN: 0.15, RAY_TRAIN: 0.25}
PHASES = ("detect", "clear", "place", "start", "load", "first step")
_START_TIMEOUT_S = 300.0
_RECOVERY_TIMEOUT_S = 300.0
_ACCOUNT_S = 5.0
_SETTLE_S = 3.0
_SPREAD_S = 2.0
_MANY = 1_000_000

MODEL: dict[str, Any] = {
    "device": "cpu",
    "dtype": "fp32",
    "num-layers": 2,
    "hidden-size": 64,
    "ffn-hidden-size": 176,
    "num-attention-heads": 4,
    "num-query-groups": 2,
    "kv-channels": 16,
    "seq-length": 32,
    "vocab-size": 256,
    "data-arg": "MOCK",
    "micro-batch-size": 2,
    "train-iters": _MANY,
    "eval-interval": 0,
    "eval-iters": 1,
    "save-interval": 20,
    "max-checkpoints": 3,
    "use-exp-structure": 1,
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


@dataclass(slots=True)
class Side:
    """One of the three trainings."""

    name: str
    tree: Tree
    tail: records.Tail
    phases: Callable[[float, dict[str, Any]], tuple[dict[str, float], dict[str, int]]]
    """Seconds by phase, and processes, of the recovery from a kill at a time (Unix), which ended with that step."""
    standby: faults.Standby | None = None

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The lines of one kind so far."""
        return [line for line in self.tail.read() if line["kind"] == kind]

    def attempt(self) -> Any:
        """What tells the present attempt from earlier ones."""
        return self.of("step")[-1]["attempt"]

    def has_saved(self) -> bool:
        """Whether the present attempt has published a checkpoint."""
        return any(line["attempt"] == self.attempt() for line in self.of("save"))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let it run within the block, and then be ready for a fault."""
        self.tree.signal(signal.SIGCONT)
        try:
            time.sleep(_SETTLE_S)
            self.tree.wait_for(self.has_saved, "checkpoint", _RECOVERY_TIMEOUT_S)
            if self.standby is not None:
                self.standby.wait()
            yield
        finally:
            self.tree.signal(signal.SIGSTOP)

    def strike(self, rank: int) -> Recovery:
        """Kill `rank` now, and see a step finished again. Raises `BenchmarkError` when that fails."""
        process = faults.wait_for_rank(self.tree, rank, _RECOVERY_TIMEOUT_S)
        if self.standby is not None:
            self.standby.fault()
        # Whatever is told of the attempt so far, told with half a second's delay, is no recovery.
        before = self.attempt()
        killed_at = time.time()
        process.kill()
        self.tree.wait_for(lambda: self._first_after(before) is not None, "recovery", _RECOVERY_TIMEOUT_S)
        step = self._first_after(before)
        assert step is not None
        last = max(line["step"] for line in self.of("step") if line["attempt"] == before)
        if not 1 < step["step"] <= last + 1:
            raise self.tree.error(f"went on with step {step['step']} after step {last}: not from the newest checkpoint")
        phases, processes = self.phases(killed_at, step)
        return Recovery(rank, step["time"] - killed_at, phases, last + 1 - step["step"], processes)

    def _first_after(self, attempt: Any) -> dict[str, Any] | None:
        """The first step of whatever attempt followed `attempt`."""
        steps = self.of("step")
        place = max(i for i, line in enumerate(steps) if line["attempt"] == attempt)
        return steps[place + 1] if place + 1 < len(steps) else None


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
        self, name: str, command: list[str], variables: Mapping[str, str], folder: Path, file: Path, phases: Any
    ) -> Iterator[Side]:
        side = Side(name, Tree(name, command, variables, folder), records.Tail(file), phases)
        try:
            side.tree.wait_for(lambda: bool(side.of("step")) and side.has_saved(), "checkpoint", _START_TIMEOUT_S)
            if name == OURS:
                side.standby = faults.Standby(side.tree, self._given.standby_wait_s)
            side.tree.signal(signal.SIGSTOP)
            print(f"{name} trains", flush=True)
            yield side
        finally:
            side.tree.end(patience_s=60)


def _told_by_us(events: Path) -> Any:
    """Phases and processes as our command accounts for them, once the recovery is over."""
    tail = records.Tail(events)

    def phases(killed_at: float, _step: dict[str, Any]) -> tuple[dict[str, float], dict[str, int]]:
        deadline = time.monotonic() + _ACCOUNT_S
        while events.exists():
            for line in tail.read():
                if line["kind"] == "recovered" and line["time"] > killed_at:
                    seconds = {name.replace("_", " "): value for name, value in line["phase_seconds"].items()}
                    return seconds, line.get("processes", {})
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return {}, {}

    return phases


def _told_by_peer(file: Path, noticed: Callable[[float], float | None]) -> Any:
    """A peer's phases: when its launcher noticed, and what the new rank 0 spent. `start` holds clearing and placing."""
    tail = records.Tail(file)

    def phases(killed_at: float, step: dict[str, Any]) -> tuple[dict[str, float], dict[str, int]]:
        deadline = time.monotonic() + _ACCOUNT_S
        while time.monotonic() < deadline:
            told = [x for x in tail.read() if x["kind"] == "phases" and x["attempt"] == step["attempt"]]
            at = noticed(killed_at)
            if told and at is not None:
                seconds = told[0]["seconds"]
                last = {"load": seconds["model"] + seconds["load"], "first step": seconds["first_step"]}
                start = step["time"] - sum(last.values()) - at
                return {"detect": at - killed_at, "start": start} | last, {}
            time.sleep(0.1)
        return {}, {}

    return phases


Round = dict[str, Recovery]


def measure(folder: Path, given: argparse.Namespace) -> tuple[list[Round], bool]:
    """One fault of each in turn, `faults` times. Also: whether our command told of its standby processes."""
    chance, found = random.Random(given.seed), list[Round]()
    starts = Sides(folder, given)
    with contextlib.ExitStack() as stack:
        sides = [stack.enter_context(start()) for start in (starts.ours, starts.torchrun, starts.ray_train)]
        for number in range(1, given.faults + 1):
            # The same fault for all, at no particular moment between two saves.
            ranks = [chance.randrange(given.ranks) for _ in range(2)]
            delay_s = chance.uniform(0, _SPREAD_S)
            row = Round()
            for side in sides:
                with side.running():
                    time.sleep(delay_s)
                    row[side.name] = side.strike(ranks[0])
                    if side.name == OURS:
                        row[AT_ONCE] = side.strike(ranks[1])
            told = ", ".join(f"{name} {one.seconds:.2f} s" for name, one in row.items())
            print(f"fault {number}: rank {ranks[0]} (at once again: rank {ranks[1]}): {told}", flush=True)
            found.append(row)
        check_same(sides)
        return found, all(side.standby.is_told for side in sides if side.standby is not None)


def check_same(sides: Sequence[Side]) -> None:
    """Raise `BenchmarkError` unless a step gave one loss, on every side and however often it was trained."""
    losses: dict[int, float] = {}
    for side in sides:
        for line in side.of("step"):
            if line["loss"] != losses.setdefault(line["step"], line["loss"]):
                raise BenchmarkError(
                    f"not the same training: {side.name} has loss {line['loss']} at step {line['step']}, before it was "
                    f"{losses[line['step']]}"
                )


def ratios(rounds: Sequence[Round], peer: str) -> list[float]:
    """Our seconds over `peer`'s, fault by fault."""
    return [row[OURS].seconds / row[peer].seconds for row in rounds]


def table(rounds: Sequence[Round], given: argparse.Namespace, is_told: bool) -> str:
    """The result for people."""
    lines = [
        f"\nseconds from SIGKILL to the next finished step: {given.ranks} ranks, {len(rounds)} faults each, "
        f"{os.cpu_count()} cores",
        f"{'':<22}{'median':>8}{'least–most':>16}{'repeated steps':>16}",
    ]
    names = (OURS, AT_ONCE, TORCHRUN, RAY_TRAIN)
    for name in names:
        all_of = [row[name] for row in rounds]
        seconds = [one.seconds for one in all_of]
        repeated = statistics.median(one.repeated_steps for one in all_of)
        lines.append(f"{name:<22}{statistics.median(seconds):>8.2f}{_span(seconds):>16}{repeated:>16g}")
    if not is_told:
        lines.append(f"  our command did not always say {faults.STANDBY_READY!r} within {given.standby_wait_s:g} s")
    lines.append(f"\n{'ours /':<22}{'median':>8}{'least–most':>16}   goal")
    for peer, goal in GOALS.items():
        values = ratios(rounds, peer)
        met = "met" if statistics.median(values) <= goal else "missed"
        lines.append(f"{peer:<22}{statistics.median(values):>8.3f}{_span(values):>16}   ≤ {goal:g} {met}")
    lines.append(f"\n{'where they go (medians)':<24}" + "".join(f"{name:>21}" for name in names))
    for phase in (*PHASES, "not told"):
        cells = (_median([_phase(row[name], phase) for row in rounds]) for name in names)
        lines.append(f"  {phase:<22}" + "".join(f"{cell:>21}" for cell in cells))
    for kind in ("kept", "standby", "new"):
        counts = ([row[name].processes.get(kind) for row in rounds] for name in names)
        lines.append(f"  {'processes ' + kind:<22}" + "".join(f"{_median(c):>21}" for c in counts))
    return "\n".join(lines)


def _phase(one: Recovery, phase: str) -> float | None:
    if phase == "not told":
        return one.seconds - sum(one.phases.get(name, 0.0) for name in PHASES)
    return one.phases.get(phase)


def _median(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.2f}" if known else "-"


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.2f}–{max(values):.2f}"


def main() -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--faults", type=int, default=5, help="faults of each system (default 5)")
    parser.add_argument("--ranks", type=int, default=4, help="ranks on this machine's CPU (default 4)")
    parser.add_argument("--seed", type=int, help="chooses ranks and moments (default: a new one, which is printed)")
    parser.add_argument("--standby-wait-s", type=float, default=60.0, help="for a standby to be filled (default 60)")
    parser.add_argument("--ray-train-poll-s", type=float, default=0.1, help="Ray Train's health check (default 0.1)")
    parser.add_argument("--json", type=Path, help="write every recovery and the ratios to this file")
    given = parser.parse_args()
    given.seed = secrets.randbelow(2**31) if given.seed is None else given.seed
    print(f"seed {given.seed}", flush=True)
    end_on_sigterm()
    # Short: Ray puts sockets below it, whose paths the kernel limits to 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="rb-"))
    try:
        rounds, is_told = measure(folder, given)
    except BenchmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(table(rounds, given, is_told))
    if given.json:
        result = {"ranks": given.ranks, "cores": os.cpu_count(), "seed": given.seed, "goals": GOALS}
        result |= {"ratios": {peer: statistics.median(ratios(rounds, peer)) for peer in GOALS}}
        result |= {"rounds": [{name: asdict(one) for name, one in row.items()} for row in rounds]}
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
