"""What to do after a fault: a pure function of the failure and of what happened before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raytrain_llama3.errors import NonFiniteError, RaytrainError, RepeatedFaultError, RestartBudgetError
from raytrain_llama3.messages import Failure, FailureKind

_RETRYABLE = 128
"""Exit codes from here on may be tried again; an error of ours with a lower one is permanent."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Start another attempt from the newest complete checkpoint."""

    why: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End the run with this error."""

    error: RaytrainError


Decision = Restart | Stop


def decide(failure: Failure, earlier: Sequence[Failure], max_restarts: int) -> Decision:
    """Restart, or stop for good; `earlier` are the failures of attempts before this one, oldest first."""
    if failure.kind is FailureKind.NON_FINITE:
        return Stop(NonFiniteError(failure.error))
    if failure.exit_code is not None and failure.exit_code < _RETRYABLE:
        return Stop(error_with(failure.exit_code, failure.error))
    if any(_same(failure, before) for before in earlier):
        return Stop(
            RepeatedFaultError(
                f"the same fault came back at step {failure.step}: {failure.error}; restarting is no use"
            )
        )
    if len(earlier) >= max_restarts:
        return Stop(RestartBudgetError(f"max_restarts {max_restarts} used up; the last fault: {failure.error}"))
    return Restart(f"restart {len(earlier) + 1} of {max_restarts}")


def error_with(exit_code: int, message: str) -> RaytrainError:
    """An error of the run that carries a rank's own exit code."""
    error = RaytrainError(message)
    error.exit_code = exit_code  # type: ignore[misc]
    return error


def _same(a: Failure, b: Failure) -> bool:
    # A process that died says nothing about why. Of a hang the step is all that is known: which rank is named, and
    # where it stood, differs from time to time.
    if a.kind is not b.kind or a.step != b.step:
        return False
    return a.kind is FailureKind.HANG or (a.kind is FailureKind.EXCEPTION and a.error == b.error)
