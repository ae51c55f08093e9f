"""Which rank hangs and which falls behind, from what polls answer; times are passed in, never read from a clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from raytrain_llama3.config.schema import Faults
from raytrain_llama3.messages import Phase, Work, WorkerReport

_LONGEST_GAP_S = 5.0
_LOOKS = 3
"""No time limit passes in fewer looks, however far apart: a driver that slept knows nothing of the time between."""

_WINDOW_STEPS = 20
_WINDOWS = 3
"""Successive windows in which a rank must be behind to be steadily so, or not behind to have recovered."""


@dataclass(frozen=True, slots=True)
class Hang:
    """A rank that stands still. `since` is the Unix time of its last move, `alike` the ranks that stand where it does.

    With `alike`, nothing but their stacks tells which of them holds the others up.
    """

    rank: int
    phase: Phase
    since: float
    text: str
    alike: tuple[int, ...] = ()


@dataclass(slots=True)
class _Seen:
    """What is known of one rank; `moved` and `answered` are on the watch's own clock, `since` is Unix time."""

    moved: float
    answered: float
    since: float
    phase: Phase = Phase.START
    step: int = 0
    moves: int = 0
    waits_for: str = ""

    @property
    def place(self) -> tuple[int, int]:
        return self.step, self.moves


class HangWatch:
    """Watches the ranks of one attempt, of which one that hangs stops all.

    A rank's time limit is `hang_timeout_s` while it trains and `slow_phase_timeout_s` in any other phase, or while it
    waits for data, which may come from far away; a rank that is done has none. `moves` must count alike on all ranks:
    from the start of the attempt.
    """

    def __init__(self, limits: Faults, ranks: Iterable[int], now: float) -> None:
        self._limits = limits
        self._clock, self._looked = 0.0, now
        self._gap_s = min(_LONGEST_GAP_S, limits.hang_timeout_s / _LOOKS, limits.slow_phase_timeout_s / _LOOKS)
        self._seen = {rank: _Seen(0.0, 0.0, now) for rank in ranks}

    def ended(self, rank: int) -> None:
        """Watch this rank no longer: its run returned."""
        self._seen.pop(rank, None)

    def look(self, now: float, answers: Iterable[WorkerReport]) -> Hang | None:
        """Take the answers that came since the last look; ranks without one are silent. The rank that hangs, if any.

        A gap since the last look counts as `_LONGEST_GAP_S` at most: after a longer one the driver itself was away,
        and perhaps the ranks with it.
        """
        self._clock += min(max(now - self._looked, 0.0), self._gap_s)
        self._looked = now
        for report in answers:
            if report.rank in self._seen:
                self._take(self._seen[report.rank], report, now)
        watched = {rank: seen for rank, seen in self._seen.items() if seen.phase is not Phase.DONE}
        if not watched:
            return None
        silent = {rank: seen for rank, seen in watched.items() if self._is_silent(seen)}
        suspects = silent if silent and len(silent) < len(self._seen) else watched
        # Of those that stand at the same place, one that waits for data is waited for by those that do not.
        rank = min(suspects, key=lambda r: (suspects[r].place, not suspects[r].waits_for, suspects[r].moved, r))
        seen = suspects[rank]
        # Of the one that the others wait for: they may stand in a phase with a shorter limit.
        phase = self._phase(seen)
        if self._clock - seen.moved < self._limit(seen, phase)[1]:
            return None
        level = {r: other for r, other in suspects.items() if r != rank and other.place == seen.place}
        alike = tuple(r for r, other in level.items() if other.waits_for or not seen.waits_for)
        return Hang(rank, phase, seen.since, self._text(rank, seen, phase, alike), alike)

    def _take(self, seen: _Seen, report: WorkerReport, now: float) -> None:
        seen.answered, seen.waits_for = self._clock, report.waits_for
        if (report.phase, report.step, report.moves) != (seen.phase, seen.step, seen.moves):
            seen.phase, seen.step, seen.moves = report.phase, report.step, report.moves
            seen.moved, seen.since = self._clock, now

    def _is_silent(self, seen: _Seen) -> bool:
        """For most of the time that it stood still: one late answer is nothing."""
        return self._clock - seen.answered > (self._clock - seen.moved) / 2

    def _phase(self, seen: _Seen) -> Phase:
        """Where a rank is: it has left what it last told of when another has finished a step since, which takes all."""
        front = max(self._seen.values(), key=lambda other: other.place)
        return front.phase if front.step > seen.step else seen.phase

    def _limit(self, seen: _Seen, phase: Phase) -> tuple[str, float]:
        if phase is Phase.TRAIN and not seen.waits_for:
            return "hang_timeout_s", self._limits.hang_timeout_s
        return "slow_phase_timeout_s", self._limits.slow_phase_timeout_s

    def _text(self, rank: int, seen: _Seen, phase: Phase, alike: tuple[int, ...]) -> str:
        option, limit = self._limit(seen, phase)
        text = f"rank {rank} stood still for {self._clock - seen.moved:.0f} s in phase {phase} at step {seen.step}"
        if self._is_silent(seen):
            text += " and does not answer"
        if seen.waits_for:
            text += f", waiting for data ({seen.waits_for})"
        if alike:
            text += f", and so did ranks {', '.join(map(str, alike))}"
        return f"{text}; if that can be its work, raise {option} (now {limit:g})"


