"""What a chaotic run came to: whether it ended as if undisturbed, and what the faults cost."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import records
from chaos_plan import Kind

_PROBLEMS_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that was dealt at a Unix time, after the step that was known then."""

    kind: Kind
    at: float
    step: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything there is to know: `calm` and `lines` are the metrics of the undisturbed run and of this one."""

    target: int
    batch: int
    struck: list[Struck]
    calm: list[dict[str, Any]]
    lines: list[dict[str, Any]]
    accounts: list[dict[str, Any]]
    console: str
    left: list[str]


@dataclass(frozen=True, slots=True)
class Recovery:
    """From the first fault since the last recovery to the first step of an attempt that lasted."""

    kinds: list[Kind]
    seconds: float


@dataclass(frozen=True, slots=True)
class Report:
    """`problems` is empty when the run is what it must be. `goodput` is the share of time in steps that count."""

    target: int
    faults: dict[str, int]
    recoveries: list[Recovery]
    unprovoked: int
    """Attempts that ended with no fault of ours."""
    lost_steps: int
    goodput: float
    wall_s: float
    own_account: dict[str, int]
    """Recoveries by what became of the ranks' processes, as the command itself accounts for them."""
    problems: list[str]


def examine(outcome: Outcome) -> Report:
    """Compare with the undisturbed run, and add up."""
    steps = [line for line in outcome.lines if line["kind"] == "step"]
    counted = {line["step"]: line for line in steps}
    recoveries, unprovoked = _recoveries(outcome.struck, steps)
    began = min(line["time"] for line in outcome.lines)
    wall_s = max(line["time"] for line in steps) - began
    return Report(
        target=outcome.target,
        faults={str(kind): sum(one.kind is kind for one in outcome.struck) for kind in Kind},
        recoveries=recoveries,
        unprovoked=unprovoked,
        lost_steps=len(steps) - len(counted),
        goodput=sum(line["step_s"] for line in counted.values()) / wall_s,
        wall_s=wall_s,
        own_account=_own_account(outcome.accounts),
        problems=_problems(outcome, counted),
    )


def _problems(outcome: Outcome, counted: dict[int, dict[str, Any]]) -> list[str]:
    calm = {line["step"]: line for line in outcome.calm if line["kind"] == "step"}
    wanted = list(range(1, outcome.target + 1))
    found = [f"left behind: {what}" for what in outcome.left]
    if sorted(counted) != wanted or sorted(calm) != wanted:
        found.append(f"steps 1 to {outcome.target} are not all there: {len(counted)}, undisturbed {len(calm)}")
    for step in sorted(counted.keys() & calm.keys()):
        mine, theirs = counted[step], calm[step]
        if mine["loss"] != theirs["loss"]:
            found.append(f"step {step}: loss {mine['loss']}, undisturbed {theirs['loss']}")
        if mine["samples"] != step * outcome.batch or mine["tokens"] != theirs["tokens"]:
            found.append(f"step {step}: {mine['samples']} samples so far, and {mine['tokens']} tokens of its own")
    return found


def _recoveries(struck: Sequence[Struck], steps: Sequence[dict[str, Any]]) -> tuple[list[Recovery], int]:
    """Each change of attempt between two steps, with the faults that led to it; and changes that none led to."""
    found, unprovoked = list[Recovery](), 0
    open_faults = [one for one in struck if one.kind is not Kind.STANDBY]
    for before, after in itertools.pairwise(steps):
        if before["attempt"] == after["attempt"]:
            continue
        mine = [one for one in open_faults if one.at < after["time"]]
        open_faults = open_faults[len(mine) :]
        if mine:
            found.append(Recovery([one.kind for one in mine], after["time"] - mine[0].at))
        else:
            unprovoked += 1
    return found, unprovoked


def _own_account(accounts: Sequence[dict[str, Any]]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for line in records.recoveries(list(accounts)):
        for name, count in line["processes"].items():
            totals[name] = totals.get(name, 0) + count
    return totals


def table(report: Report) -> str:
    """The result for people."""
    dealt = sum(report.faults.values())
    lines = [f"\n{dealt} faults over {report.target} steps in {report.wall_s:.0f} s", f"{'':<40}{'faults':>8}"]
    lines[-1] += f"{'alone':>8}{'median s':>10}{'max s':>8}"
    for name, count in report.faults.items():
        alone = [one.seconds for one in report.recoveries if one.kinds == [name]]
        lines.append(f"{name:<40}{count:>8}{len(alone):>8}{_seconds(alone)}")
    several = [one.seconds for one in report.recoveries if len(one.kinds) > 1]
    lines.append(f"{'several in one recovery':<40}{'':>8}{len(several):>8}{_seconds(several)}")
    every = [one.seconds for one in report.recoveries]
    lines.append(f"{'all recoveries':<40}{'':>8}{len(every):>8}{_seconds(every)}")
    if report.own_account:
        told = ", ".join(f"{count} {name}" for name, count in report.own_account.items())
        lines.append(f"the ranks' processes after recoveries: {told}")
    lines.append(
        f"{report.lost_steps} steps trained again, {report.unprovoked} attempts ended by themselves, goodput "
        f"{100 * report.goodput:.1f} % (share of the time in steps that count)"
    )
    if not report.problems:
        lines.append("ended at the target with exit code 0; every loss is the undisturbed run's; nothing is left")
    lines += [f"WRONG: {problem}" for problem in report.problems[:_PROBLEMS_SHOWN]]
    if len(report.problems) > _PROBLEMS_SHOWN:
        lines.append(f"and {len(report.problems) - _PROBLEMS_SHOWN} more")
    return "\n".join(lines)


def _seconds(values: Sequence[float]) -> str:
    if not values:
        return f"{'-':>10}{'-':>8}"
    return f"{statistics.median(values):>10.2f}{max(values):>8.2f}"
