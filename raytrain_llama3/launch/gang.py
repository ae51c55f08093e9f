"""One actor a device: start them together, ask them, stop them and see them gone."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from raytrain_llama3.config import env
from raytrain_llama3.config.plan import RunPlan
from raytrain_llama3.errors import NonFiniteError, RaytrainError
from raytrain_llama3.launch import placement
from raytrain_llama3.launch.session import ALL_DEVICES_VISIBLE, Node, end_processes
from raytrain_llama3.messages import (
    DeviceSlot,
    Failure,
    FailureKind,
    ProcessFacts,
    RankResult,
    RankSpec,
    Rendezvous,
    ResumePoint,
    WorkerReport,
)

CONTROL = "control"
_LOG_TAIL_LINES = 20
_LOG_TAIL_BYTES = 16_384
_GONE_S = 15
_FOLD_S = 1.0


class Lease:
    """Holds one GPU of a bundle for as long as it lives, and says which one Ray granted."""

    def device_index(self) -> int:
        """The CUDA ordinal as the ranks of this node will count, who see what CUDA_VISIBLE_DEVICES names."""
        import ray

        granted = str(ray.get_gpu_ids()[0])
        visible = env.snapshot().get("CUDA_VISIBLE_DEVICES", "")
        names = [name.strip() for name in visible.split(",") if name.strip()]
        return names.index(granted) if names else int(granted)


@dataclass(frozen=True, slots=True)
class Member:
    """A rank and the actor that runs it."""

    spec: RankSpec
    actor: Any
    facts: ProcessFacts
    log_path: Path


class RankFailed(Exception):
    """A rank was lost before training began."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


class Gang:
    """The ranks of one attempt."""

    def __init__(self, plan: RunPlan, members: list[Member]) -> None:
        self._plan, self._members = plan, members
        self._running: dict[Any, Member] = {}
        self._asked: dict[Any, Member] = {}

    def run(self, prefix: str, resume: ResumePoint | None) -> None:
        """Open the store on rank 0's node, tell every rank where it is, and let them train."""
        import ray

        first = self._members[0]
        config = self._plan.config
        opening = first.actor.open_store.remote(
            first.spec.node_ip, config.store_port, config.distributed_timeout_minutes
        )
        port = _first_failure_wins([opening], [(first.spec, first.log_path)])[0]
        rendezvous = Rendezvous(first.spec.node_ip, port, prefix)
        plan = ray.put(self._plan)
        self._running = {m.actor.run.remote(plan, m.spec, rendezvous, resume): m for m in self._members}

    def wait(self, timeout_s: float) -> tuple[list[RankResult], Failure | None]:
        """Results of ranks that ended since the last call, or the first failure among them."""
        if not self._running:
            return [], None
        results, failed = self._collect(timeout_s)
        if not failed:
            return results, None
        # The others fall within moments, through broken connections; the one that says most is the cause.
        deadline = time.monotonic() + _FOLD_S
        while self._running and (left := deadline - time.monotonic()) > 0:
            more, fallen = self._collect(left)
            results, failed = results + more, failed + fallen
        (member, error), *_ = sorted(failed, key=lambda pair: _evidence(pair[1]))
        others = tuple(sorted(m.spec.rank for m, _ in failed if m is not member))
        return results, _failure(member.spec, member.log_path, error, others)

    def _collect(self, timeout_s: float) -> tuple[list[RankResult], list[tuple[Member, Exception]]]:
        """The next rank to end, if one does in time: its result, or its error."""
        import ray

        ready, _ = ray.wait(list(self._running), num_returns=1, timeout=timeout_s)
        results, failed = list[RankResult](), list[tuple[Member, Exception]]()
        for ref in ready:
            member = self._running.pop(ref)
            try:
                results.append(ray.get(ref))
            except (ray.exceptions.RayError, RaytrainError) as error:
                failed.append((member, error))
        return results, failed

    @property
    def is_running(self) -> bool:
        """Whether some rank has not ended yet."""
        return bool(self._running)

    def poll(self, timeout_s: float) -> list[WorkerReport]:
        """What the ranks report; one that does not answer in time is heard by a later call.

        A rank hands out each record once, so that its answer must not be lost: it is asked again only then.
        """
        import ray

        waiting = set(map(id, self._asked.values()))
        for member in self._members:
            if id(member) not in waiting:
                self._asked[member.actor.poll.options(concurrency_group=CONTROL).remote()] = member
        ready, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=timeout_s)
        reports = []
        for ref in ready:
            del self._asked[ref]
            with contextlib.suppress(ray.exceptions.RayError):
                reports.append(ray.get(ref))
        return sorted(reports, key=lambda report: report.rank)

    def request_stop(self) -> None:
        """Ask every rank to end at the next step boundary; does not wait."""
        for member in self._members:
            member.actor.request_stop.options(concurrency_group=CONTROL).remote()


def actor_class(worker_class: type) -> Any:
    """`worker_class` as a Ray actor that answers polls and requests while it trains."""
    import ray

    decorate: Any = ray.remote
    return decorate(concurrency_groups={CONTROL: 2})(worker_class)


