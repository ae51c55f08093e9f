"""THE loop: place the ranks, start them, watch them train; after a fault clear, decide, and go on or stop."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

from raytrain_llama3.checkpoint.store import CheckpointStore
from raytrain_llama3.config import env
from raytrain_llama3.config.plan import RunPlan
from raytrain_llama3.errors import CheckpointError, StoppedBySignal
from raytrain_llama3.launch import gang, placement, recovery
from raytrain_llama3.launch.gang import Gang
from raytrain_llama3.launch.history import History
from raytrain_llama3.launch.session import Node, Session
from raytrain_llama3.launch.signals import AFTER_ONE, AT_ONCE, NEVER, StopSignal
from raytrain_llama3.messages import EndReason, Failure, RankResult, ResumePoint, RunResult, WorkerReport
from raytrain_llama3.metrics import Metrics

_WATCH_S = 0.5
_POLL_TIMEOUT_S = 5.0
_LAST_POLL_TIMEOUT_S = 60.0


class State(StrEnum):
    """Where the run is."""

    PLACING = "placing"
    STARTING = "starting"
    TRAINING = "training"
    STOPPING = "stopping"
    CLEARING = "clearing"
    DECIDING = "deciding"
    ENDED = "ended"


_PATIENCE = {
    State.PLACING: AT_ONCE,
    State.STARTING: AT_ONCE,
    State.TRAINING: AFTER_ONE,
    State.STOPPING: AFTER_ONE,
    State.CLEARING: NEVER,
    State.DECIDING: AT_ONCE,
    State.ENDED: NEVER,
}
"""How many signals are only noted in each state."""


class Supervisor:
    """Runs one plan to its end on one session, over as many attempts as it takes."""

    def __init__(
        self,
        plan: RunPlan,
        worker_class: type,
        session: Session,
        store: CheckpointStore,
        metrics: Metrics,
        stop: StopSignal,
    ) -> None:
        self._plan, self._worker_class, self._session = plan, worker_class, session
        self._store, self._metrics, self._stop = store, metrics, stop
        self._name = f"raytrain-{plan.config.exp_name}-{secrets.token_hex(4)}"
        self._found = {*store.complete(), *store.wrecks()}
        self._published: set[int] = set()
        self._dashboard_told = False
        self._history = History()
        self._seconds: dict[str, float] = {}
        self._step = 0
        self.state = State.PLACING

    def run(self) -> RunResult:
        """Train to the target. Raises the `RaytrainError` whose exit code the command ends with."""
        try:
            while True:
                outcome = self._attempt()
                if not isinstance(outcome, Failure):
                    return self._ended(outcome)
                self._decide(outcome)
        finally:
            self._remove_own_wrecks()

    def _attempt(self) -> list[RankResult] | Failure:
        """One attempt: everything that it starts is gone when this returns."""
        attempt, began = len(self._history.failures), time.monotonic()
        resume = self._store.resume_point()
        self._step = resume.step if resume else 0
        self._metrics.start_attempt(attempt, self._step)
        for path in self._store.set_aside_damaged(self._step):
            self._metrics.event(f"{path}: set aside, files are missing that were there when it was published")
        if resume:
            self._metrics.event(f"resuming from {resume.path} (step {resume.step}, {resume.samples} samples)")
        self._enter(State.PLACING)
        with placement.reserve(self._session, self._plan, f"{self._name}-{attempt}") as place:
            self._seconds = {"place": time.monotonic() - began}
            try:
                return self._train(*place, attempt, resume)
            except gang.RankFailed as lost:
                return replace(lost.failure, step=self._step)

    def _train(
        self, group: Any, nodes: list[Node], attempt: int, resume: ResumePoint | None
    ) -> list[RankResult] | Failure:
        self._enter(State.STARTING)
        self._metrics.event(f"starting {len(nodes)} ranks, which takes some seconds")
        began = time.monotonic()
        with gang.start(self._worker_class, self._plan, group, nodes, attempt) as ranks:
            self._seconds["actors"] = time.monotonic() - began
            ranks.run(f"{self._name}-{attempt}", resume)
            self._enter(State.TRAINING)
            outcome = self._watch(ranks)
            self._enter(State.CLEARING)
            return outcome

    def _watch(self, ranks: Gang) -> list[RankResult] | Failure:
        """Hear from the ranks, off their critical path, until all have ended or one has failed."""
        results: list[RankResult] = []
        stop_by: float | None = None
        while ranks.is_running:
            ended, failure = ranks.wait(_WATCH_S)
            results += ended
            if self._stop.is_set and stop_by is None:
                self._enter(State.STOPPING)
                self._metrics.event(
                    f"{self._stop.name}: the ranks finish their step, save and stop, in "
                    f"{self._plan.config.grace_s} s at most; a second signal ends at once"
                )
                ranks.request_stop()
                stop_by = time.monotonic() + self._plan.config.grace_s
            self._record(ranks.poll(_POLL_TIMEOUT_S))
            self._tell_of_dashboard()
            if failure is not None:
                return replace(failure, step=self._step)
            if ranks.is_running and stop_by is not None and time.monotonic() > stop_by:
                raise StoppedBySignal(
                    f"{self._stop.name}: the ranks did not end within grace_s {self._plan.config.grace_s} s; what "
                    "they did since the newest checkpoint is lost"
                )
        # An answer above may have been on its way before the last records were there.
        self._record(ranks.poll(_LAST_POLL_TIMEOUT_S))
        return results

    def _tell_of_dashboard(self) -> None:
        """Open it when the first step is done, so that it takes nothing from the start; say where it is, once."""
        dashboard = self._session.dashboard
        if dashboard is None or not self._step:
            return
        dashboard.open()
        if dashboard.url and not self._dashboard_told:
            self._dashboard_told = True
            token = env.snapshot().get("RAY_AUTH_TOKEN_PATH")
            self._metrics.event(f"Ray dashboard: http://{dashboard.url} (it asks for a token: cat {token})")

    def _record(self, reports: Sequence[WorkerReport]) -> None:
        for report in reports:
            for step in report.steps:
                self._step = step.step
                self._metrics.step(step)
            for evaluation in report.evals:
                self._metrics.evaluation(evaluation)
            for save in report.saves:
                self._store.publish(save)
                self._published.add(save.step)
                self._history.progressed()
                self._metrics.saved(save)
            for warning in report.warnings:
                self._metrics.event(f"rank {report.rank}: {warning}")
            if report.rank == 0:
                self._seconds |= report.phase_seconds

    def _decide(self, failure: Failure) -> None:
        self._enter(State.DECIDING)
        for line in describe(failure):
            self._metrics.event(line)
        if self._stop.is_set:
            raise StoppedBySignal(f"{self._stop.name}; a rank failed while stopping: {failure.error}")
        failure = replace(failure, at=failure.at or time.time())
        # Every attempt takes all nodes of the session: which ones, and how many, is not decided here yet.
        nodes = recovery.Situation(wanted=1, usable=1, waited_s=0.0, has_checkpoint=bool(self._store.complete()))
        decision = recovery.decide(failure, self._history, nodes, self._plan.config)
        self._history.add(failure)
        match decision:
            case recovery.Stop(error):
                self._metrics.fault(failure, f"stop: {error}")
                raise error
            case recovery.Restart(why):
                self._metrics.fault(failure, why)
                self._metrics.event(why)
                self._remove_own_wrecks()

    def _remove_own_wrecks(self) -> None:
        """Saves of this run that were cut off: a first one left behind would keep the next run from step 0."""
        for step in set(self._store.wrecks()) - self._found - self._published:
            self._store.discard(step)

    def _ended(self, results: list[RankResult]) -> RunResult:
        self._enter(State.ENDED)
        first = min(results, key=lambda result: result.rank)
        if first.saved_step is not None and first.saved_step not in self._published | self._found:
            raise CheckpointError(f"step {first.saved_step} was saved, but rank 0 did not say so in time to publish it")
        if first.reason is EndReason.STOP:
            saved = f"saved at step {first.saved_step}" if first.saved_step else "nothing to save"
            raise StoppedBySignal(f"{self._stop.name}: stopped after step {first.step}, {saved}")
        return RunResult(
            first.reason,
            first.step,
            first.samples,
            first.saved_step,
            len(self._history.failures) + 1,
            dict(self._seconds),
        )

    def _enter(self, state: State) -> None:
        self.state = state
        self._stop.patience = _PATIENCE[state]


def describe(failure: Failure) -> list[str]:
    """A fault for people: who, where, why, the last lines of its log, and the others in one line."""
    lines = [
        f"rank {failure.rank} on {failure.node_ip} failed at step {failure.step} ({failure.kind}): {failure.error}"
    ]
    if failure.others:
        lines.append(f"ranks {', '.join(map(str, failure.others))} fell with it")
    if failure.log_tail:
        lines.append(f"the last lines of {failure.log_path}:")
        lines += [f"  | {line}" for line in failure.log_tail]
    return lines
