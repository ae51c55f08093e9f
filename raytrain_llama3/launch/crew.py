"""Who stands ready: the nodes that a run holds, and on them the processes that outlive its attempts."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from raytrain_llama3.config.plan import RunPlan
from raytrain_llama3.errors import ClusterFormationError
from raytrain_llama3.host import end_pids
from raytrain_llama3.launch import failures, placement, process, reservation
from raytrain_llama3.launch.process import RankProcess
from raytrain_llama3.launch.reservation import RESOURCE, NoRoom, Reservation
from raytrain_llama3.launch.session import Session
from raytrain_llama3.messages import Failure, ProcessFacts, RankSpec

_POLL_S = 0.5
_GRANT_S = 30.0
_ANSWER_S = 3.0
_GONE_S = 1.0
_NODES_S = 2.0
_RESET_S = 10.0


class RankFailed(Exception):
    """A rank was lost before training began."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Member:
    """A rank and the process that runs it."""

    spec: RankSpec
    process: RankProcess


@dataclass(eq=False, slots=True)
class _Berth:
    """A node that is held, and its processes: those that no rank uses now, and those of the ranks."""

    reservation: Reservation
    idle: list[RankProcess] = field(default_factory=list)
    busy: list[RankProcess] = field(default_factory=list)
    dying: list[ProcessFacts] = field(default_factory=list)
    """Processes that must be gone before the node's devices are used again."""

    @property
    def manned(self) -> list[RankProcess]:
        """All processes that nobody has ended."""
        return [*self.idle, *self.busy]


