"""Join the Ray cluster that was named, or run one of our own for as long as the session lasts."""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import psutil

from raytrain_llama3.config import env
from raytrain_llama3.config.plan import Device
from raytrain_llama3.config.schema import Config
from raytrain_llama3.errors import ClusterFormationError, StoppedBySignal
from raytrain_llama3.host import end_processes
from raytrain_llama3.launch import limits
from raytrain_llama3.launch.dashboard import Dashboard, put_off
from raytrain_llama3.launch.guard import guard, silence
from raytrain_llama3.launch.signals import NEVER, StopSignal

NAMESPACE = "raytrain_llama3"
POD = "raytrain-pod"
DEVICES = "raytrain-devices"
STARTED = "raytrain-started"
CORES, MEMORY = "raytrain-cores", "raytrain-memory-bytes"
"""Labels of the nodes that pods start: the pod's number, its devices, Unix time, and what each has of the machine."""
_PROCESS_END_S = 10
_HALF_STARTED_END_S = 0.5
"""Ray does not end by itself what it had started when its start was broken off."""
_LONGEST_BASE = 25

# Each rank sees all of its node's devices and sets its own: masking breaks NCCL's peer access.
ALL_DEVICES_VISIBLE = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}

# Ray reads these when it is imported.
RAY_ENVIRONMENT = ALL_DEVICES_VISIBLE | {
    # Started through `uv run`, Ray would install the project again for every worker.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # Ray runs workers at nice 15: a rank is the reason for this machine, not a guest on it.
    "RAY_worker_niceness": "0",
}


@dataclass(frozen=True, slots=True)
class Node:
    """One live Ray node: its address and what it offers in all and has free now."""

    node_id: str
    ip: str
    total: dict[str, float]
    free: dict[str, float]
    port: int = 0
    """Where its raylet listens; 0 where that is not known."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """What the pod that started it says of it (`launch.pods`)."""
    refused: set[str] = field(default_factory=set, compare=False, repr=False)
    """The session's nodes whose raylet refused a connection: it has ended, whoever listens at its port later."""

    @property
    def pod(self) -> int | None:
        """The pod's number, where the node is a pod of ours."""
        return int(self.labels[POD]) if POD in self.labels else None

    @property
    def order(self) -> tuple[object, ...]:
        """Sorts nodes as ranks follow them: by pod, else by address as a number."""
        return (self.pod is None, self.pod or 0, address_key(self.ip), self.node_id)

    def is_gone(self, timeout_s: float = 0.5) -> bool:
        """Whether its raylet cannot be reached, long before Ray's own health check gives it up."""
        if not self.port:
            return False
        try:
            socket.create_connection((self.ip, self.port), timeout=timeout_s).close()
        except ConnectionRefusedError:
            self.refused.add(self.node_id)
        except OSError:
            # Perhaps only its cable.
            return True
        return self.node_id in self.refused


class Farewell(Protocol):
    """What a run says to the other pods when it ends."""

    def tell(self, code: int) -> None:
        """Let them end with `code`; only the first time counts."""


@dataclass(frozen=True, slots=True)
class Session:
    """A connected Ray cluster. `dashboard` is ours to start where this process started Ray and the user wants one."""

    dashboard_url: str = ""
    dashboard: Dashboard | None = None
    farewell: Farewell | None = None
    """Tells the other pods how the run ended, where pods formed the cluster."""
    refused: set[str] = field(default_factory=set)
    """Ids of nodes whose raylet has ended, which may take Ray a minute to see (`Node.is_gone`)."""

    def nodes(self) -> list[Node]:
        """Live nodes, in the order in which ranks follow them; of a pod that came back, the newest alone."""
        from ray._private import state

        ray_state: Any = state.state
        free: dict[str, dict[str, float]] = ray_state.available_resources_per_node()
        nodes = [
            Node(
                n["NodeID"],
                n["NodeManagerAddress"],
                n["Resources"],
                free.get(n["NodeID"], {}),
                n["NodeManagerPort"],
                n.get("Labels") or {},
                self.refused,
            )
            for n in ray_state.node_table()
            if n["Alive"]
        ]
        return sorted(certain(newest(nodes), nodes), key=lambda node: node.order)


def newest(nodes: Sequence[Node]) -> list[Node]:
    """Without the nodes of which a pod has started another since: Ray takes a minute to see that they are gone."""
    latest: dict[int, float] = {}
    for node in nodes:
        if node.pod is not None:
            latest[node.pod] = max(latest.get(node.pod, 0.0), float(node.labels[STARTED]))
    return [node for node in nodes if node.pod is None or float(node.labels[STARTED]) == latest[node.pod]]


def certain(nodes: Sequence[Node], living: Sequence[Node]) -> list[Node]:
    """Without the nodes whose former raylet, at the same address and port, Ray still takes for alive.

    Ray's head speaks with both over one connection, which hangs when the former was cut off rather than ended. A
    placement group that is asked for meanwhile fails, and Ray never counts its devices as free again. The new raylet
    denies to be the former when it is asked, so that this lasts for seconds. Where the cut was longer the former may be
    given up while the connection still hangs: a pod that joins again takes other ports (`PortPlan.turn`).
    """
    there = Counter((node.ip, node.port) for node in living)
    return [node for node in nodes if not node.port or there[node.ip, node.port] == 1]


