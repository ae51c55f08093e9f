"""Ray's processes of one node, held by a `ray start --block` that ends with us."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from raytrain_llama3.config.ports import PortPlan
from raytrain_llama3.host import end_of, end_processes

_END_S = 15.0
_KILL_S = 5.0
_LOG_BYTES = 4000
_PR_SET_PDEATHSIG = 1


class RayNode:
    """A head, or a node that joins one. Its output is kept in `folder`."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self._log = folder / "ray-start.log"
        with self._log.open("ab") as log:
            # In a session of its own: a signal to our process group must not end Ray before the ranks have saved.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *arguments],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    @property
    def is_running(self) -> bool:
        """Whether all of it runs: `ray start --block` ends when one of its processes does."""
        return self._process.poll() is None

    @property
    def last_words(self) -> str:
        """The last line that Ray wrote which says something."""
        lines = [line.strip() for line in end_of(self._log, _LOG_BYTES).splitlines()]
        telling = [line for line in lines if any(c.isalpha() for c in line)]
        return telling[-1] if telling else "nothing was said"

    def end(self, *, at_once: bool = False) -> None:
        """End it and everything that it started, ranks included.

        `at_once` where its head is gone: Ray would go on asking it for leave to go.
        """
        family = self._family()
        if at_once:
            end_processes(family, 0)
        else:
            self._process.terminate()
            end_processes(family[:1], _END_S)
        end_processes(family[1:], _KILL_S)
        self._process.wait()

    def _family(self) -> list[psutil.Process]:
        if not self.is_running:
            return []
        root = psutil.Process(self._process.pid)
        return [root, *root.children(recursive=True)]


def head_arguments(plan: PortPlan, address: str, dashboard_host: str | None) -> list[str]:
    """`ray start`'s flags for pod 0; without a host there is no dashboard."""
    arguments = ["--head", f"--port={plan.gcs}", f"--ray-client-server-port={plan.client}", "--disable-usage-stats"]
    if dashboard_host is None:
        arguments += ["--include-dashboard=false"]
    else:
        arguments += [
            "--include-dashboard=true",
            f"--dashboard-host={dashboard_host}",
            f"--dashboard-port={plan.dashboard}",
        ]
    return [*arguments, *_node_arguments(plan, address)]


def worker_arguments(plan: PortPlan, address: str, head: str) -> list[str]:
    """`ray start`'s flags for a pod that joins the head at `head`."""
    return [f"--address={head}:{plan.gcs}", "--disable-usage-stats", *_node_arguments(plan, address)]


def _node_arguments(plan: PortPlan, address: str) -> list[str]:
    first, last = plan.workers
    return [
        f"--node-ip-address={address}",
        *(f"{flag}={port}" for flag, port in plan.services.items()),
        f"--min-worker-port={first}",
        f"--max-worker-port={last}",
    ]


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
