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
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import faults
from processes import BenchmarkError, end_on_sigterm
from recovery_sides import OURS, RAY_TRAIN, TORCHRUN, Recovery, Side, Sides

AT_ONCE = "ours, at once again"
GOALS = {TORCHRUN: 0.15, RAY_TRAIN: 0.25}
PHASES = ("detect", "clear", "place", "start", "load", "first step")
_SPREAD_S = 2.0

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
                    struck = [side.strike(ranks[0])]
                    if side.name == OURS:
                        struck.append(side.strike(ranks[1]))
                    row |= {n: side.account(s) for n, s in zip((side.name, AT_ONCE), struck, strict=False)}
            told = ", ".join(f"{name} {one.seconds:.2f} s" for name, one in row.items())
            print(f"fault {number}: rank {ranks[0]} (at once again: rank {ranks[1]}): {told}", flush=True)
            found.append(row)
        check_same(sides)
        return found, all(side.standby.is_told for side in sides if side.standby is not None)


def check_same(sides: Sequence[Side]) -> None:
    """Raise `BenchmarkError` unless a step gave one loss, on every side and however often it was trained."""
    losses: dict[int, float] = {}
    for side in sides:
        for line in side.steps:
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
