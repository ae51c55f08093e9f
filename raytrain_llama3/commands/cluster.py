"""What commands that need a cluster have in common: this pod's part in it, and joining it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from raytrain_llama3.config import machine, rules
from raytrain_llama3.config.load import Loaded
from raytrain_llama3.launch.signals import StopSignal

if TYPE_CHECKING:
    from raytrain_llama3.launch.pod import Pod
    from raytrain_llama3.launch.session import Session


def introduce(loaded: Loaded, say: Callable[[str], object]) -> Pod | None:
    """Say what the pod's variables become; the pod, where several of them form a cluster."""
    if loaded.pods is None:
        return None
    from raytrain_llama3.config import pods
    from raytrain_llama3.launch import limits, ports
    from raytrain_llama3.launch.pod import Pod, own_address

    config = loaded.config
    limits.raise_open_files()
    supply = machine.local_supply(config, loaded.environ)
    pod = Pod(loaded, loaded.pods, supply, rules.run_paths(config, Path.cwd()).checkpoints, say)
    address = own_address(loaded.pods, config.node_address)
    say(pods.table(loaded.pods, rules.devices_used(config, supply)[0], supply.device, address, pod.plan))
    for line in (*ports.overlap(pod.plan), *limits.shortages(supply.device)):
        say(f"note: {line}")
    return pod if loaded.pods.count > 1 else None


def joined(loaded: Loaded, pod: Pod | None, stack: contextlib.ExitStack, stop: StopSignal) -> Session | None:
    """The cluster that was named, or that pods form with this one as their head; None where there is neither."""
    address = loaded.config.ray_address
    if pod is not None:
        from raytrain_llama3.launch import head

        return stack.enter_context(head.lead(pod, stop))
    if address is not None:
        from raytrain_llama3.launch import session

        return stack.enter_context(session.join(address, stop))
    return None
