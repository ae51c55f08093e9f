"""What to do after a fault: a pure function of the failure, of what happened before, and of the nodes there are."""

from __future__ import annotations

import re
from dataclasses import dataclass

from raytrain_llama3.config.schema import Faults
from raytrain_llama3.errors import (
    ClusterFormationError,
    NonFiniteError,
    NoSafeStateError,
    RaytrainError,
    RepeatedFaultError,
    RestartBudgetError,
)
from raytrain_llama3.launch.history import History, is_preemption, is_strike
from raytrain_llama3.messages import Failure, FailureKind

_RETRYABLE = 128
"""Exit codes from here on may be tried again; an error of ours with a lower one is permanent."""

_SAYS_NOTHING = frozenset({FailureKind.DIED, FailureKind.NODE_DIED, FailureKind.PEER_LOST})
"""Kinds that do not tell why, so that two of them are never known to be the same fault."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What there is to go on with, once the failed attempt is cleared away."""

    wanted: int
    """Nodes that the full layout needs."""
    usable: int
    """Living nodes with room: spares are among them, nodes left out are not, the failing one is if it lives."""
    waited_s: float
    """Seconds that nodes have been waited for since this failure."""
    has_checkpoint: bool
    """Whether there is a complete checkpoint."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Start another attempt, of the full layout, from the newest complete checkpoint."""

    why: str
    without: str | None = None
    """Id of a node to leave out from now on."""


@dataclass(frozen=True, slots=True)
class Shrink:
    """Start another attempt on `nodes` nodes, fewer than the full layout needs."""

    why: str
    nodes: int
    without: str | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for nodes, at most `for_s` seconds; then, or as soon as one comes, decide again."""

    why: str
    for_s: float


@dataclass(frozen=True, slots=True)
class Stop:
    """End the run with this error."""

    error: RaytrainError


Decision = Restart | Shrink | Wait | Stop


def decide(failure: Failure, history: History, situation: Situation, limits: Faults) -> Decision:
    """What to do about `failure`, which `history` does not hold yet; asked again, it answers the same.

    What is permanent comes first, then the budgets, then whether there are nodes enough.
    """
    error = _permanent(failure, history, situation) or _over_budget(failure, history, limits)
    if error is not None:
        return Stop(error)
    return _with_nodes(failure, history, situation, limits)


def error_with(exit_code: int, message: str) -> RaytrainError:
    """An error of the run that carries a rank's own exit code."""
    error = RaytrainError(message)
    error.exit_code = exit_code  # type: ignore[misc]
    return error


def _permanent(failure: Failure, history: History, situation: Situation) -> RaytrainError | None:
    """The error of a fault that another attempt would only meet again."""
    if failure.kind is FailureKind.NON_FINITE:
        return NonFiniteError(failure.error)
    if failure.exit_code is not None and failure.exit_code < _RETRYABLE:
        return error_with(failure.exit_code, failure.error)
    if not any(_same(failure, before) for before in history.failures):
        return None
    repeated = f"the same fault came back at step {failure.step} ({failure.kind}): {failure.error}"
    if situation.has_checkpoint:
        return RepeatedFaultError(f"{repeated}; restarting is no use")
    return NoSafeStateError(f"{repeated}; and there is no complete checkpoint to go on from: the run never got past it")


def _over_budget(failure: Failure, history: History, limits: Faults) -> RestartBudgetError | None:
    option, limit, number = _budget(failure, history, limits)
    if number <= limit:
        return None
    return RestartBudgetError(
        f"{option} {limit} used up, in {limits.restart_window_s} s and with no new checkpoint in between; the last "
        f"fault: {failure.error}"
    )


def _budget(failure: Failure, history: History, limits: Faults) -> tuple[str, int, int]:
    """The option that bounds faults of this kind, its value, and this one's number among those that count."""
    preempted = is_preemption(failure)
    number = 1 + history.counted(preemptions=preempted, now=failure.at, window_s=limits.restart_window_s)
    if preempted:
        return "max_preemptions", limits.max_preemptions, number
    return "max_restarts", limits.max_restarts, number


def _with_nodes(failure: Failure, history: History, situation: Situation, limits: Faults) -> Decision:
    _, limit, number = _budget(failure, history, limits)
    why = f"{'preemption' if is_preemption(failure) else 'restart'} {number} of {limit}"
    without, remark = _left_out(failure, history, situation, limits)
    why += remark
    wanted, usable = situation.wanted, situation.usable - (without is not None)
    if usable >= wanted:
        return Restart(why, without)
    there = f"{usable} of {wanted} nodes are usable"
    left_s = limits.node_rejoin_timeout_s - situation.waited_s
    if left_s > 0:
        return Wait(f"{why}; {there}: waiting {left_s:.0f} s at most for another", left_s)
    least = limits.elastic_min_nodes
    late = f"no other came within node_rejoin_timeout_s {limits.node_rejoin_timeout_s}"
    if least is not None and usable >= least:
        return Shrink(f"{why}; going on with {usable} of {wanted} nodes, {late}", usable, without)
    remedy = (
        "set elastic_min_nodes to go on with fewer"
        if least is None
        else f"elastic_min_nodes {least} does not allow so few: lower it"
    )
    return Stop(
        ClusterFormationError(
            f"{there} after a fault ({failure.error}), and {late}; bring a node back, keep spare_nodes ready, wait "
            f"longer, or {remedy}"
        )
    )


def _left_out(failure: Failure, history: History, situation: Situation, limits: Faults) -> tuple[str | None, str]:
    """The node to leave out after too many faults of its own, if others can take its place; and words about it."""
    if not is_strike(failure):
        return None, ""
    strikes = 1 + history.strikes(failure.at, limits.restart_window_s).get(failure.node_id, 0)
    if strikes < limits.node_strikes:
        return None, ""
    times = "once" if strikes == 1 else f"{strikes} times"
    others, least = situation.usable - 1, limits.elastic_min_nodes
    if others >= situation.wanted or (least is not None and others >= least):
        return failure.node_id, f"; {failure.node_ip} has failed {times} (node_strikes {limits.node_strikes}): left out"
    return None, f"; {failure.node_ip} has failed {times} and there is no other node: it stays"


def _same(a: Failure, b: Failure) -> bool:
    if a.kind is not b.kind or a.step != b.step or a.kind in _SAYS_NOTHING:
        return False
    # Of a hang the step is all that is known: which rank is named, and where it stood, differs from time to time.
    return a.kind is FailureKind.HANG or _words(a) == _words(b)


def _words(failure: Failure) -> str:
    """The error without the process's number, which is another in each attempt."""
    return re.sub(r"\bprocess \d+\b", "the process", failure.error)
