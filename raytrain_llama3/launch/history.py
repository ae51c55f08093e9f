"""What went wrong so far in a run, counted: plain values, with times passed in and never read from a clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from raytrain_llama3.messages import Failure, FailureKind

_NOT_THE_NODES_OWN = frozenset({FailureKind.NODE_DIED, FailureKind.PEER_LOST, FailureKind.NON_FINITE})
"""A node that went away comes back as another; who lost a peer is a victim; numbers are the same on every node."""


class History:
    """The failures of a run, oldest first, and where among them a checkpoint was published. Times are Unix seconds."""

    def __init__(self) -> None:
        self._failures: list[Failure] = []
        self._forgiven = 0

    @property
    def failures(self) -> Sequence[Failure]:
        """All of them, oldest first, those before the last progress too."""
        return tuple(self._failures)

    def add(self, failure: Failure) -> None:
        """Take one more; it happened at `failure.at`."""
        self._failures.append(failure)

    def progressed(self) -> None:
        """A new checkpoint was published, which gives both budgets back."""
        self._forgiven = len(self._failures)

    def counted(self, *, preemptions: bool, now: float, window_s: float) -> int:
        """How many count against a budget: since the last progress and in the last `window_s` seconds.

        Nodes that died count as preemptions, everything else does not.
        """
        since = now - window_s
        return sum(
            is_preemption(failure) == preemptions and failure.at >= since
            for failure in self._failures[self._forgiven :]
        )

    def strikes(self, now: float, window_s: float) -> Mapping[str, int]:
        """By node id: faults of its own in the last `window_s` seconds. Progress does not forgive these."""
        since = now - window_s
        return Counter(f.node_id for f in self._failures if is_strike(f) and f.at >= since)


def is_preemption(failure: Failure) -> bool:
    """Whether the node went away, rather than something on it going wrong."""
    return failure.kind is FailureKind.NODE_DIED


def is_strike(failure: Failure) -> bool:
    """Whether it speaks against the node on which it happened, as far as that is known."""
    return bool(failure.node_id) and failure.kind not in _NOT_THE_NODES_OWN
