"""How a run's time was spent, over all its attempts: pure arithmetic, with times passed in."""

from __future__ import annotations

from array import array

from raytrain_llama3.messages import Failure, FailureKind, StepRecord
from raytrain_llama3.metrics.record import Accounts


class Ledger:
    """Adds up one run, as this process saw it.

    Goodput is the seconds of the steps that count (`StepRecord.step_s`: without evaluation and saving) over the
    seconds since the run began, which is when its metrics were opened. A step counts unless a later attempt resumed
    before it; trained again it counts once, with its later time. So start-up, evaluations, saves, faults, recoveries
    and lost steps all lower it, and a run without a fault stays below 1 too. Steps of an earlier process, from whose
    checkpoint this one went on, count on neither side.

    `lost_steps` are those that an attempt resumed before, each time that one did; steps after the last checkpoint of
    a run that ended badly are not among them, since no attempt followed.
    """

    def __init__(self) -> None:
        # 16 bytes a step: a run may have millions. Ascending.
        self._steps, self._seconds = array("q"), array("d")
        self._attempts = self._faults = self._preemptions = self._lost_steps = 0

    def start_attempt(self, resume_step: int) -> None:
        """An attempt starts after `resume_step`: steps after that no longer count."""
        self._attempts += 1
        if self._steps:
            self._lost_steps += max(self._steps[-1] - resume_step, 0)
        self._drop_after(resume_step)

    def step(self, record: StepRecord) -> None:
        """Take one finished step."""
        self._drop_after(record.step - 1)
        self._steps.append(record.step)
        self._seconds.append(record.step_s)

    def fault(self, failure: Failure) -> None:
        """Take one fault; a node that died is a preemption."""
        if failure.kind is FailureKind.NODE_DIED:
            self._preemptions += 1
        else:
            self._faults += 1

    def accounts(self, elapsed_s: float) -> Accounts:
        """The sums, `elapsed_s` seconds after the run began."""
        counted_s = sum(self._seconds)
        goodput = counted_s / elapsed_s if elapsed_s > 0 else 0.0
        return Accounts(
            self._attempts, self._faults, self._preemptions, self._lost_steps, counted_s, elapsed_s, goodput
        )

    def _drop_after(self, step: int) -> None:
        while self._steps and self._steps[-1] > step:
            self._steps.pop()
            self._seconds.pop()