def on_node(node_id: str, function: Any, *arguments: object) -> Any:
    """Run `function` there, beside whatever else runs; returns Ray's reference to what it returns."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote: Any = ray.remote(num_cpus=0, max_retries=0)
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return remote(function).options(scheduling_strategy=there).remote(*arguments)


def address_key(ip: str) -> tuple[int, ...]:
    """Sorts addresses as numbers: 10.0.0.7 comes before 10.0.0.66."""
    parts = ip.split(".")
    return tuple(int(p) for p in parts) if all(p.isdigit() for p in parts) else tuple(ip.encode())


@contextlib.contextmanager
def join(address: str, stop: StopSignal) -> Iterator[Session]:
    """Connect to the running cluster at `address` (`auto` inside a Ray job), and leave it as it was.

    Raises `ClusterFormationError` with what was tried when nothing answers there, or the token does not fit.
    """
    env.set_defaults(RAY_ENVIRONMENT)
    env.apply({}, env.POD_NAMES)
    import ray

    try:
        context = connect(stop, address=address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterFormationError(
            f"ray_address {address}: cannot join: {error}. Is `ray start --head` running there? With token "
            "authentication, RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH must be set here too"
        ) from error
    gcs = str(context.address_info["gcs_address"])
    try:
        with guard(silence(gcs)):
            yield Session(dashboard_url=context.dashboard_url or "")
    finally:
        ray.shutdown()


@contextlib.contextmanager
def start(config: Config, device: Device, ranks: int, stop: StopSignal, cores: int | None = None) -> Iterator[Session]:
    """Start a Ray of this process's own: own folder, own token, nothing in the home folder, nothing left behind.

    It has `cores` to give, and as many workers to begin with; else those of this machine, and one for each rank.
    """
    folder = make_folder()
    before = _children()
    patience_s = _HALF_STARTED_END_S
    try:
        started = _start_in(folder, config, device, ranks, stop, cores or max(psutil.cpu_count() or 1, ranks))
        patience_s = _PROCESS_END_S
        yield started
    finally:
        import ray

        stop.patience = NEVER
        ray.shutdown()
        end_processes(_children() - before, patience_s)
        shutil.rmtree(folder, ignore_errors=True)


def make_folder() -> Path:
    """A folder for Ray's own files, and for what its workers leave behind."""
    # Ray puts sockets 62 characters below, and a socket's path may have 107.
    base = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="raytrain-", dir=base if len(base) <= _LONGEST_BASE else "/tmp"))


def _start_in(folder: Path, config: Config, device: Device, ranks: int, stop: StopSignal, cores: int) -> Session:
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    env.set_defaults(RAY_ENVIRONMENT)
    # The raylet's environment is what its workers inherit: a pod's RANK must not be in it.
    mine = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}
    # What a killed rank leaves in its temporary folder goes with ours.
    mine["TMPDIR"] = str(folder)
    env.apply(mine, [*env.POD_NAMES, "RAY_AUTH_TOKEN", "RAY_ADDRESS"])

    options: dict[str, Any] = {"num_gpus": ranks} if device == "cuda" else {"num_gpus": 0}
    try:
        connect(
            stop,
            address="local",
            num_cpus=cores,
            object_store_memory=limits.object_store_bytes(),
            _temp_dir=str(folder),
            **options,
        )
    except StoppedBySignal:
        raise
    except Exception as error:
        raise ClusterFormationError(f"Ray did not start on this machine: {error}") from error
    return Session(dashboard=Dashboard() if config.ray_dashboard else None)


def connect(stop: StopSignal, **options: Any) -> Any:
    """`ray.init`, quiet, in our namespace, with the signals still ours afterwards."""
    import ray
    from ray._private import services, worker
    from ray._private.node import Node

    # A signal to the whole process group (`timeout`, systemd) is for the driver: Ray's processes must outlive it
    # until the ranks have saved.
    apart = mock.patch.object(services, "ConsolePopen", functools.partial(subprocess.Popen, process_group=0))
    # Of each process that dies Ray prints a paragraph of guesses; the supervisor says it in a line.
    quiet = mock.patch.object(worker, "listen_error_messages", return_value=None)
    # It would read every log over and over, for a driver that asks for none of them.
    unfollowed = mock.patch.object(Node, "start_log_monitor")
    # It asks a cloud for nodes, which a Ray of our own has not, and is the last of Ray's processes to end.
    alone = mock.patch.object(Node, "start_monitor")
    try:
        with apart, quiet, unfollowed, alone, put_off():
            context = ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR, **options)
    except SystemExit as error:
        # What Ray's own handler does with a SIGTERM between its installation and ours.
        raise StoppedBySignal("SIGTERM while Ray started: ended at once") from error
    finally:
        stop.install()
    return context


def token_hint() -> str:
    """Where a person finds the token that this cluster asks for: never the token itself."""
    path = env.snapshot().get("RAY_AUTH_TOKEN_PATH")
    return f" (it asks for a token: cat {path})" if path else ""


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))
