"""One attempt as the driver sees it, off the ranks' critical path: records, hangs, stragglers, stops, growth."""

from __future__ import annotations

import time
from collections.abc import Sequence

from raytrain_llama3.config.plan import RunPlan
from raytrain_llama3.errors import StoppedBySignal
from raytrain_llama3.launch import report
from raytrain_llama3.launch.checkpoints import RunCheckpoints
from raytrain_llama3.launch.crew import Crew
from raytrain_llama3.launch.dashboard import Dashboard
from raytrain_llama3.launch.elastic import Elastic
from raytrain_llama3.launch.gang import Gang
from raytrain_llama3.launch.session import token_hint
from raytrain_llama3.launch.signals import StopSignal
from raytrain_llama3.launch.watchdog import HangWatch, StragglerWatch
from raytrain_llama3.messages import Failure, FailureKind, Phase, WorkerReport
from raytrain_llama3.metrics import Metrics

_LOOK_S = 0.5
_ANSWER_S = 0.1
_LAST_ANSWER_S = 60.0
_UPKEEP_S = 5.0
_NODES_S = 2.0
_STEP_S = 5.0
"""Time that a stop within `grace_s` needs beside the save itself: a step to agree at, and the end."""


class Watch:
    """Watches `ranks` until all have ended or one has failed."""

    def __init__(
        self,
        ranks: Gang,
        crew: Crew,
        elastic: Elastic,
        checkpoints: RunCheckpoints,
        metrics: Metrics,
        stop: StopSignal,
        dashboard: Dashboard | None,
        recovery: report.Recovery | None,
    ) -> None:
        self._plan = plan = ranks.plan
        self._ranks, self._crew, self._elastic, self._checkpoints = ranks, crew, elastic, checkpoints
        self._metrics, self._stop, self._dashboard, self._recovery = metrics, stop, dashboard, recovery
        self._standby_told = False
        self._upkeep_at = self._nodes_at = 0.0
        self._stop_by: float | None = None
        self._larger: RunPlan | None = None
        self._hangs = HangWatch(plan.config, (m.spec.rank for m in ranks.members), time.time())
        self._stragglers = StragglerWatch(plan.config.straggler_factor, _stages(plan), _addresses(ranks))
        self.phase_seconds: dict[str, float] = {}
        self.step = 0

    def until_end(self, resume_step: int) -> Failure | None:
        """The first fault, or None when every rank has ended well. Raises `StoppedBySignal` when `grace_s` is over."""
        self.step = resume_step
        began_at = resume_step
        while self._ranks.is_running:
            failure = self._ranks.wait(_LOOK_S)
            reports = self._ranks.poll(_ANSWER_S)
            self._record(reports)
            if failure is None:
                failure = self._look_closer(reports)
            if failure is not None:
                # What the ranks have said by then still counts: a checkpoint may be among it.
                self._record(self._ranks.poll(_ANSWER_S))
                return failure
            if self.step > began_at:
                self._keep_ready(began_at)
            self._heed_stop()
        # An answer above may have been on its way before the last records were there.
        self._record(self._ranks.poll(_LAST_ANSWER_S))
        if self._recovery is not None and self.step > began_at:
            self._tell_recovery(began_at)
        return None

    @property
    def larger(self) -> RunPlan | None:
        """The plan to go on with, for which the ranks were asked to save and end."""
        return self._larger

    def _look_closer(self, reports: Sequence[WorkerReport]) -> Failure | None:
        """A rank that hangs, or a node that does not answer: no rank of theirs will ever say so itself."""
        if time.monotonic() > self._nodes_at:
            self._nodes_at = time.monotonic() + _NODES_S
            if lost := self._ranks.lost_node():
                return self._ranks.fault(lost)
        hang = self._hangs.look(time.time(), reports)
        if hang is None:
            return None
        stood_s = time.time() - hang.since
        member = next(m for m in self._ranks.members if m.spec.rank == hang.rank)
        folder = self._plan.paths.rank_log(member.spec.attempt, 0).parent
        path = report.write_stacks(folder, self._ranks.stacks())
        text = f"{hang.text}; the stacks of all ranks: {path}"
        blamed = self._ranks.blame(member, FailureKind.HANG, text, stood_s)
        self._ranks.end(member)
        return self._ranks.fault(blamed)

    def _keep_ready(self, resume_step: int) -> None:
        """Once it trains: account for the fault before it, open the dashboard, have processes stand by."""
        self._tell_recovery(resume_step)
        self._tell_of_dashboard()
        if time.monotonic() < self._upkeep_at:
            return
        self._upkeep_at = time.monotonic() + (_UPKEEP_S if self._standby_told else _LOOK_S)
        self._crew.refill()
        ready, wanted = self._crew.standby()
        if wanted and ready >= wanted and not self._standby_told:
            self._metrics.event(f"standby ready: {ready} processes wait for a fault")
        self._standby_told = ready >= wanted
        self._grow_if_possible(ready >= wanted)

    def _grow_if_possible(self, is_ready: bool) -> None:
        """Ask the ranks to save and end when there are nodes to go on with more of them, processes started."""
        if self._stop_by is not None or self._larger is not None or not self._plan.config.save_at_end:
            return
        larger = self._elastic.larger()
        if larger is None or not self._crew.prepare(larger, self._elastic.barred) or not is_ready:
            return
        self._larger = larger
        self._metrics.event(f"nodes are back: the ranks save, and go on as {larger.layout.world_size}")
        self._ranks.request_stop(save=True)

    def _heed_stop(self) -> None:
        grace_s = self._plan.config.grace_s
        if self._stop.is_set and self._stop_by is None:
            took_s = self._checkpoints.last_save_s or 0.0
            save = took_s + _STEP_S <= grace_s
            self._metrics.event(
                f"{self._stop.name}: the ranks finish their step, {'save' if save else 'do not save'} and stop, in "
                f"{grace_s} s at most; a second signal ends at once"
                + ("" if save else f" (the last save took {took_s:.0f} s: raise grace_s to save when stopped)")
            )
            self._ranks.request_stop(save=save)
            self._stop_by = time.monotonic() + grace_s
        if self._ranks.is_running and self._stop_by is not None and time.monotonic() > self._stop_by:
            raise StoppedBySignal(
                f"{self._stop.name}: the ranks did not end within grace_s {grace_s} s; what they did since the newest "
                "checkpoint is lost"
            )

    def _record(self, reports: Sequence[WorkerReport]) -> None:
        for rank in reports:
            for step in rank.steps:
                self.step = step.step
                self._metrics.step(step)
            for evaluation in rank.evals:
                self._metrics.evaluation(evaluation)
            for save in rank.saves:
                self._checkpoints.take(save)
            for warning in rank.warnings:
                self._metrics.event(f"rank {rank.rank}: {warning}")
            for warning in self._stragglers.hear(rank.rank, rank.work):
                self._metrics.event(warning)
            if rank.rank == 0:
                # Its own start is no more than a part of the driver's phase of that name.
                self.phase_seconds |= {p: s for p, s in rank.phase_seconds.items() if p != Phase.START}

    def _tell_recovery(self, resume_step: int) -> None:
        if self._recovery is not None:
            self._recovery.tell(self._metrics, self._ranks.members, self.phase_seconds, resume_step)
            self._recovery = None

    def _tell_of_dashboard(self) -> None:
        """Open it when the first step is done, so that it takes nothing from the start; say where it is, once."""
        if self._dashboard is None:
            return
        self._dashboard.open()
        if url := self._dashboard.news():
            self._metrics.event(f"Ray dashboard: http://{url}{token_hint()}")


def _stages(plan: RunPlan) -> dict[int, int]:
    """Each rank's pipeline stage: Megatron-core counts stages slowest."""
    layout = plan.layout
    return {rank: rank // (layout.world_size // layout.pp) for rank in range(layout.world_size)}


def _addresses(ranks: Gang) -> dict[int, str]:
    return {m.spec.rank: m.spec.node_ip for m in ranks.members}
