"""Whether the ports of the plan are free on this host, and whether they can collide with the kernel's own."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import psutil

from raytrain_llama3.config.ports import PortPlan
from raytrain_llama3.errors import ClusterFormationError

_EPHEMERAL = "/proc/sys/net/ipv4/ip_local_port_range"


def check_free(plan: PortPlan, address: str, *, head: bool) -> None:
    """Raise `ClusterFormationError` naming every service port that is taken here, and who has it."""
    services = {"head": plan.gcs, "dashboard": plan.dashboard, "client": plan.client} if head else {}
    services |= {flag.removeprefix("--").removesuffix("-port"): port for flag, port in plan.services.items()}
    taken = [f"{port} ({name}{_holder(port)})" for name, port in services.items() if not _is_free(address, port)]
    if taken:
        raise ClusterFormationError(
            f"ray_port {plan.base}: in use on this host: port {', '.join(taken)}. End what holds it, or move "
            f"Ray's ports ({plan}) in every pod with --ray-port"
        )


def overlap(plan: PortPlan) -> list[str]:
    """A line where the kernel may give a port of the plan to any outgoing connection."""
    try:
        first, last = map(int, Path(_EPHEMERAL).read_text().split())
    except (OSError, ValueError):
        return []
    if plan.last < first or plan.base > last:
        return []
    return [
        f"ports {plan} lie in the range that the kernel gives to outgoing connections ({first}–{last}): move them with "
        "--ray-port if one is found in use"
    ]


def _is_free(address: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # What a former run left in TIME_WAIT is no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _holder(port: int) -> str:
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.pid:
                return f", held by process {connection.pid} {psutil.Process(connection.pid).name()}"
    return ""
