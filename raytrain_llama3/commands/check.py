"""`check`: whether this machine, or a whole cluster, can train."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from raytrain_llama3.commands import cluster
from raytrain_llama3.config import env, machine, rules
from raytrain_llama3.config.load import Loaded, load
from raytrain_llama3.config.plan import DeviceSupply
from raytrain_llama3.errors import HardwareError
from raytrain_llama3.launch.signals import StopSignal

if TYPE_CHECKING:
    from raytrain_llama3.launch.pod import Pod
    from raytrain_llama3.launch.session import Session

_JSON = "--json"
_HELP = f"""usage: {{program}} check [{_JSON}] [options as for train]

Looks at every node and tries every device: on this machine, on the cluster that RAY_ADDRESS names, or, started in every
pod, on the cluster that the pods form. Exit code 0, or 2 when something would end a run. Among train's options it heeds
those about hardware, pods and folders.
"""


def run(program: str, argv: Sequence[str], write: Callable[[str], object]) -> int:
    """Look, try, tell; 0 or 2."""
    if "--help" in argv or "-h" in argv:
        write(_HELP.format(program=program))
        return 0
    as_json = _JSON in argv
    loaded = load([item for item in argv if item != _JSON], env.snapshot())
    env.set_defaults(loaded.environ)
    # With --json only the result goes to standard output.
    say = (lambda _text: None) if as_json else (lambda text: write(text + "\n"))
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopSignal())
        pod = cluster.introduce(loaded, say)
        if pod is not None and not pod.pods.is_head:
            from raytrain_llama3.launch import joiner

            return joiner.serve(pod, stop)
        return _check(loaded, pod, stack, stop, as_json, write)


def _check(
    loaded: Loaded,
    pod: Pod | None,
    stack: contextlib.ExitStack,
    stop: StopSignal,
    as_json: bool,
    write: Callable[[str], object],
) -> int:
    from raytrain_llama3.launch import check
    from raytrain_llama3.train.probe import DeviceProbe

    session, supply = _cluster(loaded, pod, stack, stop)
    folder = rules.run_paths(loaded.config, Path.cwd()).checkpoints
    environ = env.for_workers(loaded.environ, supply.device, supply.device_name, 1)
    findings = check.check(session, supply, folder, DeviceProbe, environ)
    write((check.as_json(findings) if as_json else check.as_table(findings)) + "\n")
    code = 0 if check.is_good(findings) else HardwareError.exit_code
    if session.farewell is not None:
        session.farewell.tell(code)
    return code


def _cluster(
    loaded: Loaded, pod: Pod | None, stack: contextlib.ExitStack, stop: StopSignal
) -> tuple[Session, DeviceSupply]:
    from raytrain_llama3.launch import session
    from raytrain_llama3.launch.supply import cluster_supply

    joined = cluster.joined(loaded, pod, stack, stop)
    if joined is not None:
        return joined, cluster_supply(joined, loaded.config)[0]
    supply = machine.local_supply(loaded.config, loaded.environ)
    return stack.enter_context(session.start(loaded.config, supply.device, sum(supply.per_node), stop)), supply
