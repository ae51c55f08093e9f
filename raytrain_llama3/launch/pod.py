"""A pod that forms a cluster with others: what it offers, and how it waits for what the others must do first."""

from __future__ import annotations

import contextlib
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tenacity

from raytrain_llama3.config import env, machine
from raytrain_llama3.config.load import Loaded
from raytrain_llama3.config.plan import DeviceSupply
from raytrain_llama3.config.pods import Pods
from raytrain_llama3.config.ports import PortPlan
from raytrain_llama3.errors import ClusterFormationError
from raytrain_llama3.launch import addresses, limits, session
from raytrain_llama3.launch.farewell import FILE_VARIABLE
from raytrain_llama3.launch.ray_node import RayNode
from raytrain_llama3.launch.signals import NEVER, StopSignal
from raytrain_llama3.launch.token import Access, NoToken

Say = Callable[[str], object]

_POLL_S = 0.25
_LONGEST_PAUSE_S = 3.0
_START_S = 60.0


class NotYet(Exception):
    """Something that the other pods must do first."""


@dataclass(frozen=True, slots=True)
class Pod:
    """What forming and joining need to know of this pod; `folder` is shared and keeps the token."""

    loaded: Loaded
    pods: Pods
    supply: DeviceSupply
    folder: Path
    say: Say

    @property
    def plan(self) -> PortPlan:
        """The ports, alike in every pod."""
        return PortPlan(self.loaded.config.ray_port)

    @property
    def timeout_s(self) -> float:
        """How long to wait for the others."""
        return self.loaded.config.join_timeout_s

    def resources(self, base: Path) -> list[str]:
        """`ray start`'s flags for what this pod offers, and for Ray's files below `base`."""
        count = self.supply.per_node[0]
        labels: dict[str, object] = {
            session.POD: self.pods.rank,
            session.DEVICES: count,
            session.STARTED: f"{time.time():.3f}",
            session.CORES: machine.cores(),
            session.MEMORY: self.supply.memory_bytes,
        }
        return [
            f"--num-gpus={count if self.supply.device == 'cuda' else 0}",
            *([f"--num-cpus={count}"] if self.supply.device == "cpu" else []),
            f"--object-store-memory={limits.object_store_bytes()}",
            f"--temp-dir={base}",
            "--labels=" + ",".join(f"{name}={value}" for name, value in labels.items() if value is not None),
        ]

    def environment(self, access: Access, base: Path) -> dict[str, str]:
        """What Ray's processes start with, and through them the ranks: nothing of the pod's own words."""
        clean = env.without_pod(self.loaded.environ)
        for name in ("RAY_ADDRESS", env.IN_A_JOB, *access.remove):
            clean.pop(name, None)
        package = str(Path(__file__).parents[2])
        clean["PYTHONPATH"] = ":".join(filter(None, (package, clean.get("PYTHONPATH", ""))))
        own = {"RAY_USAGE_STATS_ENABLED": "0", "TMPDIR": str(base), FILE_VARIABLE: str(base / "exit-code")}
        return clean | session.RAY_ENVIRONMENT | access.environment | own

    def told_code(self, base: Path) -> int | None:
        """The exit code that the driver left here, once it has ended."""
        with contextlib.suppress(OSError, ValueError):
            return int((base / "exit-code").read_text())
        return None


def own_address(pods: Pods, chosen: str | None) -> str:
    """For the table: this pod's address, or nothing as long as pod 0's name does not resolve."""
    if chosen:
        return chosen
    try:
        return (
            addresses.of_head(pods, None) if pods.is_head else addresses.source_towards(addresses.resolve(pods.address))
        )
    except OSError:
        return ""


def until[T](pod: Pod, deadline: float, attempt: Callable[[], T], what: str) -> T:
    """`attempt`, again and again until it works. Raises `ClusterFormationError` with the last reason after that."""
    told = set[str]()

    def before_sleep(state: tenacity.RetryCallState) -> None:
        reason = _reason(pod, state.outcome.exception() if state.outcome else None)
        if reason not in told:
            told.add(reason)
            pod.say(f"waiting for {what}: {reason}")

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type((OSError, NotYet, NoToken)),
        stop=tenacity.stop_after_delay(max(deadline - time.monotonic(), 0)),
        wait=tenacity.wait_exponential(multiplier=0.25, max=_LONGEST_PAUSE_S),
        before_sleep=before_sleep,
        reraise=True,
    )
    try:
        return retrying(attempt)
    except (OSError, NotYet, NoToken) as error:
        raise ClusterFormationError(
            f"pod {pod.pods.rank}: no way to {what} within join_timeout_s {pod.timeout_s:.0f} s: {_reason(pod, error)}"
        ) from error


def _reason(pod: Pod, error: BaseException | None) -> str:
    address = pod.pods.address
    if isinstance(error, socket.gaierror):
        return f"MASTER_ADDR {address} does not resolve here ({error.strerror})"
    if isinstance(error, OSError):
        return f"{address}:{pod.plan.gcs} does not answer ({error.strerror or error})"
    return str(error)


def await_start(node: RayNode, address: str, port: int) -> None:
    """Until the node's port is open. Raises `NotYet` with Ray's last words when it ends first."""
    deadline = time.monotonic() + _START_S
    while not addresses.accepts(address, port):
        if not node.is_running:
            raise NotYet(f"ray start ended: {node.last_words}")
        if time.monotonic() > deadline:
            raise NotYet(f"ray start has not opened port {port} in {_START_S:.0f} s: {node.last_words}")
        time.sleep(_POLL_S / 2)


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """A short-lived folder for Ray's files."""
    base = session.make_folder()
    try:
        yield base
    finally:
        shutil.rmtree(base, ignore_errors=True)


@contextlib.contextmanager
def ended(node: RayNode, stop: StopSignal) -> Iterator[None]:
    """`node` ends with the block, and nothing cuts that short."""
    try:
        yield
    finally:
        stop.patience = NEVER
        node.end()
