"""Which nodes serve, and which rank sits on which device: pure plans over what Ray says that there is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raytrain_llama3.config.plan import RunPlan
from raytrain_llama3.launch.session import Node
from raytrain_llama3.messages import DeviceSlot, RankSpec


def assign_ranks(slots: Sequence[DeviceSlot], attempt: int) -> list[tuple[DeviceSlot, RankSpec]]:
    """Ranks by node order, then device index, so that neighbours in rank are neighbours in hardware."""
    ordered = sorted(slots, key=lambda s: (s.node_order, s.node_id, s.device_index))
    nodes = list(dict.fromkeys(s.node_id for s in ordered))
    on_node = {node: [s for s in ordered if s.node_id == node] for node in nodes}
    return [
        (
            slot,
            RankSpec(
                rank=rank,
                world_size=len(ordered),
                node_rank=nodes.index(slot.node_id),
                local_rank=on_node[slot.node_id].index(slot),
                local_world_size=len(on_node[slot.node_id]),
                device_index=slot.device_index,
                node_id=slot.node_id,
                node_ip=slot.node_ip,
                attempt=attempt,
            ),
        )
        for rank, slot in enumerate(ordered)
    ]


def choose_nodes(room: Mapping[str, float], wanted: Sequence[int], held: frozenset[str]) -> dict[str, int] | None:
    """Devices to use on each node, or None where there is not room: `wanted[i]` devices on one node each.

    `room` says how many devices each node could give, in the order in which nodes are preferred. Nodes in `held`,
    whose processes stand ready, come first; then the largest need goes to the node that fits it closest.
    """
    order = {node: i for i, node in enumerate(room)}
    chosen: dict[str, int] = {}
    for count in sorted(wanted, reverse=True):
        fitting = [node for node, has in room.items() if has >= count and node not in chosen]
        if not fitting:
            return None
        chosen[min(fitting, key=lambda node: (node not in held, room[node], order[node]))] = count
    return {node: chosen[node] for node in sorted(chosen, key=order.__getitem__)}


def slots(devices: Mapping[str, Sequence[int]], nodes: Mapping[str, Node], used: Mapping[str, int]) -> list[DeviceSlot]:
    """The first `used[node]` of each node's `devices`, ready for `assign_ranks`."""
    ranked = {node: i for i, node in enumerate(sorted(used, key=lambda node: nodes[node].order))}
    return [
        DeviceSlot(node, nodes[node].ip, ranked[node], device)
        for node, count in used.items()
        for device in sorted(devices[node])[:count]
    ]


def no_room(nodes: Sequence[Node], plan: RunPlan, resource: str) -> str:
    """Wanted against free, per node, and what to do about it."""
    offers = [f"{n.ip}: {n.free.get(resource, 0):g} of {n.total.get(resource, 0):g} free" for n in nodes]
    in_all = {n.node_id: n.total.get(resource, 0.0) for n in nodes}
    remedy = (
        "something else holds them: see `ray status`, or wait longer with --placement-timeout-s"
        if choose_nodes(in_all, plan.ranks_per_node, frozenset()) is not None
        else "the cluster is too small: add nodes, or lower --num-nodes or --gpus-per-node"
    )
    count = len(plan.ranks_per_node)
    wanted = f"{' + '.join(map(str, plan.ranks_per_node))} on {count} node{'s' if count > 1 else ''}"
    return (
        f"no room for the ranks after {plan.config.placement_timeout_s} s: wanted {resource} {wanted}; "
        f"{'; '.join(offers)}. {remedy}"
    )
