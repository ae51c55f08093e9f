"""THE loop: place the ranks, start them, watch them train; after a fault clear, decide, and go on or stop."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum

from raytrain_llama3.checkpoint.store import CheckpointStore
from raytrain_llama3.config.plan import RunPlan
from raytrain_llama3.data.sources import Sources
from raytrain_llama3.errors import CheckpointError, StoppedBySignal
from raytrain_llama3.launch import recovery, report
from raytrain_llama3.launch.checkpoints import RunCheckpoints
from raytrain_llama3.launch.crew import Crew, RankFailed
from raytrain_llama3.launch.elastic import Elastic
from raytrain_llama3.launch.feeders import Feeders
from raytrain_llama3.launch.gang import Gang
from raytrain_llama3.launch.history import History
from raytrain_llama3.launch.keepers import Keepers
from raytrain_llama3.launch.session import Session
from raytrain_llama3.launch.signals import AFTER_ONE, AT_ONCE, NEVER, StopSignal
from raytrain_llama3.launch.watch import Watch
from raytrain_llama3.messages import EndReason, Failure, FailureKind, RankResult, RunResult
from raytrain_llama3.metrics import Metrics

_NODE_POLL_S = 1.0


class State(StrEnum):
    """Where the run is."""

    PLACING = "placing"
    STARTING = "starting"
    TRAINING = "training"
    CLEARING = "clearing"
    DECIDING = "deciding"
    ENDED = "ended"


_PATIENCE = {
    State.PLACING: AT_ONCE,
    State.STARTING: AT_ONCE,
    State.TRAINING: AFTER_ONE,
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
        sources: Sources,
    ) -> None:
        self._session, self._metrics, self._stop = session, metrics, stop
        self._name = f"raytrain-{plan.config.exp_name}-{secrets.token_hex(4)}"
        self._crew = Crew(worker_class, plan, session, self._name)
        self._feeders = Feeders(sources, plan, self._name)
        self._elastic = Elastic(plan, self._crew)
        self._history = History()
        self._keepers = Keepers(self._crew, self._name, is_wanted=plan.config.memory_checkpoint_interval > 0)
        self._checkpoints = RunCheckpoints(store, plan, metrics, self._history, self._keepers)
        self._attempts = 0
        self._recovery: report.Recovery | None = None
        self._seconds: dict[str, float] = {}
        self.state = State.PLACING

    def run(self) -> RunResult:
        """Train to the target. Raises the `RaytrainError` whose exit code the command ends with."""
        try:
            while True:
                outcome = self._attempt()
                if isinstance(outcome, Failure):
                    self._decide(outcome)
                elif self._is_over(outcome):
                    return self._ended(outcome)
        finally:
            self._stop.patience = NEVER
            self._keepers.close()
            self._feeders.close()
            self._crew.close()
            self._checkpoints.remove_own_wrecks()

    def _attempt(self) -> list[RankResult] | Failure:
        """Place the ranks, start them, watch them train and clear them away, once."""
        attempt, self._attempts = self._attempts, self._attempts + 1
        resume = self._checkpoints.resume_point()
        step = resume.step if resume else 0
        plan = self._elastic.plan
        self._metrics.start_attempt(attempt, step, plan.layout.world_size)
        try:
            with self._phase(State.PLACING, "place"):
                used = self._crew.muster(plan, self._elastic.barred)
                # Before the ranks, beside whose imports they start unseen.
                self._feeders.man(self._crew.reservations(used))
            with self._phase(State.STARTING, "start"):
                self._metrics.event(self._crew.start_note(used))
                ranks = Gang(plan, self._keepers.assign(self._crew.man(plan, used, attempt)), attempt)
            self._seconds["import"] = report.imported_s(ranks.members)
        except RankFailed as lost:
            return self._failed(replace(lost.failure, step=step), 0.0)
        watch = Watch(
            ranks, self._crew, self._elastic, self._checkpoints, self._metrics, self._stop, self._session.dashboard,
            self._recovery,
        )  # fmt: skip
        try:
            ranks.run(f"{self._name}-{attempt}", resume, self._feeders.links(plan, ranks.members))
            self._enter(State.TRAINING)
            failure = watch.until_end(step)
        except RankFailed as lost:
            failure = replace(lost.failure, step=step)
        return self._clear(ranks, watch, failure)

    def _clear(self, ranks: Gang, watch: Watch, failure: Failure | None) -> list[RankResult] | Failure:
        with self._phase(State.CLEARING, "clear"):
            self._crew.stand_down(ranks.members, ranks.survivors() if self._may_keep(failure) else ())
            self._feeders.clear()
        self._seconds |= watch.phase_seconds
        if watch.larger is not None:
            self._elastic.plan = watch.larger
        if failure is None:
            self._recovery = None
            return ranks.results
        return self._failed(replace(failure, step=watch.step), ranks.fold_s + self._seconds["clear"])

    def _failed(self, failure: Failure, cleared_s: float) -> Failure:
        """`failure`, from which the run is to recover: its account is told at the next attempt's first step."""
        self._recovery = report.Recovery(failure, failure.step, {"clear": cleared_s})
        return failure

    def _may_keep(self, failure: Failure | None) -> bool:
        """Whether a process may train again: never with fp8's own state, and on a GPU only after a clean end."""
        plan = self._elastic.full
        return plan.config.dtype != "fp8" and (failure is None or plan.device == "cpu")

    def _decide(self, failure: Failure) -> None:
        self._enter(State.DECIDING)
        for line in report.describe(failure):
            self._metrics.event(line)
        if self._stop.is_set:
            self._metrics.fault(failure, f"stop: {self._stop.name}")
            raise StoppedBySignal(f"{self._stop.name}; a rank failed while stopping: {failure.error}")
        self._checkpoints.remove_own_wrecks()
        if failure.kind is FailureKind.NODE_DIED:
            self._crew.lost.add(failure.node_id)
        decision = self._decision(failure)
        if isinstance(decision, recovery.Stop):
            self._metrics.fault(failure, f"stop: {decision.error}")
            raise decision.error
        self._history.add(failure)
        self._metrics.fault(failure, decision.why)
        self._metrics.event(decision.why)
        self._elastic.barred |= {decision.without} if decision.without else set()
        if isinstance(decision, recovery.Shrink):
            self._elastic.shrink(decision.nodes)
        else:
            self._elastic.restore()

    def _decision(self, failure: Failure) -> recovery.Restart | recovery.Shrink | recovery.Stop:
        """What to do about `failure`, once nodes have been waited for as long as it takes."""
        began, told = time.monotonic(), False
        if self._elastic.is_shrunk and failure.kind is not FailureKind.NODE_DIED:
            # The nodes that are missing were waited for when they were lost.
            began = -math.inf
        while True:
            situation = recovery.Situation(
                wanted=len(self._elastic.full.ranks_per_node),
                usable=self._elastic.usable,
                waited_s=time.monotonic() - began,
                has_checkpoint=self._checkpoints.are_there,
            )
            decision = recovery.decide(failure, self._history, situation, self._elastic.full.config)
            if not isinstance(decision, recovery.Wait):
                return decision
            if not told:
                self._metrics.event(decision.why)
                told = True
            time.sleep(_NODE_POLL_S)

    def _is_over(self, results: Sequence[RankResult]) -> bool:
        """Whether the run ends with these results, rather than going on with more ranks."""
        return self._stop.is_set or results[0].reason is not EndReason.STOP

    def _ended(self, results: list[RankResult]) -> RunResult:
        self._enter(State.ENDED)
        first = min(results, key=lambda result: result.rank)
        if first.saved_step is not None and not self._checkpoints.has(first.saved_step):
            raise CheckpointError(f"step {first.saved_step} was saved, but rank 0 did not say so in time to publish it")
        if first.reason is EndReason.STOP:
            saved = f"saved at step {first.saved_step}" if first.saved_step else "nothing to save"
            raise StoppedBySignal(f"{self._stop.name}: stopped after step {first.step}, {saved}")
        return RunResult(first.reason, first.step, first.samples, first.saved_step, self._attempts, dict(self._seconds))

    @contextmanager
    def _phase(self, state: State, name: str) -> Iterator[None]:
        """Be in `state`, and note the seconds as `name`, also for the fault that is being got over."""
        self._enter(state)
        began = time.monotonic()
        yield
        self._seconds[name] = time.monotonic() - began
        if self._recovery is not None:
            self._recovery.seconds[name] = self._seconds[name]

    def _enter(self, state: State) -> None:
        self.state = state
        self._stop.patience = _PATIENCE[state]
