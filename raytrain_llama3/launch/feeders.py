"""Feeders: processes on each node that read the run's data and hand it to the node's ranks through Ray's object store.

A feeder's answer is a pure function of the request, so that one that died is made anew by Ray and asked again. It asks
for no device and imports no torch. What it reads is bounded by the ranks: each asks for no more than `read_ahead`
shares before it has used the first.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raytrain_llama3.config import env
from raytrain_llama3.config.plan import RunPlan
from raytrain_llama3.data.feed import Request, needs_tokens, read_share
from raytrain_llama3.data.samples import Samples
from raytrain_llama3.data.source import Tokens
from raytrain_llama3.data.sources import Sources
from raytrain_llama3.errors import DataUnavailableError, RaytrainError
from raytrain_llama3.host import end_pids
from raytrain_llama3.launch.crew import Member
from raytrain_llama3.launch.process import answers
from raytrain_llama3.launch.reservation import Reservation
from raytrain_llama3.messages import RankSpec

_STORE_BYTES = 96 * 2**20
"""Of a node's object store, for all shares that are read ahead there: Ray gives it 200 MB where it is ours."""
_WARM_BATCHES = 8
_LOOK_S = 0.5
_RETRY_S = 0.1
_GONE_S = 120.0
_ANSWER_S = 3.0


class Feeder:
    """The actor: reads shares, and keeps each in the object store until every rank that needs it has asked for it.

    `sources` everywhere is a list of one reference, to the run's `Sources` and the environment to open them in, which
    the driver keeps. It comes with each request, since a feeder that Ray makes anew knows nothing.
    """

    def __init__(self) -> None:
        self._sources: Sources | None = None
        self._warmed: dict[str, int] = {}
        self._kept: OrderedDict[Request, tuple[Any, int]] = OrderedDict()
        self._asked = self._read = 0

    def begin(self, sources: list[Any], former: int | None = None) -> None:
        """Fetch the sources, while the ranks are still importing; `former` is a process to end, of this node."""
        import ray

        end_pids([former] if former else [], 0)
        if self._sources is None:
            self._sources, environment = ray.get(sources[0])
            env.apply(environment, ())

    def take(self, sources: list[Any], request: Request, takers: int, most: int) -> list[Any]:
        """A reference to the share, in a list so that Ray does not fetch it for the caller.

        `takers` ranks will ask for it; no more than `most` shares are kept for ranks that have not.
        """
        import ray

        self.begin(sources)
        self._asked += 1
        ref, asked = self._kept.pop(request, (None, 0))
        if ref is None:
            self._read += 1
            samples = getattr(self._sources, request.part)
            ref = ray.put(read_share(samples, request))
            self._warm(samples, request)
        if asked + 1 < takers:
            self._kept[request] = ref, asked + 1
            while len(self._kept) > most:
                self._kept.popitem(last=False)
        return [ref]

    def pid(self) -> int:
        """The number of this process."""
        return os.getpid()

    def counts(self) -> tuple[int, int, int]:
        """Shares that this process was asked for, that it read, and that wait for another rank to ask for them."""
        return self._asked, self._read, len(self._kept)

    def clear(self) -> None:
        """Let go of what an attempt that is over has not asked for."""
        self._kept.clear()

    def _warm(self, samples: Samples, request: Request) -> None:
        """Begin to read what the next batches need, where reading is slow: a row group may take seconds."""
        batch = request.samples
        last = batch.stop + _WARM_BATCHES * len(batch)
        first = self._warmed.get(request.part, 0)
        if not batch.stop <= first <= last:
            first = batch.stop
        samples.warm(np.arange(first, last, dtype=np.int64))
        self._warmed[request.part] = last


@dataclass(frozen=True, slots=True)
class FeederLink:
    """A rank's end: a `data.feed.Link` that travels to the rank's process."""

    actor: Any
    sources: list[Any]
    takers: int
    most: int
    read_ahead: int
    fingerprint: dict[str, Any]
    valid_samples: int
    end_of_document: int | None
    where: str

    def take(self, request: Request, is_given_up: Callable[[], bool]) -> Tokens:
        """The share, as a view of the object store's memory; asked for again for as long as the feeder is coming back.

        Raises what reading raised, and `DataUnavailableError` when no feeder has answered for two minutes.
        """
        import ray

        deadline = time.monotonic() + _GONE_S
        while True:
            try:
                return self._take(request, is_given_up)
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, RaytrainError):
                    raise error.cause from None
                raise
            except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
                # It died, and what it had put died with it: Ray starts it anew, and what it read is read again.
                if time.monotonic() > deadline or is_given_up():
                    raise DataUnavailableError(f"{self.where} is gone and does not come back: {error}") from error
            time.sleep(_RETRY_S)

    def _take(self, request: Request, is_given_up: Callable[[], bool]) -> Tokens:
        import ray

        asked = self.actor.take.remote(self.sources, request, self.takers, self.most)
        (ref,) = _get(asked, is_given_up)
        found: Tokens = ray.get(ref)
        return found


def _get(ref: Any, is_given_up: Callable[[], bool]) -> Any:
    import ray

    while not ray.wait([ref], timeout=_LOOK_S)[0]:
        if is_given_up():
            raise DataUnavailableError("nobody waits for it any more")
    return ray.get(ref)


