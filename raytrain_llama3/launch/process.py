"""One rank's process as the driver holds it: an actor that is getting ready, stands by, trains, or is gone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raytrain_llama3.config import env
from raytrain_llama3.config.plan import RunPlan
from raytrain_llama3.launch.reservation import Reservation
from raytrain_llama3.launch.session import ALL_DEVICES_VISIBLE, Node
from raytrain_llama3.messages import ProcessFacts

CONTROL = "control"
_CONTROL_THREADS = 3


@dataclass(eq=False, slots=True)
class RankProcess:
    """An actor of one node. `facts` is there once everything is imported."""

    actor: Any
    node: Node
    log_path: Path
    preparing: Any
    facts: ProcessFacts | None = None
    origin: str = "new"
    """Where the present attempt has it from: `new`, `standby` or `kept`."""
    pulse: Any = field(default=None)
    """A question that was asked some time ago, of a process that stands by."""

    @property
    def is_new(self) -> bool:
        """Whether this attempt had to wait for its imports."""
        return self.origin == "new"

    def control(self, method: str, *arguments: object) -> Any:
        """Ask on a thread of its own, whatever the process is doing; returns a reference."""
        return getattr(self.actor, method).options(concurrency_group=CONTROL).remote(*arguments)

    def kill(self) -> None:
        """End it; does not wait."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self.actor)


def actor_class(worker_class: type) -> Any:
    """`worker_class` as a Ray actor that answers polls and requests while it trains."""
    import ray

    decorate: Any = ray.remote
    return decorate(concurrency_groups={CONTROL: _CONTROL_THREADS})(worker_class)


def start(worker_class: type, plan: RunPlan, reservation: Reservation, name: str, log_path: Path) -> RankProcess:
    """Start a process on the reservation's node and let it import everything; does not wait."""
    options: dict[str, Any] = {"name": name, "num_cpus": 0, "scheduling_strategy": reservation.inside()}
    if plan.device == "cuda":
        # The raylet of a cluster that we joined has not our environment.
        options["runtime_env"] = {"env_vars": ALL_DEVICES_VISIBLE}
    actor = actor_class(worker_class).options(**options).remote()
    preparing = actor.prepare.remote(plan.worker_environment, env.POD_NAMES, str(log_path))
    return RankProcess(actor, reservation.node, log_path, preparing)


def settle(processes: Sequence[RankProcess], timeout_s: float) -> list[tuple[RankProcess, Exception | None]]:
    """Those that got ready within `timeout_s`, or failed to: with the error, or None."""
    import ray

    waiting = {p.preparing: p for p in processes if p.facts is None}
    ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=timeout_s) if waiting else ([], [])
    settled: list[tuple[RankProcess, Exception | None]] = []
    for ref in ready:
        process, error = waiting[ref], None
        try:
            process.facts = ray.get(ref)
        except ray.exceptions.RayError as caught:
            error = caught
        settled.append((process, error))
    return settled


def answers[T](asked: Mapping[Any, T], timeout_s: float) -> Iterator[tuple[T, Any]]:
    """Who of `asked` (by Ray's reference) answers within `timeout_s`, and what; those that raise are left out."""
    import ray

    ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s) if asked else ([], [])
    for ref in ready:
        with contextlib.suppress(ray.exceptions.RayError):
            yield asked[ref], ray.get(ref)


def alive(processes: Sequence[RankProcess], timeout_s: float) -> list[RankProcess]:
    """Those that answer within `timeout_s`."""
    return [p for p, _ in answers({p.control("poll"): p for p in processes}, timeout_s)]


def wait_gone(pids: dict[RankProcess, list[int]], patience_s: float) -> list[int]:
    """Have one process on each node see that `pids` are gone there; those that are still there after `patience_s`."""
    asked = {w.control("see_gone", numbers, patience_s): w for w, numbers in pids.items() if numbers}
    return [pid for _, left in answers(asked, 2 * patience_s + 5) for pid in left]
