from __future__ import annotations

import pickle

import pytest

from raytrain_llama3.errors import NonFiniteError, RaytrainError, RepeatedFaultError, RestartBudgetError
from raytrain_llama3.launch.recovery import Restart, Stop, decide
from raytrain_llama3.messages import Failure, FailureKind

DIED, NODE, HANG = FailureKind.DIED, FailureKind.NODE_DIED, FailureKind.HANG
RAISED, NAN = FailureKind.EXCEPTION, FailureKind.NON_FINITE


def fault(
    kind: FailureKind, step: int = 10, error: str = "RuntimeError: lost", exit_code: int | None = None
) -> Failure:
    return Failure(2, "10.0.0.1", kind, error, step, attempt=0, exit_code=exit_code)


TABLE = [
    # the failure, those before it, and the exit code that the run ends with, or None for a restart
    (fault(RAISED), [], None),
    (fault(DIED), [], None),
    (fault(NODE), [], None),
    (fault(HANG), [], None),
    # never again: numbers that are not finite, and errors whose exit code is below 128
    (fault(NAN, exit_code=4), [], 4),
    (fault(NAN), [], 4),
    (fault(RAISED, exit_code=2), [], 2),
    (fault(RAISED, exit_code=3), [], 3),
    (fault(RAISED, exit_code=127), [], 127),
    (fault(RAISED, exit_code=128), [], None),
    (fault(RAISED, exit_code=139), [], None),
    # the same fault at the same step twice
    (fault(RAISED), [fault(RAISED)], 4),
    (fault(RAISED), [fault(RAISED), fault(DIED, step=12)], 4),
    (fault(HANG, error="rank 1 stood still"), [fault(HANG, error="rank 2 stood still")], 4),
    # another step, other words, another kind, or a death that says nothing about why
    (fault(RAISED, step=11), [fault(RAISED, step=10)], None),
    (fault(HANG, step=11), [fault(HANG, step=10)], None),
    (fault(RAISED, error="OSError: disk"), [fault(RAISED)], None),
    (fault(RAISED), [fault(DIED)], None),
    (fault(HANG), [fault(RAISED)], None),
    (fault(DIED), [fault(DIED)], None),
    (fault(NODE), [fault(NODE)], None),
    # the budget of three
    (fault(DIED), [fault(DIED)] * 2, None),
    (fault(DIED), [fault(DIED)] * 3, 138),
    (fault(DIED), [fault(DIED)] * 4, 138),
    # what is permanent stays so when the budget is spent, and so does what came back
    (fault(RAISED, exit_code=2), [fault(DIED)] * 3, 2),
    (fault(RAISED), [fault(DIED), fault(DIED), fault(RAISED)], 4),
]


@pytest.mark.parametrize(("failure", "earlier", "exit_code"), TABLE)
def test_restart_or_the_exit_code_that_the_run_ends_with(
    failure: Failure, earlier: list[Failure], exit_code: int | None
) -> None:
    decision = decide(failure, earlier, max_restarts=3)
    assert isinstance(decision, Restart) == (exit_code is None)
    if isinstance(decision, Stop):
        assert decision.error.exit_code == exit_code
        assert failure.error in str(decision.error)


@pytest.mark.parametrize(
    ("failure", "earlier", "error"),
    [
        (fault(NAN), [], NonFiniteError),
        (fault(RAISED), [fault(RAISED)], RepeatedFaultError),
        (fault(DIED), [fault(DIED)] * 3, RestartBudgetError),
    ],
)
def test_the_run_ends_with_the_error_that_says_why(
    failure: Failure, earlier: list[Failure], error: type[RaytrainError]
) -> None:
    decision = decide(failure, earlier, max_restarts=3)
    assert isinstance(decision, Stop)
    assert type(decision.error) is error


def test_without_restarts_the_first_fault_ends_the_run() -> None:
    decision = decide(fault(DIED), [], max_restarts=0)
    assert isinstance(decision, Stop)
    assert "max_restarts 0" in str(decision.error)


def test_a_restart_says_which_of_how_many_it_is() -> None:
    assert decide(fault(DIED), [fault(DIED)], max_restarts=3) == Restart("restart 2 of 3")


def test_a_repeated_fault_names_its_step() -> None:
    decision = decide(fault(RAISED, step=17), [fault(RAISED, step=17)], max_restarts=3)
    assert isinstance(decision, Stop)
    assert "step 17" in str(decision.error)


def test_an_error_with_a_ranks_exit_code_survives_pickling() -> None:
    decision = decide(fault(RAISED, exit_code=3), [], max_restarts=3)
    assert isinstance(decision, Stop)
    copy = pickle.loads(pickle.dumps(decision.error))
    assert (copy.exit_code, str(copy)) == (3, "RuntimeError: lost")