class Crew:
    """The nodes and processes of a run. `lost` are nodes known to be gone, whatever Ray still says of them."""

    def __init__(self, worker_class: type, plan: RunPlan, session: Session, name: str) -> None:
        self._worker_class, self._plan, self._session, self._name = worker_class, plan, session, name
        self._berths: dict[str, _Berth] = {}
        self._active: frozenset[str] = frozenset()
        self._numbers = itertools.count()
        self.lost: set[str] = set()

    @property
    def held(self) -> frozenset[str]:
        """Ids of the nodes that the run holds."""
        return frozenset(self._berths)

    def inside(self, node: str) -> Any:
        """Ray's scheduling strategy for an actor on a node that the run holds."""
        return self._berths[node].reservation.inside()

    def room(self, barred: Collection[str] = ()) -> dict[str, float]:
        """Devices that each living node could give to this run: those that it holds, and those that are free."""
        resource = RESOURCE[self._plan.device]
        # Ray takes a while to notice that a node is gone.
        there = [n for n in self._session.nodes() if not n.is_gone()]
        # One that was cut off for a moment is as good as before.
        self.lost -= {n.node_id for n in there if n.port}
        out = self.lost | set(barred)
        nodes = [n for n in there if n.node_id not in out]
        return {n.node_id: self._held_on(n.node_id) or n.free.get(resource, 0.0) for n in nodes}

    def usable(self, barred: Collection[str] = ()) -> int:
        """Living nodes with room for the smallest share of the plan's ranks."""
        return sum(has >= min(self._plan.ranks_per_node) for has in self.room(barred).values())

    def fits(self, plan: RunPlan, barred: Collection[str] = ()) -> bool:
        """Whether there is room now for every rank of `plan`."""
        return placement.choose_nodes(self.room(barred), plan.ranks_per_node, self.held) is not None

    def sizes(self, count: int, barred: Collection[str] = ()) -> list[int]:
        """Devices on each of the `count` nodes with the most room, none more than the plan's largest share."""
        largest = max(self._plan.ranks_per_node)
        return sorted((min(int(has), largest) for has in self.room(barred).values()), reverse=True)[:count]

    def muster(self, plan: RunPlan, barred: Collection[str] = ()) -> dict[str, int]:
        """Hold the nodes that `plan` needs, and spare ones where there are some; ranks on each, by node id.

        Raises `ClusterFormationError` with wanted against free per node after `placement_timeout_s`.
        """
        self._let_go(barred)
        deadline = time.monotonic() + self._plan.config.placement_timeout_s
        while True:
            chosen = placement.choose_nodes(self.room(barred), plan.ranks_per_node, self.held)
            if chosen is not None and self._hold(chosen):
                self._active = frozenset(chosen)
                self._hold_spares(barred)
                return chosen
            if time.monotonic() > deadline:
                raise ClusterFormationError(
                    placement.no_room(self._session.nodes(), self._plan, RESOURCE[self._plan.device])
                )
            time.sleep(_POLL_S)

    def prepare(self, plan: RunPlan, barred: Collection[str] = ()) -> bool:
        """Whether what a larger `plan` needs is held already; else it is from now on, if it is free.

        `refill` then starts processes there, which `standby` counts.
        """
        chosen = placement.choose_nodes(self.room(barred), plan.ranks_per_node, self.held)
        if chosen is None or chosen.keys() <= self.held:
            return chosen is not None
        self._hold(chosen)
        return False

    def reservations(self, nodes: Collection[str]) -> dict[str, Reservation]:
        """What the run holds of `nodes`."""
        return {node: self._berths[node].reservation for node in nodes}

    def start_note(self, used: Mapping[str, int]) -> str:
        """What is about to start, in words."""
        ranks, ready = sum(used.values()), sum(p.facts is not None for n in used for p in self._berths[n].idle)
        if ready >= ranks:
            return f"starting {ranks} ranks in processes that stand ready"
        return f"starting {ranks} ranks, which takes some seconds" + (f" ({ready} stand ready)" if ready else "")

    def man(self, plan: RunPlan, used: Mapping[str, int], attempt: int) -> list[Member]:
        """A process for each rank, everything imported: kept from the last attempt, standing by, or a new one.

        Raises `RankFailed` for the first that cannot be had.
        """
        nodes = {node: self._berths[node].reservation.node for node in used}
        devices = {node: self._berths[node].reservation.devices for node in used}
        assigned = placement.assign_ranks(placement.slots(devices, nodes, used), attempt)
        self._drop_silent(used)
        members = [Member(spec, self._take(spec, plan)) for _, spec in assigned]
        self._wait_ready(members)
        self._see_dying_gone(members)
        return members

    def stand_down(self, members: Sequence[Member], reusable: Collection[Member]) -> None:
        """After an attempt: keep the processes of `reusable` that say that they are clean, and end the others."""
        resets = {m.process.actor.reset.remote(): m for m in reusable}
        clean = {m.spec.rank for m, is_clean in process.answers(resets, _RESET_S) if is_clean}
        for member in members:
            berth = self._berths.get(member.spec.node_id)
            if berth is not None:
                berth.busy.remove(member.process)
            if berth is not None and member.spec.rank in clean:
                member.process.origin = "kept"
                berth.idle.insert(0, member.process)
                continue
            member.process.kill()
            if berth is not None and member.process.facts is not None:
                berth.dying.append(member.process.facts)
        self._see_dying_gone([])

    def refill(self) -> None:
        """Start processes that stand by, up to what the options ask for; does not wait."""
        for node, berth in self._berths.items():
            self._bury(berth)
            missing = self._wanted_on(node) - len(berth.idle)
            berth.idle += [self._start(berth, "standby") for _ in range(missing)]

    def standby(self) -> tuple[int, int]:
        """Processes that stand by with everything imported, and all that are wanted."""
        process.settle([p for berth in self._berths.values() for p in berth.idle], 0)
        ready = sum(p.facts is not None for berth in self._berths.values() for p in berth.idle)
        return ready, sum(self._wanted_on(node) for node in self._berths)

    def close(self) -> None:
        """End every process, also of ranks that train, and give every node back."""
        for berth in self._berths.values():
            for held in berth.manned:
                held.kill()
                berth.dying += [held.facts] if held.facts else []
            berth.idle, berth.busy = [], []
        self._see_dying_gone([])
        for berth in self._berths.values():
            berth.reservation.release()
        self._berths = {}

    def _held_on(self, node: str) -> float:
        return float(len(self._berths[node].reservation.devices)) if node in self._berths else 0.0

    def _wanted_on(self, node: str) -> int:
        """Standing by: as asked for; on a spare node, one for each device that it may have to take over."""
        asked, devices = self._plan.config.standby_processes, len(self._berths[node].reservation.devices)
        count = (devices if self._plan.device == "cuda" else 1) if asked == "auto" else asked
        return count if node in self._active else max(count, devices)

    def _hold(self, chosen: Mapping[str, int]) -> bool:
        nodes = {n.node_id: n for n in self._session.nodes()}
        new = [(nodes[node], count) for node, count in chosen.items() if node not in self._berths]
        try:
            held = reservation.reserve(new, self._plan.device, self._name, _GRANT_S)
        except NoRoom:
            return False
        self._berths |= {r.node.node_id: _Berth(r) for r in held}
        return True

    def _hold_spares(self, barred: Collection[str]) -> None:
        """As many of `spare_nodes` as there are; none is waited for."""
        largest = max(self._plan.ranks_per_node)
        missing = self._plan.config.spare_nodes - len(self._berths.keys() - self._active)
        free = [node for node, has in self.room(barred).items() if has >= largest and node not in self._berths]
        for node in free[: max(missing, 0)]:
            self._hold({node: largest})

    def _let_go(self, barred: Collection[str]) -> None:
        """Give up nodes that are gone or left out."""
        living = {n.node_id for n in self._session.nodes()} - self.lost
        for node in [n for n in self._berths if n not in living or n in barred]:
            berth = self._berths.pop(node)
            for held in berth.manned:
                held.kill()
            berth.reservation.release()

    def _take(self, spec: RankSpec, plan: RunPlan) -> RankProcess:
        berth = self._berths[spec.node_id]
        if berth.idle:
            # Ready ones first: kept before standing by, as they lie; then one that is still importing.
            taken = min(berth.idle, key=lambda p: p.facts is None)
            berth.idle.remove(taken)
        else:
            taken = self._start(berth, "new", f"{spec.name}/attempt-{spec.attempt}")
        berth.busy.append(taken)
        return taken

    def _start(self, berth: _Berth, origin: str, name: str = "standby") -> RankProcess:
        number = next(self._numbers)
        log = self._plan.paths.logs / "starting" / f"{berth.reservation.node.ip}_{number}.log"
        started = process.start(self._worker_class, self._plan, berth.reservation, f"{name}/{number}/{self._name}", log)
        started.origin = origin
        return started

    def _wait_ready(self, members: Sequence[Member]) -> None:
        waiting = [m for m in members if m.process.facts is None]
        looked_at, unreached = time.monotonic(), set[str]()
        while waiting:
            by_process = {m.process: m for m in waiting}
            for settled, error in process.settle(list(by_process), _POLL_S):
                if error is not None:
                    member = by_process[settled]
                    self._give_up(members, failures.from_error(member.spec, settled.log_path, error))
            if time.monotonic() - looked_at > _NODES_S:
                gone = {m.spec.node_id for m in waiting if m.process.node.is_gone()}
                for member in [m for m in waiting if m.spec.node_id in gone & unreached]:
                    self._give_up(members, failures.of_lost_node(member.spec))
                looked_at, unreached = time.monotonic(), gone
            waiting = [m for m in waiting if m.process.facts is None]

    def _give_up(self, members: Sequence[Member], failure: Failure) -> NoReturn:
        self._abandon(members)
        raise RankFailed(failure)

    def _abandon(self, members: Sequence[Member]) -> None:
        """Those that are ready are as good as before; the others end."""
        for member in members:
            berth = self._berths[member.spec.node_id]
            berth.busy.remove(member.process)
            if member.process.facts is not None:
                berth.idle.append(member.process)
            else:
                member.process.kill()

    def _drop_silent(self, used: Mapping[str, int]) -> None:
        for node in used:
            berth = self._berths[node]
            process.settle(berth.idle, 0)
            ready = [p for p in berth.idle if p.facts is not None]
            answering = process.alive(ready, _ANSWER_S)
            for silent in [p for p in ready if p not in answering]:
                berth.idle.remove(silent)
                silent.kill()

    def _bury(self, berth: _Berth) -> None:
        """Notice processes that stood by and are gone: each is asked now and then, and answers or fails."""
        import ray

        settled = process.settle(berth.idle, 0)
        dead = [p for p, error in settled if error is not None]
        for idle in [p for p in berth.idle if p.facts is not None]:
            if idle.pulse is None:
                idle.pulse = idle.control("poll")
                continue
            if ray.wait([idle.pulse], timeout=0)[0]:
                try:
                    ray.get(idle.pulse)
                except ray.exceptions.RayError:
                    dead.append(idle)
                idle.pulse = None
        berth.idle = [p for p in berth.idle if p not in dead]

    def _see_dying_gone(self, members: Sequence[Member]) -> None:
        """A process that lives on holds its device's memory, and would fail the next attempt."""
        witnesses: dict[RankProcess, list[int]] = {}
        for node, berth in self._berths.items():
            here = {f.pid for f in berth.dying if f.hostname == socket.gethostname()}
            away = [f.pid for f in berth.dying if f.pid not in here]
            end_pids(here, _GONE_S)
            candidates = [*(m.process for m in members if m.spec.node_id == node), *berth.idle]
            witness = next((p for p in candidates if p.facts is not None), None)
            berth.dying = [f for f in berth.dying if f.pid in away]
            if witness is not None and away:
                witnesses[witness], berth.dying = away, []
        process.wait_gone(witnesses, _GONE_S)
