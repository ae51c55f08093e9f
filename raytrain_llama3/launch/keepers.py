"""Keepers of memory checkpoints: one on each node in use, holding its own ranks' parts and the node's before it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raytrain_llama3.checkpoint.keeper import Keeper
from raytrain_llama3.launch.crew import Crew, Member
from raytrain_llama3.launch.process import answers
from raytrain_llama3.messages import KeeperAddress, KeptPart, ResumePoint

_START_S = 60.0
_ANSWER_S = 3.0


@dataclass(frozen=True, slots=True)
class _Post:
    """A keeper that was started on a node."""

    actor: Any
    address: KeeperAddress


class Keepers:
    """The keepers of a run, over all its attempts. `is_wanted`: whether there are memory checkpoints at all."""

    def __init__(self, crew: Crew, name: str, *, is_wanted: bool) -> None:
        self._crew, self._name, self._is_wanted = crew, name, is_wanted
        self._posts: dict[str, _Post] = {}

    def assign(self, members: Sequence[Member]) -> list[Member]:
        """Tell each rank who keeps its parts: the keepers of its own node and of the next one in use.

        Two, because the node that is lost takes with it what it kept, its own ranks' parts and others'. Keepers that
        are missing are started; where one does not start, there are no memory checkpoints in this attempt.
        """
        if not self._is_wanted:
            return list(members)
        nodes = list(dict.fromkeys(m.spec.node_id for m in members))
        self._start({m.spec.node_id: m.spec.node_ip for m in members})
        if any(node not in self._posts for node in nodes):
            # A set that lacks a part is worth nothing.
            return list(members)
        following = dict(zip(nodes, [*nodes[1:], nodes[0]], strict=True))
        manned = []
        for member in members:
            own = member.spec.node_id
            keepers = tuple(self._posts[node].address for node in dict.fromkeys((own, following[own])))
            manned.append(Member(replace(member.spec, keepers=keepers), member.process))
        return manned

    def newest(self) -> ResumePoint | None:
        """The newest checkpoint of which every rank's part is held by a keeper that answers."""
        asked = {post.actor.holdings.remote(): post.address for post in self._posts.values()}
        return newest_whole(dict(answers(asked, _ANSWER_S)))

    def close(self) -> None:
        """End every keeper, and with it what it holds."""
        import ray

        for post in self._posts.values():
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.kill(post.actor)
        self._posts = {}

    def _start(self, nodes: Mapping[str, str]) -> None:
        import ray

        decorate: Any = ray.remote
        actor_class: Any = decorate(Keeper)
        self._drop_silent()
        started = {}
        for node, ip in nodes.items():
            if node not in self._posts:
                options = {"num_cpus": 0, "scheduling_strategy": self._crew.inside(node)}
                options["name"] = f"keeper/{ip}/{node[:8]}/{self._name}"
                actor = actor_class.options(**options).remote(ip)
                started[actor.address.remote()] = (node, ip, actor)
        for (node, ip, actor), (port, token) in answers(started, _START_S):
            self._posts[node] = _Post(actor, KeeperAddress(ip, port, token))

    def _drop_silent(self) -> None:
        """Forget keepers that are gone with their node."""
        asked = {post.actor.bytes_held.remote(): node for node, post in self._posts.items()}
        there = {node for node, _ in answers(asked, _ANSWER_S)}
        self._posts = {node: post for node, post in self._posts.items() if node in there}


def newest_whole(
    held: Mapping[KeeperAddress, Mapping[int, Mapping[tuple[int, int], tuple[int, int]]]],
) -> ResumePoint | None:
    """The newest set, by step and then by attempt, of which no rank's part is missing.

    `held`: of each keeper, of each rank, (world size, samples) by attempt and step.
    """
    sets: dict[tuple[int, int], dict[int, KeeperAddress]] = {}
    facts: dict[tuple[int, int], tuple[int, int]] = {}
    for address, ranks in held.items():
        for rank, parts in ranks.items():
            for (attempt, step), about in parts.items():
                sets.setdefault((step, attempt), {})[rank] = address
                facts[step, attempt] = about
    for step, attempt in sorted(sets, reverse=True):
        world_size, samples = facts[step, attempt]
        where = sets[step, attempt]
        if set(where) == set(range(world_size)):
            kept = tuple(KeptPart(rank, where[rank]) for rank in sorted(where))
            return ResumePoint("", step, samples, kept=kept, kept_in_attempt=attempt)
    return None
