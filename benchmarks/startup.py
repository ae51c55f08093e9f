"""Seconds from the command to the end of the first training step, beside torchrun's in the same run.

Run it as `python benchmarks/startup.py [--rounds 5] [--ranks 2] [--json FILE]`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import cluster
import psutil
import records
import tiny
from processes import BenchmarkError, Tree, end_on_sigterm, environment

TORCHRUN, OWN, WARM = "torchrun", "own Ray", "warm cluster"
GOALS = {OWN: 1.5, WARM: 1.1}
_TIMEOUT_S = 300.0
_QUIET_LOAD = 0.1
_QUIET_TIMEOUT_S = 60.0

MODEL = tiny.MODEL | {
    "train-iters": 3,
    "save-interval": 0,
    "exp-dir": ".",
    "exp-name": "run",
}


@dataclass(frozen=True, slots=True)
class Start:
    """One start: seconds to the end of the first step, and the parts that they are made of."""

    seconds: float
    phases: dict[str, float]
    loss: float


class Starts:
    """Starts the same training in each way, each time in a folder of its own."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._folder, self._ranks, self._count = folder, ranks, 0
        self._environment = environment(folder, folder / "bytecode", None)
        flags = MODEL | {"gpus-per-node": ranks, "global-batch-size": 4 * ranks}
        self._flags = [item for name, value in flags.items() for item in (f"--{name}", str(value))]

    def torchrun(self) -> Start:
        """Start with torch's own launcher."""
        script = str(Path(__file__).with_name("torchrun_train.py"))
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self._ranks}"]
        # torchrun sets this itself, with a warning, where it is unset.
        threads = {} if self._ranks == 1 else {"OMP_NUM_THREADS": "1"}
        command = [*launcher, script, "--records", "records.jsonl", *self._flags]
        with self._started(TORCHRUN, command, self._environment | threads) as (tree, folder):
            _succeed(tree)
            lines = records.read(folder / "records.jsonl")
            return _start(lines, tree, records.torchrun_phases(lines, tree.started_at))

    def ours(self, address: str | None) -> Start:
        """Start with our command: a Ray of its own, or the cluster at `address`."""
        joining = {} if address is None else {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled"}
        command = [sys.executable, "-m", "raytrain_llama3", *self._flags]
        with self._started(WARM if address else OWN, command, self._environment | joining) as (tree, folder):
            tree.wait_for(lambda: tree.output.stat().st_size > 0, "first line of output", _TIMEOUT_S)
            spoke_at = time.time()
            _succeed(tree)
            lines = records.read(folder / "run" / "tensorboard" / "metrics.jsonl")
            console = tree.output.read_text()
            return _start(lines, tree, records.command_phases(lines, tree.started_at, spoke_at, console))

    @contextlib.contextmanager
    def cluster(self) -> Iterator[str]:
        """A running Ray that nobody uses; yields its address."""
        command, address = cluster.head(self._folder / "ray", max(os.cpu_count() or 1, self._ranks))
        with self._started("ray start", command, self._environment | cluster.SETTINGS) as (tree, _):
            cluster.wait_until_started(tree)
            _wait_until_quiet(tree)
            yield address

    @contextlib.contextmanager
    def _started(self, name: str, command: list[str], variables: Mapping[str, str]) -> Iterator[tuple[Tree, Path]]:
        self._count += 1
        folder = self._folder / str(self._count)
        tree = Tree(name, command, variables, folder)
        try:
            yield tree, folder
        finally:
            tree.end(patience_s=20)


def _succeed(tree: Tree) -> None:
    if code := tree.wait(_TIMEOUT_S):
        raise tree.error(f"ended with exit code {code}")


def _start(lines: list[dict[str, object]], tree: Tree, phases: dict[str, float]) -> Start:
    first = records.steps(lines)[0]
    return Start(first.finished_at - tree.started_at, phases, first.loss)


def _wait_until_quiet(tree: Tree) -> None:
    """Wait until the tree takes less than a tenth of a core, so that what it does at its own start is over."""
    deadline = time.monotonic() + _QUIET_TIMEOUT_S
    load = 1.0
    while load > _QUIET_LOAD and time.monotonic() < deadline:
        before = _cpu_seconds(tree)
        time.sleep(2)
        load = (_cpu_seconds(tree) - before) / 2
    print(f"the warm cluster takes {100 * load:.0f} % of a core while nobody uses it", flush=True)


def _cpu_seconds(tree: Tree) -> float:
    total = 0.0
    for process in tree.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:2])
    return total


