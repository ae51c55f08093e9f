"""Which rank sits on which device: a pure plan, and a thin reservation in Ray."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

from raytrain_llama3.config.plan import Device, RunPlan
from raytrain_llama3.errors import ClusterFormationError
from raytrain_llama3.launch.session import Node, Session, address_key
from raytrain_llama3.messages import DeviceSlot, RankSpec

_POLL_S = 0.5


def assign_ranks(slots: Sequence[DeviceSlot], attempt: int) -> list[tuple[DeviceSlot, RankSpec]]:
    """Ranks by node order, then device index, so that neighbours in rank are neighbours in hardware.

    Ray numbers bundles as it likes: their order is not used.
    """
    ordered = sorted(slots, key=lambda s: (s.node_order, s.node_id, s.device_index))
    assigned: list[tuple[DeviceSlot, RankSpec]] = []
    for node_rank, (_, group) in enumerate(itertools.groupby(ordered, key=lambda s: (s.node_order, s.node_id))):
        on_node = list(group)
        for local_rank, slot in enumerate(on_node):
            spec = RankSpec(
                rank=len(assigned),
                world_size=len(ordered),
                node_rank=node_rank,
                local_rank=local_rank,
                local_world_size=len(on_node),
                device_index=slot.device_index,
                node_id=slot.node_id,
                node_ip=slot.node_ip,
                attempt=attempt,
            )
            assigned.append((slot, spec))
    return assigned


def choose_nodes(nodes: Sequence[Node], device: Device, wanted: Sequence[int], *, free: bool) -> list[str] | None:
    """The node of each bundle, or None where there is not room: `wanted[i]` devices on one node each.

    `free` asks for what is free now, else for what nodes have in all. The largest need goes to the node that fits it
    closest.
    """
    resource = "GPU" if device == "cuda" else "CPU"
    room = {n.node_id: (n.free if free else n.total).get(resource, 0.0) for n in nodes}
    order = {n.node_id: i for i, n in enumerate(nodes)}
    chosen: dict[str, int] = {}
    for count in sorted(wanted, reverse=True):
        fitting = [node for node, has in room.items() if has >= count and node not in chosen]
        if not fitting:
            return None
        chosen[min(fitting, key=lambda node: (room[node], order[node]))] = count
    return [node for node in sorted(chosen, key=order.__getitem__) for _ in range(chosen[node])]


@contextlib.contextmanager
def reserve(session: Session, plan: RunPlan, name: str) -> Iterator[tuple[Any, list[Node]]]:
    """Hold one bundle a device, each on a chosen node, until the end of the block.

    Yields the placement group and the node of each bundle. Raises `ClusterFormationError` with wanted against free
    per node when there is no room within `placement_timeout_s`.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    nodes, chosen = _wait_for_room(session, plan)
    bundle = {"GPU": 1.0} if plan.device == "cuda" else {"CPU": 1.0}
    by_id = {node.node_id: node for node in nodes}
    group = placement_group(
        [bundle] * len(chosen),
        strategy="PACK",
        name=name,
        bundle_label_selector=[{"ray.io/node-id": node} for node in chosen],
    )
    try:
        if not group.wait(plan.config.placement_timeout_s):
            raise ClusterFormationError(_no_room(session.nodes(), plan))
        yield group, [by_id[node] for node in chosen]
    finally:
        remove_placement_group(group)


def _wait_for_room(session: Session, plan: RunPlan) -> tuple[list[Node], list[str]]:
    deadline = time.monotonic() + plan.config.placement_timeout_s
    while True:
        nodes = session.nodes()
        chosen = choose_nodes(nodes, plan.device, plan.ranks_per_node, free=True)
        if chosen is not None:
            return nodes, chosen
        if time.monotonic() > deadline:
            raise ClusterFormationError(_no_room(nodes, plan))
        time.sleep(_POLL_S)


def _no_room(nodes: Sequence[Node], plan: RunPlan) -> str:
    resource = "GPU" if plan.device == "cuda" else "CPU"
    offers = [f"{n.ip}: {n.free.get(resource, 0):g} of {n.total.get(resource, 0):g} free" for n in nodes]
    ever = choose_nodes(nodes, plan.device, plan.ranks_per_node, free=False) is not None
    remedy = (
        "something else holds them: see `ray status`, or wait longer with --placement-timeout-s"
        if ever
        else "the cluster is too small: add nodes, or lower --num-nodes or --gpus-per-node"
    )
    wanted = f"{' + '.join(map(str, plan.ranks_per_node))} on {len(plan.ranks_per_node)} nodes"
    return (
        f"no room for the ranks after {plan.config.placement_timeout_s} s: wanted {resource} {wanted}; "
        f"{'; '.join(offers)}. {remedy}"
    )


def slots(nodes: Sequence[Node], device_indices: Sequence[int]) -> list[DeviceSlot]:
    """Slots of bundles 0, 1, …: the node and the device that each was granted."""
    ranked = {ip: i for i, ip in enumerate(sorted({n.ip for n in nodes}, key=address_key))}
    return [
        DeviceSlot(node.node_id, node.ip, ranked[node.ip], bundle, device)
        for bundle, (node, device) in enumerate(zip(nodes, device_indices, strict=True))
    ]
