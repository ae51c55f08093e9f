"""The ranks of one attempt: set them going, hear from them, ask them to stop, and tell which one fell first."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from raytrain_llama3.config.plan import Device, RunPlan
from raytrain_llama3.data.feed import Link
from raytrain_llama3.errors import RaytrainError
from raytrain_llama3.host import end_pids, log_tail
from raytrain_llama3.launch import failures
from raytrain_llama3.launch.crew import Member, RankFailed
from raytrain_llama3.launch.failures import rank_of_evidence
from raytrain_llama3.messages import Failure, FailureKind, RankResult, Rendezvous, ResumePoint, WorkerReport

_STORE_S = 20.0
_FOLD_S: dict[Device, float] = {"cpu": 3.0, "cuda": 0.5}
"""How long the others have to fall. NCCL does not let go: on GPUs only those are waited for that fell by themselves."""
_STACKS_S = 3.0
_FOLLOWS = (FailureKind.PEER_LOST, FailureKind.TIMED_OUT, FailureKind.DIED)
"""Kinds that a lost node explains better than they explain themselves."""


class Gang:
    """The ranks of one attempt, each in a process that is ready."""

    def __init__(self, plan: RunPlan, members: Sequence[Member], attempt: int) -> None:
        self.plan, self.members, self._attempt = plan, list(members), attempt
        self._running: dict[Any, Member] = {}
        self._asked: dict[Any, Member] = {}
        self._unreached: set[str] = set()
        self._fallen: list[tuple[Member, Failure]] = []
        self.results: list[RankResult] = []
        self.fold_s = 0.0
        """Seconds that the fault waited for the ranks that fell with it."""

    def run(self, prefix: str, resume: ResumePoint | None, links: Mapping[int, Link]) -> None:
        """Open the store on rank 0's node, tell every rank where it is, and let them train.

        `links` is where each rank's batches come from.
        """
        import ray

        first, config = self.members[0], self.plan.config
        opening = first.process.actor.open_store.remote(
            first.spec.node_ip, config.store_port, config.distributed_timeout_minutes
        )
        try:
            port = ray.get(opening, timeout=_STORE_S)
        except ray.exceptions.RayError as error:
            gone = first.process.node.is_gone()
            raise RankFailed(failures.of_lost_node(first.spec) if gone else self._failure(first, error)) from error
        rendezvous = Rendezvous(first.spec.node_ip, port, prefix)
        plan = ray.put(self.plan)
        # The task has the rank's name in the dashboard, whichever process it runs in.
        for m in self.members:
            run = m.process.actor.run.options(name=m.spec.name)
            self._running[run.remote(plan, m.spec, rendezvous, resume, links[m.spec.rank])] = m

    @property
    def is_running(self) -> bool:
        """Whether some rank has not ended yet."""
        return bool(self._running)

    def wait(self, timeout_s: float) -> Failure | None:
        """Take in the ranks that end within `timeout_s`; the fault, if one of them failed."""
        if not self._collect(timeout_s) or not self._fallen:
            return None
        return self.fault()

    def fault(self, also: Failure | None = None) -> Failure:
        """What explains the ranks that fell, `also` (seen by the driver) among them; the others are folded.

        The rest fall within moments, through broken connections, once they are told to let go of them.
        """
        self._let_go()
        began = time.monotonic()
        deadline = began + _FOLD_S[self.plan.device]
        blamed = also.rank if also else -1
        while any(m.spec.rank != blamed for m in self._running.values()):
            if (left := deadline - time.monotonic()) <= 0:
                break
            self._collect(left)
        self.fold_s = time.monotonic() - began
        # What the driver saw of a rank explains what became of it: one that hung was killed for it.
        seen = [failure for m, failure in self._fallen if m.spec.rank != blamed] + ([also] if also else [])
        first = min(seen, key=rank_of_evidence)
        if first.kind in _FOLLOWS and (gone := self._on_lost_node()) is not None:
            first = failures.of_lost_node(gone.spec)
        others = {m.spec.rank for m, _ in self._fallen} - {first.rank}
        return replace(first, others=tuple(sorted(others)), log_tail=first.log_tail or self._tail_from_afar(first))

    def survivors(self) -> list[Member]:
        """Ranks whose training ended, and that did nothing worse than lose their peers."""
        running = set(map(id, self._running.values()))
        harmed = {id(m) for m, failure in self._fallen if failure.kind is not FailureKind.PEER_LOST}
        return [m for m in self.members if id(m) not in running | harmed]

    def poll(self, timeout_s: float) -> list[WorkerReport]:
        """What the ranks report; one that does not answer in time is heard by a later call.

        A rank hands out each record once, so that its answer must not be lost: it is asked again only then.
        """
        import ray

        waiting = set(map(id, self._asked.values()))
        for member in self.members:
            if id(member) not in waiting:
                self._asked[member.process.control("poll")] = member
        ready, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=timeout_s)
        reports = []
        for ref in ready:
            del self._asked[ref]
            with contextlib.suppress(ray.exceptions.RayError):
                reports.append(ray.get(ref))
        return sorted(reports, key=lambda report: report.rank)

    def lost_node(self) -> Failure | None:
        """The fault of a node that could not be reached in two looks in a row.

        Its ranks may go on for a while without their raylet; Ray's own health check takes its time, as configured.
        """
        nodes = {m.spec.node_id: m for m in self.members}
        gone = {node for node, member in nodes.items() if member.process.node.is_gone()}
        lost, self._unreached = gone & self._unreached, gone
        for node in lost:
            return failures.of_lost_node(nodes[node].spec)
        return None

    def blame(self, member: Member, kind: FailureKind, error: str, since_s: float = 0.0) -> Failure:
        """A fault that the driver itself saw, `since_s` seconds after it began."""
        log = self._log(member)
        spec = member.spec
        return Failure(
            spec.rank, spec.node_ip, kind, error, 0, self._attempt, spec.node_id,
            at=time.time() - since_s, detect_s=since_s, log_path=str(log), log_tail=log_tail(log),
        )  # fmt: skip

    def end(self, member: Member) -> None:
        """Kill one rank now: its connections close, and those who wait for it fall."""
        import ray

        facts = member.process.facts
        if facts is None or facts.hostname == socket.gethostname():
            end_pids([facts.pid] if facts else [], 0)
            return
        near = [m for m in self.members if m.spec.node_id == member.spec.node_id and m is not member]
        refs = [m.process.control("see_gone", [facts.pid], 0) for m in near]
        if refs:
            ray.wait(refs, timeout=_STACKS_S)

    def request_stop(self, *, save: bool) -> None:
        """Ask every rank to end at the next step boundary, after a checkpoint or without; does not wait."""
        for member in self.members:
            member.process.control("request_stop", save)

    def stacks(self) -> dict[int, str]:
        """Every rank's Python stacks, or why there are none."""
        import ray

        refs = {m.process.control("stacks"): m for m in self.members}
        ray.wait(list(refs), num_returns=len(refs), timeout=_STACKS_S)
        texts = {}
        for ref, member in refs.items():
            try:
                texts[member.spec.rank] = ray.get(ref, timeout=0)
            except (ray.exceptions.RayError, TimeoutError):
                pid = member.process.facts.pid if member.process.facts else None
                texts[member.spec.rank] = f"process {pid} on {member.spec.node_ip} does not answer: stopped, or gone"
        return texts

    def _collect(self, timeout_s: float) -> bool:
        """Take in the ranks that end first, if any do in time."""
        import ray

        ready, _ = ray.wait(list(self._running), num_returns=1, timeout=timeout_s)
        for ref in ready:
            member = self._running.pop(ref)
            try:
                self.results.append(ray.get(ref))
            except (ray.exceptions.RayError, RaytrainError) as error:
                self._fallen.append((member, self._failure(member, error)))
        return bool(ready)

    def _let_go(self) -> None:
        # Also those that fell by an exception: their processes still hold their ends of the connections.
        for member in self.members:
            member.process.control("let_go")

    def _on_lost_node(self) -> Member | None:
        """A member that fell, or does not end, and whose node is gone."""
        suspects = [m for m, failure in self._fallen if failure.kind is FailureKind.DIED] + list(self._running.values())
        by_node = {m.spec.node_id: m for m in reversed(suspects)}
        return next((m for m in by_node.values() if m.process.node.is_gone()), None)

    def _failure(self, member: Member, error: Exception) -> Failure:
        pid = member.process.facts.pid if member.process.facts else None
        failure = failures.from_error(member.spec, self._log(member), error, pid)
        blamed = next((m for m in self.members if m.spec.rank == failure.rank), member)
        if blamed is member:
            return failure
        log = self._log(blamed)
        return replace(
            failure,
            node_ip=blamed.spec.node_ip,
            node_id=blamed.spec.node_id,
            log_path=str(log),
            log_tail=log_tail(log),
        )

    def _log(self, member: Member) -> Any:
        return self.plan.paths.rank_log(self._attempt, member.spec.rank)

    def _tail_from_afar(self, failure: Failure) -> tuple[str, ...]:
        """The log's last lines, read by another rank of that node."""
        import ray

        near = [m for m in self.members if m.spec.node_id == failure.node_id and m.spec.rank != failure.rank]
        for member in near[:1]:
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
                return tuple(ray.get(member.process.control("log_tail", failure.log_path), timeout=_STACKS_S))
        return ()