@dataclass(slots=True)
class _Post:
    """A feeder that was started. `pid` is a reference to the number of its process, where it was heard last."""

    actor: Any
    pid: Any


@dataclass(slots=True)
class _Held:
    """The feeders of one node."""

    reservation: Reservation
    posts: list[_Post] = field(default_factory=list)

    def end(self) -> None:
        for post in self.posts:
            _kill(post.actor)


class Feeders:
    """The feeders of a run. They outlive attempts, and end with their node's reservation or with `close`."""

    def __init__(self, sources: Sources, plan: RunPlan, name: str) -> None:
        self._sources, self._plan, self._name = sources, plan, name
        self._held: dict[str, _Held] = {}
        self._numbers = itertools.count()
        self._put: Any = None

    def man(self, reservations: Mapping[str, Reservation]) -> None:
        """See that each node has its feeders; does not wait for new ones.

        One that served an earlier attempt and does not answer is started anew: an attempt may have ended for it.
        """
        import ray

        for node in [n for n, held in self._held.items() if reservations.get(n) is not held.reservation]:
            self._held.pop(node).end()
        if self._put is None:
            # Not in the actors' runtime environment, which the dashboard shows: there may be keys in it.
            self._put = ray.put((self._sources, env.for_feeders(env.snapshot())))
        self._renew_silent()
        for node, reservation in reservations.items():
            if node not in self._held:
                posts = [self._start(reservation) for _ in range(self._plan.config.num_workers)]
                self._held[node] = _Held(reservation, posts)

    def links(self, plan: RunPlan, members: Sequence[Member]) -> dict[int, FeederLink]:
        """For each rank its link to a feeder of its own node; ranks of one data-parallel rank share a feeder."""
        specs = [m.spec for m in members]
        places = {s.rank: _place(plan, s) for s in specs}
        takers = Counter((s.node_id, places[s.rank][0]) for s in specs if needs_tokens(plan, places[s.rank][1]))
        shares = Counter(node for node, _ in takers)
        fingerprint, valid_samples = self._sources.fingerprint(), self._sources.valid.windows
        links = {}
        for spec in specs:
            dp_rank = places[spec.rank][0]
            ahead = read_ahead(plan, shares[spec.node_id])
            posts = self._held[spec.node_id].posts
            links[spec.rank] = FeederLink(
                actor=posts[dp_rank % len(posts)].actor,
                sources=[self._put],
                takers=takers[spec.node_id, dp_rank],
                most=2 * ahead * shares[spec.node_id],
                read_ahead=ahead,
                fingerprint=fingerprint,
                valid_samples=valid_samples,
                end_of_document=self._sources.end_of_document,
                where=f"the feeder on {spec.node_ip}",
            )
        return links

    def clear(self) -> None:
        """After an attempt: let go of what it left; does not wait."""
        for held in self._held.values():
            for post in held.posts:
                post.actor.clear.remote()

    def close(self) -> None:
        """End them all."""
        for held in self._held.values():
            held.end()
        self._held = {}

    def _renew_silent(self) -> None:
        posts = [post for held in self._held.values() for post in held.posts]
        asked = {post.actor.pid.remote(): post for post in posts}
        heard = {id(post) for post, _ in answers(asked, _ANSWER_S)}
        for ref, post in asked.items():
            post.pid = ref if id(post) in heard else post.pid
        for held in self._held.values():
            held.posts = [p if id(p) in heard else self._replaced(held.reservation, p) for p in held.posts]

    def _replaced(self, reservation: Reservation, silent: _Post) -> _Post:
        """Another in the place of one that does not answer, which ends it where Ray cannot: it may be stopped."""
        _kill(silent.actor)
        return self._start(reservation, next((pid for _, pid in answers({silent.pid: silent}, 0)), None))

    def _start(self, reservation: Reservation, former: int | None = None) -> _Post:
        import ray

        decorate: Any = ray.remote
        actor_class = decorate(Feeder)
        name = f"feeder-{next(self._numbers)}/{reservation.node.node_id[:8]}/{self._name}"
        options = {"name": name, "num_cpus": 0, "max_restarts": -1, "scheduling_strategy": reservation.inside()}
        actor = actor_class.options(**options).remote()
        actor.begin.remote([self._put], former)
        return _Post(actor, actor.pid.remote())


def read_ahead(plan: RunPlan, shares: int) -> int:
    """Global batches to read ahead on a node with `shares` data-parallel ranks, so that the object store holds them."""
    layout = plan.layout
    samples = layout.micro_batch_size * layout.num_micro_batches * max(shares, 1)
    return max(1, min(plan.config.read_ahead, _STORE_BYTES // (samples * (plan.config.seq_length + 1) * 4)))


def _place(plan: RunPlan, spec: RankSpec) -> tuple[int, int]:
    """(data-parallel rank, pipeline stage): Megatron-core counts tensor, context, data, then pipeline ranks."""
    layout = plan.layout
    inner = layout.tp * layout.cp
    return spec.rank // inner % layout.dp, spec.rank // (inner * layout.dp)


def _kill(actor: Any) -> None:
    import ray

    # It may be gone already, with its node.
    with contextlib.suppress(ray.exceptions.RayError, ValueError):
        ray.kill(actor)
