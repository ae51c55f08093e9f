"""What two trainings in turn came to: the ratio of their seconds a step, and how sure it is."""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import faults
import numpy as np

RAY, TORCHRUN = "Ray", "torchrun"
KEPT = "Ray, kept"
"""Ours, with memory checkpoints."""
_LEAST_STEP_S = 0.2
_RESAMPLES = 20_000


@dataclass(frozen=True, slots=True)
class Pair:
    """Mean seconds a step in two neighbouring slices, one of each side."""

    ray_s: float
    torchrun_s: float
    ray_steps: int
    torchrun_steps: int

    @property
    def ratio(self) -> float:
        """Ray's seconds over torchrun's."""
        return self.ray_s / self.torchrun_s

    @property
    def log_ratio(self) -> float:
        """Its logarithm."""
        return math.log(self.ratio)


@dataclass(frozen=True, slots=True)
class Filling:
    """The time in which a standby process was started and imported everything, beside as much of torchrun's."""

    seconds: float
    pair: Pair

    @property
    def lost_s(self) -> float:
        """Seconds of training that it cost."""
        return self.seconds * (1 - 1 / self.pair.ratio)


@dataclass(frozen=True, slots=True)
class Result:
    """What was measured."""

    names: tuple[str, str]
    goal: float
    pairs: list[Pair]
    fillings: list[Filling]
    has_standby: bool


def interval(pairs: Sequence[Pair]) -> tuple[float, float, float]:
    """Geometric mean of the pairs' ratios, and the ends of its 95 % bootstrap interval."""
    logs = np.array([pair.log_ratio for pair in pairs])
    means = np.random.default_rng(0).choice(logs, (_RESAMPLES, len(logs))).mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return math.exp(logs.mean()), math.exp(low), math.exp(high)


def table(found: Result, given: argparse.Namespace) -> str:
    """The result for people."""
    pairs, names = found.pairs, found.names
    ratio, low, high = interval(pairs)
    goal = f"goal ≤ {found.goal}: {'met' if ratio <= found.goal else 'missed'}"
    if names != (RAY, TORCHRUN):
        goal = "what keeping costs" if KEPT in names else "must be 1"
    columns = zip(names, ("ray", "torchrun"), strict=True)
    lines = [
        f"\nseconds a step: one rank of {given.threads} threads, {os.cpu_count()} cores, {len(pairs)} pairs of slices "
        f"of {given.slice_s:g} s in {given.starts} starts of both",
        f"{'':<16}{'median':>8}{'least–most':>16}{'steps':>8}",
    ]
    for name, side in columns:
        seconds = [getattr(pair, f"{side}_s") for pair in pairs]
        steps = sum(getattr(pair, f"{side}_steps") for pair in pairs)
        span = f"{min(seconds):.3f}–{max(seconds):.3f}"
        lines.append(f"{name:<16}{statistics.median(seconds):>8.3f}{span:>16}{steps:>8}")
        if statistics.median(seconds) < _LEAST_STEP_S:
            lines.append(f"  this is less than the {_LEAST_STEP_S} s a step that the goal speaks of")
    lines.append(
        f"{names[0]} / {names[1]}: {ratio:.4f}, 95 % confidence {low:.4f}–{high:.4f} ({goal}); "
        f"pair by pair {min(p.ratio for p in pairs):.3f}–{max(p.ratio for p in pairs):.3f}"
    )
    return "\n".join([*lines, *standby_lines(found, given)])


def standby_lines(found: Result, given: argparse.Namespace) -> list[str]:
    """What is to be said of the standby process."""
    if RAY not in found.names:
        return []
    lines = []
    if not found.has_standby:
        lines.append(f"  our command did not always say {faults.STANDBY_READY!r} within {given.standby_wait_s:g} s")
    for one in found.fillings:
        lines.append(
            f"while a standby process was filled, for {one.seconds:.1f} s: {one.pair.ratio:.3f} times torchrun's "
            f"seconds a step, {one.lost_s:.1f} s lost in all"
        )
    return lines
