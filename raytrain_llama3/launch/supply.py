"""The devices of a cluster that was joined: their number as Ray counts it, what they are as their nodes say."""

from __future__ import annotations

from collections.abc import Sequence

import psutil

from raytrain_llama3.config import machine
from raytrain_llama3.config.plan import DeviceSupply
from raytrain_llama3.config.schema import Config
from raytrain_llama3.errors import HardwareError
from raytrain_llama3.launch.process import answers
from raytrain_llama3.launch.session import CORES, DEVICES, MEMORY, Node, Session, on_node

_ANSWER_S = 30.0


def cluster_supply(session: Session, config: Config) -> tuple[DeviceSupply, int]:
    """The devices, and the fewest cores of a node that has some.

    GPUs, or with `device=cpu` processes as asked for. What a device has is the least that any node says. Of a node
    that does not answer nothing is known here: its ranks find out for themselves. Raises `HardwareError` when GPUs
    are asked for and there are none.
    """
    nodes = session.nodes()
    with_gpus = [node for node in nodes if node.total.get("GPU", 0) >= 1]
    if config.device != "cpu" and with_gpus:
        return _gpus(with_gpus)
    if config.device == "cuda":
        raise HardwareError(f"device cuda: none of the cluster's {len(nodes)} nodes offers a GPU to Ray")
    asked = 1 if config.gpus_per_node == "auto" else config.gpus_per_node
    each = tuple(int(node.labels.get(DEVICES, asked)) for node in nodes)
    memory = _least(nodes, MEMORY)
    least = psutil.virtual_memory().total // max(each) if memory is None else int(memory)
    return DeviceSupply("cpu", each, "CPU", least), int(_least(nodes, CORES) or machine.cores())


def look() -> tuple[DeviceSupply | None, int]:
    """The GPUs of the node on which this runs, if it has some, and the cores that a process may use there."""
    return machine.gpu_supply(machine.gpus()), machine.cores()


def _gpus(nodes: Sequence[Node]) -> tuple[DeviceSupply, int]:
    asked = {on_node(node.node_id, look): node for node in nodes}
    told = [(supply, cores) for _, (supply, cores) in answers(asked, _ANSWER_S) if supply is not None]
    there = [supply for supply, _ in told]
    weakest = min(there, key=lambda one: (one.capability or 0, one.memory_bytes or 0), default=None)
    supply = DeviceSupply(
        "cuda",
        tuple(int(node.total["GPU"]) for node in nodes),
        weakest.device_name if weakest else " ".join(_rays_names(nodes)),
        min((one.memory_bytes for one in there if one.memory_bytes), default=None),
        min((one.capability for one in there if one.capability), default=None),
    )
    return supply, min((cores for _, cores in told), default=machine.cores())


def _rays_names(nodes: Sequence[Node]) -> list[str]:
    """Ray's own short names of GPUs, such as H100."""
    return sorted({key.split(":", 1)[1] for node in nodes for key in node.total if key.startswith("accelerator_type:")})


def _least(nodes: Sequence[Node], label: str) -> float | None:
    """The least that any node's label says, where all of them have it."""
    values = [float(node.labels[label]) for node in nodes if label in node.labels]
    return min(values) if values and len(values) == len(nodes) else None
