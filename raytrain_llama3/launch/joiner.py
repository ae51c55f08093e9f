"""A pod that joins pod 0's Ray, serves as long as that is there, and ends as the driver does."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from pathlib import Path

from raytrain_llama3.config.pods import is_loopback
from raytrain_llama3.errors import ClusterFormationError, StoppedBySignal
from raytrain_llama3.launch import addresses, ports, token
from raytrain_llama3.launch.pod import NotYet, Pod, await_start, ended, own_folder, until
from raytrain_llama3.launch.ray_node import RayNode, worker_arguments
from raytrain_llama3.launch.signals import AFTER_ONE, AT_ONCE, StopSignal

_POLL_S = 0.5
_DIAL_S = 2.0
_REFUSED_S = 5.0
_SILENT_S = 20.0
"""How long the head may not answer before a pod gives it up: it is gone for sure, or perhaps only cut off."""


def serve(pod: Pod, stop: StopSignal) -> int:
    """Another pod: join the head and serve until the driver ends; its exit code.

    A head that goes away is waited for again, as long as at first. Raises `ClusterFormationError` when none comes, and
    `StoppedBySignal` after `grace_s` of a SIGTERM that the driver does not follow.
    """
    served = 0

    def attempt() -> int | None:
        with own_folder() as base:
            return _serve_once(pod, base, stop, served)

    while True:
        code = until(pod, time.monotonic() + pod.timeout_s, attempt, "the head")
        if code is not None:
            return code
        served += 1
        pod.say("the head is gone: this pod's ranks end, and it waits for a new head")


def _serve_once(pod: Pod, base: Path, stop: StopSignal, served: int) -> int | None:
    """Join and serve, having done so `served` times; the exit code, or None when the head went away.

    Raises `NotYet` or `OSError` to try again.
    """
    config, plan = pod.loaded.config, replace(pod.plan, turn=served % 2)
    if stop.is_set:
        raise StoppedBySignal(f"{stop.name}: ended while there was no head to serve")
    stop.patience = AT_ONCE
    head = addresses.resolve(pod.pods.address)
    if is_loopback(head):
        raise NotYet(
            f"MASTER_ADDR {pod.pods.address} resolves to {head} here, which is this pod itself: give pod 0's address"
        )
    socket.create_connection((head, plan.gcs), timeout=_DIAL_S).close()
    access = token.given(pod.loaded.environ, f"{head}:{plan.gcs}") or token.find(pod.folder, f"{head}:{plan.gcs}")
    address = config.node_address or addresses.source_towards(head)
    try:
        ports.check_free(plan, address, head=False)
    except ClusterFormationError as error:
        if not served:
            raise
        # What it started before may take a moment to go.
        raise NotYet(str(error)) from error
    arguments = [*worker_arguments(plan, address, head), *pod.resources(base)]
    node = RayNode(arguments, pod.environment(access, base), base)
    with ended(node, stop):
        await_start(node, address, plan.raylet)
        pod.say(f"pod {pod.pods.rank} serves at {address}; the head is {head}:{plan.gcs}")
        if access.warning:
            pod.say(f"warning: {access.warning}")
        stop.patience = AFTER_ONE
        code = _serve(pod, base, node, head, stop)
        if code is None:
            node.end(at_once=True)
        return code


def _serve(pod: Pod, base: Path, node: RayNode, head: str, stop: StopSignal) -> int | None:
    answered = time.monotonic()
    leave_by: float | None = None
    while True:
        if (code := pod.told_code(base)) is not None:
            return code
        refused = _dial(head, pod.plan.gcs)
        now = time.monotonic()
        if refused is None:
            answered = now
        elif now - answered > (_REFUSED_S if refused else _SILENT_S):
            return None
        if not node.is_running:
            code = pod.told_code(base)
            if code is None:
                pod.say(f"Ray ended here: {node.last_words}")
            return code
        if stop.is_set and leave_by is None:
            grace_s = pod.loaded.config.grace_s
            leave_by = now + grace_s
            pod.say(f"{stop.name}: this pod serves on until the driver has ended, {grace_s} s at most")
        if leave_by is not None and now > leave_by:
            return 143
        time.sleep(_POLL_S)


def _dial(head: str, port: int) -> bool | None:
    """None if the head's port is open; else whether it was refused (True), or there was no answer at all."""
    try:
        socket.create_connection((head, port), timeout=_DIAL_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return None