@contextlib.contextmanager
def start(worker_class: type, plan: RunPlan, group: Any, nodes: Sequence[Node], attempt: int) -> Iterator[Gang]:
    """Start a process in every bundle of `group`, with everything imported; all are gone after the block.

    `nodes[i]` is the node of bundle i. Raises `RankFailed` for the first process to fail.
    """
    import ray

    leases = _lease(group, len(nodes)) if plan.device == "cuda" else []
    actors: list[Any] = []
    members: list[Member] = []
    try:
        devices = ray.get([lease.device_index.remote() for lease in leases]) or _count_on_nodes(nodes)
        assigned = placement.assign_ranks(placement.slots(nodes, devices), attempt)
        actors += [_actor(worker_class, group, slot, spec, on_gpu=plan.device == "cuda") for slot, spec in assigned]
        logs = [plan.paths.logs / f"attempt_{attempt}" / f"rank_{spec.rank}.log" for _, spec in assigned]
        preparing = [
            actor.prepare.remote(plan.worker_environment, env.POD_NAMES, str(log))
            for actor, log in zip(actors, logs, strict=True)
        ]
        names = [(spec, log) for (_, spec), log in zip(assigned, logs, strict=True)]
        facts: list[ProcessFacts] = _first_failure_wins(preparing, names)
        members += [Member(spec, *rest) for (_, spec), *rest in zip(assigned, actors, facts, logs, strict=True)]
        yield Gang(plan, members)
    finally:
        for actor in [*actors, *leases]:
            ray.kill(actor)
        _wait_until_gone([m.facts.pid for m in members if m.facts.hostname == socket.gethostname()])


def _first_failure_wins(refs: list[Any], names: Sequence[tuple[RankSpec, Path]]) -> list[Any]:
    """All answers, in the order of `refs`; or `RankFailed` as soon as one of them fails, whatever its place."""
    import ray

    answers, waiting = dict[Any, Any](), list(refs)
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1)
        for ref in ready:
            try:
                answers[ref] = ray.get(ref)
            except ray.exceptions.RayError as error:
                raise RankFailed(_failure(*names[refs.index(ref)], error, ())) from error
    return [answers[ref] for ref in refs]


def _failure(spec: RankSpec, log_path: Path, error: Exception, others: tuple[int, ...]) -> Failure:
    import ray

    cause = _cause(error)
    kind = FailureKind.EXCEPTION
    if isinstance(error, ray.exceptions.RayActorError):
        kind = FailureKind.DIED
    elif isinstance(cause, NonFiniteError):
        kind = FailureKind.NON_FINITE
    return Failure(
        rank=spec.rank,
        node_ip=spec.node_ip,
        kind=kind,
        error=str(cause) if isinstance(cause, RaytrainError) else _in_one_line(cause),
        step=0,
        attempt=spec.attempt,
        exit_code=cause.exit_code if isinstance(cause, RaytrainError) else None,
        log_path=str(log_path),
        log_tail=_tail(log_path),
        others=others,
    )


def _cause(error: Exception) -> BaseException:
    """What the rank itself raised; of a lost process, Ray's own error."""
    import ray

    inner = error.cause if isinstance(error, ray.exceptions.RayTaskError) else None
    return inner if isinstance(inner, BaseException) else error


def _evidence(error: Exception) -> int:
    """Sorts what explains a fault before what merely followed from it."""
    import ray

    if isinstance(_cause(error), RaytrainError):
        return 0
    return 1 if isinstance(error, ray.exceptions.RayActorError) else 2


def _in_one_line(error: BaseException) -> str:
    """Class and message. Of a CUDA error the first line says what it was; Ray's own errors say why in their last."""
    import ray

    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    return f"{type(error).__name__}: {lines[-1 if isinstance(error, ray.exceptions.RayError) else 0]}"


def _lease(group: Any, bundles: int) -> list[Any]:
    import ray

    lease: Any = ray.remote(Lease)
    return [
        lease.options(
            num_cpus=0,
            num_gpus=1,
            scheduling_strategy=_in_bundle(group, i),
            runtime_env={"env_vars": ALL_DEVICES_VISIBLE},
        ).remote()
        for i in range(bundles)
    ]


def _actor(worker_class: type, group: Any, slot: DeviceSlot, spec: RankSpec, *, on_gpu: bool) -> Any:
    options: dict[str, Any] = {
        "name": f"{spec.name}/attempt-{spec.attempt}/{group.id.hex()[:8]}",
        "num_cpus": 0,
        "scheduling_strategy": _in_bundle(group, slot.bundle_index),
    }
    if on_gpu:
        # The raylet of a cluster that we joined has not our environment.
        options["runtime_env"] = {"env_vars": ALL_DEVICES_VISIBLE}
    return actor_class(worker_class).options(**options).remote()


def _in_bundle(group: Any, bundle: int) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)


def _count_on_nodes(nodes: Sequence[Node]) -> list[int]:
    """Without GPUs a device is a number on its node: 0, 1, … in bundle order."""
    ids = [node.node_id for node in nodes]
    return [ids[:i].count(node_id) for i, node_id in enumerate(ids)]


def _wait_until_gone(pids: Sequence[int]) -> None:
    """Ray kills asynchronously; a process that lives on holds its device's memory and would fail the next attempt."""
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    end_processes(processes, _GONE_S)


def _tail(path: Path) -> tuple[str, ...]:
    """The last lines of a rank's log, where this host can read it."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_TAIL_BYTES))
            return tuple(file.read().decode(errors="replace").splitlines()[-_LOG_TAIL_LINES:])
    except OSError:
        return ()
