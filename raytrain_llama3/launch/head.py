"""Pod 0 of a cluster that pods form by themselves: Ray's head and the driver are here."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from raytrain_llama3.config import env
from raytrain_llama3.errors import ClusterFormationError, RaytrainError
from raytrain_llama3.launch import addresses, ports, session, token
from raytrain_llama3.launch.farewell import PodsFarewell
from raytrain_llama3.launch.guard import guard
from raytrain_llama3.launch.pod import NotYet, Pod, await_start, ended, own_folder, until
from raytrain_llama3.launch.ray_node import RayNode, head_arguments
from raytrain_llama3.launch.session import Session
from raytrain_llama3.launch.signals import NEVER, StopSignal
from raytrain_llama3.launch.token import Access

_POLL_S = 0.5
_TELL_S = 15.0


@contextlib.contextmanager
def lead(pod: Pod, stop: StopSignal) -> Iterator[Session]:
    """Pod 0: start Ray's head, wait for the other pods, and let them end with the run's exit code.

    Raises `ClusterFormationError` when a port is taken, the own address is not to be had, or pods do not come.
    """
    config = pod.loaded.config
    with own_folder() as base:
        deadline = time.monotonic() + pod.timeout_s
        address = until(pod, deadline, lambda: addresses.of_head(pod.pods, config.node_address), "this pod's address")
        reached_by = f"{address}:{pod.plan.gcs}"
        access = token.given(pod.loaded.environ, reached_by) or token.make(pod.folder, reached_by)
        _tell_access(pod, access)
        ports.check_free(pod.plan, address, head=True)
        arguments = head_arguments(pod.plan, address, config.ray_dashboard_host if config.ray_dashboard else None)
        node = RayNode([*arguments, *pod.resources(base)], pod.environment(access, base), base)
        with ended(node, stop):
            try:
                await_start(node, address, pod.plan.gcs)
            except NotYet as error:
                raise ClusterFormationError(f"Ray's head does not start: {error}") from error
            with _connected(pod, access, address, node, stop) as formed:
                _await_pods(pod, formed, node, deadline)
                yield formed


@contextlib.contextmanager
def _connected(pod: Pod, access: Access, address: str, node: RayNode, stop: StopSignal) -> Iterator[Session]:
    """The driver as a client of its own head."""
    env.apply(session.RAY_ENVIRONMENT | access.environment, [*env.POD_NAMES, "RAY_ADDRESS", *access.remove])
    import ray

    try:
        session.connect(stop, address=f"{address}:{pod.plan.gcs}", _node_ip_address=address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterFormationError(f"Ray's head does not serve: {error}; it said: {node.last_words}") from error
    formed = Session(_dashboard_url(pod, address), farewell=PodsFarewell())
    code = 1
    try:
        with guard(lambda: "" if node.is_running else f"Ray's head ended: {node.last_words}"):
            yield formed
    except RaytrainError as error:
        code = error.exit_code
        raise
    finally:
        stop.patience = NEVER
        assert formed.farewell is not None
        formed.farewell.tell(code)
        ray.shutdown()


def _dashboard_url(pod: Pod, address: str) -> str:
    """host:port as Ray was told: it says so itself only once the dashboard serves, seconds after the head does."""
    config = pod.loaded.config
    if not config.ray_dashboard:
        return ""
    host = address if config.ray_dashboard_host in ("0.0.0.0", "::") else config.ray_dashboard_host
    return f"{host}:{pod.plan.dashboard}"


def _await_pods(pod: Pod, formed: Session, node: RayNode, deadline: float) -> None:
    tell_at = time.monotonic() + _TELL_S
    while True:
        nodes = formed.nodes()
        missing = sorted(set(range(pod.pods.count)) - {n.pod for n in nodes})
        if not missing:
            devices = " + ".join(n.labels[session.DEVICES] for n in nodes)
            pod.say(f"the cluster has formed: {len(nodes)} nodes with {devices} devices")
            return
        names = f"pod{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        if not node.is_running:
            raise ClusterFormationError(f"Ray's head ended while {names} had not joined: {node.last_words}")
        now = time.monotonic()
        if now > deadline:
            raise ClusterFormationError(
                f"{names} of {pod.pods.count} did not join within join_timeout_s {pod.timeout_s:.0f} s (the head "
                f"serves at {pod.pods.address}:{pod.plan.gcs}): see their logs; a network policy must let pods reach "
                f"{pod.plan} on each other"
            )
        if now > tell_at:
            pod.say(f"waiting for {names} of {pod.pods.count}, {deadline - now:.0f} s more at most")
            tell_at = now + _TELL_S
        time.sleep(_POLL_S)


def _tell_access(pod: Pod, access: Access) -> None:
    if access.warning:
        pod.say(f"warning: {access.warning}")
    else:
        pod.say(f"Ray's token: {access.told}")
