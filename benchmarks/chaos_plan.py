"""Which faults a chaotic run suffers, and when: a pure function of the seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What is done to the run."""

    KILL = "SIGKILL of a rank"
    KILL_SAVING = "SIGKILL of a rank while saving"
    STOP = "SIGSTOP of a rank"
    SEGFAULT = "SIGSEGV to a rank"
    TERM = "SIGTERM to a rank"
    STANDBY = "SIGKILL of a standby process"
    NODE = "SIGKILL of the second node's raylet"


WEIGHTS = {
    Kind.KILL: 30,
    Kind.KILL_SAVING: 15,
    Kind.STOP: 12,
    Kind.SEGFAULT: 11,
    Kind.TERM: 11,
    Kind.STANDBY: 9,
    Kind.NODE: 12,
}
_GAP_STEPS = (10, 40)
_DELAY_S = (0.0, 1.5)
_SOON_S = (0.0, 8.0)
_SOON_SHARE = 0.2
_ABSENCE_S = (1.0, 8.0)
_MARGIN_STEPS = 150


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `rank` is whose, where it is a rank's."""

    kind: Kind
    rank: int
    at_step: int | None
    """Strikes once so many steps are done; None: soon after the fault before, whatever the run is doing then."""
    delay_s: float
    """Seconds to wait then."""
    absence_s: float
    """A node: seconds from its end to the start of another."""


def faults(seed: int, count: int, ranks: int, kinds: Sequence[Kind]) -> list[Fault]:
    """`count` faults of `kinds`, each kind at least once where there is room."""
    chance = random.Random(seed)
    chosen = list(kinds)[:count]
    chosen += chance.choices(kinds, [WEIGHTS[kind] for kind in kinds], k=count - len(chosen))
    chance.shuffle(chosen)
    found, step = list[Fault](), 0
    for kind in chosen:
        # The same hang or crash twice at one step ends a run, as it should.
        is_soon = bool(found) and kind not in (Kind.STOP, Kind.SEGFAULT) and chance.random() < _SOON_SHARE
        step += 0 if is_soon else chance.randint(*_GAP_STEPS)
        found.append(
            Fault(
                kind,
                chance.randrange(ranks),
                None if is_soon else step,
                chance.uniform(*(_SOON_S if is_soon else _DELAY_S)),
                chance.uniform(*_ABSENCE_S),
            )
        )
    return found


def target(planned: Sequence[Fault]) -> int:
    """Steps that the run trains for: beyond the last fault."""
    return max(fault.at_step or 0 for fault in planned) + _MARGIN_STEPS
