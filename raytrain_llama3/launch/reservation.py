"""Devices of one node, held in Ray for as long as a run may need them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from raytrain_llama3.config import env
from raytrain_llama3.config.plan import Device
from raytrain_llama3.launch.session import ALL_DEVICES_VISIBLE, Node

RESOURCE: dict[Device, str] = {"cuda": "GPU", "cpu": "CPU"}


class Lease:
    """Holds one GPU of a node for as long as it lives, and says which one Ray granted."""

    def device_index(self) -> int:
        """The CUDA ordinal as the ranks of this node will count, who see what CUDA_VISIBLE_DEVICES names."""
        import ray

        granted = str(ray.get_gpu_ids()[0])
        visible = env.snapshot().get("CUDA_VISIBLE_DEVICES", "")
        names = [name.strip() for name in visible.split(",") if name.strip()]
        return names.index(granted) if names else int(granted)


class NoRoom(Exception):
    """Ray did not grant what `choose_nodes` thought was free."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """One placement group on one node, a bundle a device; `devices` are their indices on the node, ascending."""

    node: Node
    devices: tuple[int, ...]
    group: Any
    leases: tuple[Any, ...]

    def release(self) -> None:
        """Give the devices back; ends whatever runs in the group."""
        import ray
        from ray.util.placement_group import remove_placement_group

        # Both may be gone already, with their node.
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            for lease in self.leases:
                ray.kill(lease)
            remove_placement_group(self.group)

    def inside(self, bundle: int = -1) -> Any:
        """Ray's scheduling strategy for an actor on this node, in a certain bundle or in any."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(placement_group=self.group, placement_group_bundle_index=bundle)


def reserve(wanted: Sequence[tuple[Node, int]], device: Device, name: str, timeout_s: float) -> list[Reservation]:
    """Hold `count` devices on each node of `wanted`, or none at all: raises `NoRoom` after `timeout_s`."""
    with _undone_on_error() as held:
        for node, count in wanted:
            held.append(Reservation(node, tuple(range(count)), _group(node, count, device, name), ()))
        deadline = time.monotonic() + timeout_s
        for reservation in held:
            if not reservation.group.wait(max(deadline - time.monotonic(), 0.1)):
                raise NoRoom(reservation.node.ip)
        if device == "cuda":
            held[:] = _with_leases(held, deadline)
        return list(held)


@contextlib.contextmanager
def _undone_on_error() -> Iterator[list[Reservation]]:
    held: list[Reservation] = []
    try:
        yield held
    except BaseException:
        for reservation in held:
            reservation.release()
        raise


def _group(node: Node, count: int, device: Device, name: str) -> Any:
    from ray.util.placement_group import placement_group

    return placement_group(
        [{RESOURCE[device]: 1.0}] * count,
        strategy="PACK",
        name=f"{name}/{node.ip}/{node.node_id[:8]}",
        bundle_label_selector=[{"ray.io/node-id": node.node_id}] * count,
    )


def _with_leases(held: Sequence[Reservation], deadline: float) -> list[Reservation]:
    import ray

    decorate: Any = ray.remote
    lease: Any = decorate(Lease)
    leases = [
        [
            lease.options(
                num_cpus=0,
                num_gpus=1,
                scheduling_strategy=reservation.inside(bundle),
                runtime_env={"env_vars": ALL_DEVICES_VISIBLE},
            ).remote()
            for bundle in reservation.devices
        ]
        for reservation in held
    ]
    try:
        refs = [actor.device_index.remote() for row in leases for actor in row]
        indices = iter(ray.get(refs, timeout=max(deadline - time.monotonic(), 10)))
    except ray.exceptions.RayError as error:
        raise NoRoom(str(error).splitlines()[0]) from error
    return [
        Reservation(old.node, tuple(sorted(next(indices) for _ in row)), old.group, tuple(row))
        for old, row in zip(held, leases, strict=True)
    ]