def measure(folder: Path, ranks: int, rounds: int) -> list[dict[str, Start]]:
    """One start in each way per round, in turn; a round before them that is not counted fills the caches."""
    starts, found = Starts(folder, ranks), list[dict[str, Start]]()
    with starts.cluster() as address:
        for number in range(rounds + 1):
            row = {TORCHRUN: starts.torchrun(), OWN: starts.ours(None), WARM: starts.ours(address)}
            if len({start.loss for start in row.values()}) > 1:
                raise BenchmarkError(f"the same training gave different losses: {row}")
            print(
                f"round {number or '0 (not counted)'}: "
                + ", ".join(f"{name} {start.seconds:.2f} s" for name, start in row.items()),
                flush=True,
            )
            found += [row] if number else []
    return found


def ratios(rounds: list[dict[str, Start]], name: str) -> list[float]:
    """`name`'s seconds over torchrun's, round by round."""
    return [row[name].seconds / row[TORCHRUN].seconds for row in rounds]


def table(rounds: list[dict[str, Start]], ranks: int) -> str:
    """The result for people."""
    lines = [
        f"\nseconds from the command to the end of the first step: {ranks} ranks, {len(rounds)} rounds, "
        f"{os.cpu_count()} cores",
        f"{'':<16}{'median':>8}{'least–most':>16}{'/ torchrun':>12}{'least–most':>14}   goal",
    ]
    for name in (TORCHRUN, OWN, WARM):
        seconds = [row[name].seconds for row in rounds]
        line = f"{name:<16}{statistics.median(seconds):>8.2f}{_span(seconds):>16}"
        if name in GOALS:
            found = ratios(rounds, name)
            met = "met" if statistics.median(found) <= GOALS[name] else "missed"
            line += f"{statistics.median(found):>12.2f}{_span(found):>14}   ≤ {GOALS[name]:g} {met}"
        lines.append(line)
    lines.append(f"\n{'where they go (medians)':<24}" + "".join(f"{n:>14}" for n in (TORCHRUN, OWN, WARM)))
    phases = list(rounds[0][OWN].phases)
    for phase in phases:
        lines.append(
            f"  {phase:<22}" + "".join(f"{_median_of(rounds, name, phase):>14.2f}" for name in (TORCHRUN, OWN, WARM))
        )
    for name in (OWN, WARM):
        more = {p: _median_of(rounds, name, p) - _median_of(rounds, TORCHRUN, p) for p in phases}
        largest = sorted(phases, key=more.__getitem__, reverse=True)[:3]
        lines.append(f"{name} takes longer most in: " + ", ".join(f"{p} {more[p]:+.2f} s" for p in largest))
    return "\n".join(lines)


def _span(values: list[float]) -> str:
    return f"{min(values):.2f}–{max(values):.2f}"


def _median_of(rounds: list[dict[str, Start]], name: str, phase: str) -> float:
    return statistics.median(row[name].phases.get(phase, 0.0) for row in rounds)


def main() -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds (default 5)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks on this machine's CPU (default 2)")
    parser.add_argument("--json", type=Path, help="write every start and the ratios to this file")
    given = parser.parse_args()
    end_on_sigterm()
    # Short: Ray puts sockets below it, whose paths the kernel limits to 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="rb-"))
    try:
        rounds = measure(folder, given.ranks, given.rounds)
    except BenchmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(table(rounds, given.ranks))
    if given.json:
        result = {
            "ranks": given.ranks,
            "cores": os.cpu_count(),
            "goals": GOALS,
            "ratios": {name: statistics.median(ratios(rounds, name)) for name in GOALS},
            "rounds": [{name: asdict(start) for name, start in row.items()} for row in rounds],
        }
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
