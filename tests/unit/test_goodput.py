from __future__ import annotations

from collections.abc import Iterable

import pytest

from raytrain_llama3.messages import Failure, FailureKind, StepRecord
from raytrain_llama3.metrics.goodput import Ledger
from raytrain_llama3.metrics.record import Accounts


def train(ledger: Ledger, steps: Iterable[int], step_s: float = 1.0) -> None:
    for number in steps:
        ledger.step(StepRecord(number, number * 8, 256, 2.5, 1e-3, 0.5, step_s, 1000.0))


def fail(ledger: Ledger, kind: FailureKind = FailureKind.DIED) -> None:
    ledger.fault(Failure(1, "10.0.0.7", kind, "gone", 5, 0))


def test_a_run_without_a_fault_spends_the_rest_on_what_are_no_steps() -> None:
    ledger = Ledger()
    ledger.start_attempt(0)
    train(ledger, range(1, 11))
    assert ledger.accounts(12.5) == Accounts(1, 0, 0, 0, 10.0, 12.5, 0.8)


def test_before_anything_there_is_nothing() -> None:
    assert Ledger().accounts(0.0) == Accounts()


def test_a_run_that_goes_on_from_an_earlier_ones_checkpoint_counts_its_own_steps() -> None:
    ledger = Ledger()
    ledger.start_attempt(100)
    train(ledger, range(101, 111))
    assert ledger.accounts(20.0) == Accounts(1, 0, 0, 0, 10.0, 20.0, 0.5)


def test_steps_trained_again_count_once_with_their_later_time() -> None:
    ledger = Ledger()
    ledger.start_attempt(0)
    train(ledger, range(1, 9))
    fail(ledger)
    # Between the fault and the first step after it, lost steps count already no more.
    ledger.start_attempt(5)
    assert ledger.accounts(10.0) == Accounts(2, 1, 0, 3, 5.0, 10.0, 0.5)
    train(ledger, range(6, 11), step_s=2.0)
    assert ledger.accounts(20.0) == Accounts(2, 1, 0, 3, 15.0, 20.0, 0.75)


def test_two_faults_at_the_same_steps_lose_them_twice() -> None:
    ledger = Ledger()
    ledger.start_attempt(0)
    train(ledger, range(1, 9))
    for kind in (FailureKind.DIED, FailureKind.NODE_DIED):
        fail(ledger, kind)
        ledger.start_attempt(5)
        train(ledger, range(6, 10))
    # 6 to 8, then 6 to 9.
    assert ledger.accounts(18.0) == Accounts(3, 1, 1, 7, 9.0, 18.0, 0.5)


def test_a_fault_during_a_recovery_loses_nothing_more() -> None:
    ledger = Ledger()
    ledger.start_attempt(0)
    train(ledger, range(1, 9))
    for _ in range(2):
        fail(ledger)
        ledger.start_attempt(5)
    assert ledger.accounts(10.0) == Accounts(3, 2, 0, 3, 5.0, 10.0, 0.5)


@pytest.mark.parametrize("resume_step", [0, 40])
def test_a_fault_before_the_first_step_loses_none(resume_step: int) -> None:
    ledger = Ledger()
    ledger.start_attempt(resume_step)
    fail(ledger)
    ledger.start_attempt(resume_step)
    assert ledger.accounts(10.0) == Accounts(2, 1, 0, 0, 0.0, 10.0, 0.0)
    train(ledger, [resume_step + 1])
    assert ledger.accounts(10.0).goodput == 0.1


def test_a_checkpoint_that_was_found_damaged_loses_more() -> None:
    ledger = Ledger()
    ledger.start_attempt(0)
    train(ledger, range(1, 9))
    ledger.start_attempt(6)
    ledger.start_attempt(2)
    accounts = ledger.accounts(10.0)
    assert (accounts.lost_steps, accounts.counted_s) == (6, 2.0)


def test_a_fault_right_after_a_checkpoint_loses_none() -> None:
    ledger = Ledger()
    ledger.start_attempt(0)
    train(ledger, range(1, 6))
    fail(ledger)
    ledger.start_attempt(5)
    assert ledger.accounts(10.0) == Accounts(2, 1, 0, 0, 5.0, 10.0, 0.5)


def test_steps_that_were_never_heard_of_do_not_shift_the_others() -> None:
    # A killed rank 0 took its last records with it; the checkpoint at step 5 was there all the same.
    ledger = Ledger()
    ledger.start_attempt(0)
    train(ledger, range(1, 4))
    ledger.start_attempt(5)
    train(ledger, [6, 7])
    ledger.start_attempt(6)
    accounts = ledger.accounts(10.0)
    assert (accounts.lost_steps, accounts.counted_s) == (1, 4.0)
