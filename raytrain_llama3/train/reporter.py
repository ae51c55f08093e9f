"""What a rank tells the driver: filled by the training thread, drained by polls on another."""

from __future__ import annotations

import threading
import time

from raytrain_llama3.messages import EvalRecord, Phase, SaveFailure, SaveRecord, StepRecord, Work, WorkerReport


class Reporter:
    """Thread-safe mailbox. The training thread never waits for the driver."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rank = -1
        self._phase = Phase.START
        self._since = time.monotonic()
        self._step = 0
        self._moves = 0
        self._waits_for = ""
        self._work: Work | None = None
        self._steps: list[StepRecord] = []
        self._evals: list[EvalRecord] = []
        self._saves: list[SaveRecord | SaveFailure] = []
        self._warnings: list[str] = []
        self._seconds: dict[str, float] = {}

    def begin(self, rank: int) -> None:
        """Start a new attempt as `rank`: what an earlier one left unread is dropped."""
        with self._lock:
            self._rank, self._step, self._work, self._waits_for = rank, 0, None, ""
            self._steps, self._evals, self._saves, self._warnings = [], [], [], []
            self._phase, self._since, self._seconds = Phase.START, time.monotonic(), {}

    @property
    def phase(self) -> Phase:
        """What this rank is doing, or was doing when its training ended."""
        return self._phase

    def enter(self, phase: Phase) -> None:
        """Leave the present phase, adding up its seconds, for `phase`."""
        now = time.monotonic()
        with self._lock:
            self._seconds[self._phase.value] = self._seconds.get(self._phase.value, 0.0) + now - self._since
            self._phase, self._since = phase, now
            self._moves += 1

    def at_step(self, step: int) -> None:
        """Count a finished step (every rank does: the driver watches that it moves)."""
        with self._lock:
            self._step = step
            self._moves += 1

    def at_round(self) -> None:
        """Count a finished evaluation round."""
        with self._lock:
            self._moves += 1

    def waits_for(self, what: str) -> None:
        """Say what is waited for, which is no move, as the other ranks stand still as well; empty: nothing any more."""
        with self._lock:
            self._waits_for = what

    def worked(self, own_s: float, step_s: float) -> None:
        """Add one step's seconds, and of these this rank's own work, to what the next poll takes."""
        with self._lock:
            so_far = self._work or Work(0, 0.0, 0.0)
            self._work = Work(so_far.steps + 1, so_far.own_s + own_s, so_far.step_s + step_s)

    def add(self, record: StepRecord | EvalRecord | SaveRecord | SaveFailure | str) -> None:
        """Queue a record, or a warning as text, for the next poll."""
        with self._lock:
            match record:
                case StepRecord():
                    self._steps.append(record)
                case EvalRecord():
                    self._evals.append(record)
                case SaveRecord() | SaveFailure():
                    self._saves.append(record)
                case str():
                    self._warnings.append(record)

    def poll(self) -> WorkerReport:
        """Everything since the last poll."""
        with self._lock:
            report = WorkerReport(
                rank=self._rank,
                phase=self._phase,
                step=self._step,
                moves=self._moves,
                waits_for=self._waits_for,
                work=self._work,
                steps=tuple(self._steps),
                evals=tuple(self._evals),
                saves=tuple(self._saves),
                warnings=tuple(self._warnings),
                phase_seconds=dict(self._seconds),
            )
            self._steps, self._evals, self._saves, self._warnings = [], [], [], []
            self._work = None
            return report