@dataclass(slots=True)
class _Window:
    """Work of one rank since its stage's last window, and for how many windows it was behind, or not, in a row."""

    steps: int = 0
    own_s: float = 0.0
    step_s: float = 0.0
    behind: int = 0
    level: int = 0
    is_told: bool = False


class StragglerWatch:
    """Watches the ranks of one attempt for one that is steadily slower than the others of its pipeline stage.

    `stage_of` is each rank's pipeline stage (their work differs from stage to stage), `where` its node's address. A
    rank that has its stage to itself cannot be compared.
    """

    def __init__(self, factor: float, stage_of: Mapping[int, int], where: Mapping[int, str]) -> None:
        self._factor, self._where = factor, where
        self._stages: dict[int, dict[int, _Window]] = {}
        self._stage_of = stage_of
        for rank, stage in sorted(stage_of.items()):
            self._stages.setdefault(stage, {})[rank] = _Window()

    def hear(self, rank: int, work: Work | None) -> list[str]:
        """Take what one report says; a warning for each rank now found to be steadily behind, once until it recovers.

        Ranks are compared when all of the stage have done `_WINDOW_STEPS` steps since they last were.
        """
        if work is None:
            return []
        stage = self._stages[self._stage_of[rank]]
        window = stage[rank]
        window.steps += work.steps
        window.own_s += work.own_s
        window.step_s += work.step_s
        if len(stage) < 2 or min(each.steps for each in stage.values()) < _WINDOW_STEPS:
            return []
        warnings = [text for each in stage if (text := self._compare(each, stage))]
        for each in stage.values():
            each.steps, each.own_s, each.step_s = 0, 0.0, 0.0
        return warnings

    def _compare(self, rank: int, stage: Mapping[int, _Window]) -> str | None:
        window = stage[rank]
        others = {other: each.own_s / each.steps for other, each in stage.items() if other != rank}
        own_s, step_s, usual_s = window.own_s / window.steps, window.step_s / window.steps, median(others.values())
        if own_s <= self._factor * usual_s:
            window.behind, window.level = 0, window.level + 1
            window.is_told &= window.level < _WINDOWS
            return None
        window.behind, window.level = window.behind + 1, 0
        if window.is_told or window.behind < _WINDOWS:
            return None
        window.is_told = True
        share = f"{100 * own_s / step_s:.0f} %" if step_s > 0 else "all"
        mine = f"its own work takes {_seconds(own_s)} of each {_seconds(step_s)} step ({share})"
        if len(others) > 1:
            return f"rank {rank} on {self._where[rank]} falls behind: {mine}, the median rank's {_seconds(usual_s)}"
        (other,) = others
        return (
            f"rank {rank} on {self._where[rank]} is the slower of two: {mine}, rank {other}'s on {self._where[other]} "
            f"{_seconds(usual_s)}; there is no third rank to say which of them is as it should be"
        )


def _seconds(value: float) -> str:
    """`0.31 s`, `12.40 s`; below a tenth two digits that count: `0.0052 s`."""
    return f"{value:.2f} s" if value >= 0.1 else f"{value:.2g} s"
