"""Ray clusters that a benchmark starts beside the run, out of processes of its own, and ends."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
from processes import BenchmarkError, Tree, free_ports

HOST = "127.0.0.1"
SETTINGS = {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
"""No token; workers at the priority of everything else, as our command's own Ray has them."""
_STARTED = b"Ray runtime started"
_START_TIMEOUT_S = 300.0
_OBJECT_STORE_BYTES = 256 * 2**20
_PORTS = (
    *("dashboard-agent-listen", "dashboard-agent-grpc", "metrics-export"),
    *("node-manager", "object-manager", "runtime-env-agent"),
)
_HEAD_PORTS = ("ray-client-server", "dashboard")


def head(folder: Path, cpus: int) -> tuple[list[str], str]:
    """The command that is a cluster's first node, with Ray's files in `folder`; and the cluster's address."""
    (port,) = free_ports(1)
    own = ["--head", f"--port={port}", f"--temp-dir={folder}"]
    return _node([*own, *_chosen(_HEAD_PORTS)], cpus), f"{HOST}:{port}"


def another(address: str, cpus: int) -> list[str]:
    """The command that is one more node of the cluster at `address`, on this machine."""
    return _node([f"--address={address}"], cpus)


def _node(which: list[str], cpus: int) -> list[str]:
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--node-ip-address={HOST}"]
    return [*start, *which, f"--num-cpus={cpus}", f"--object-store-memory={_OBJECT_STORE_BYTES}", *_chosen(_PORTS)]


def _chosen(names: tuple[str, ...]) -> list[str]:
    return [f"--{name}-port={port}" for name, port in zip(names, free_ports(len(names)), strict=True)]


def wait_until_started(tree: Tree) -> None:
    """Wait until the node that `tree` is serves."""
    tree.wait_for(lambda: _STARTED in tree.output.read_bytes(), "node", _START_TIMEOUT_S)


class TwoNodes:
    """A cluster of two nodes on this machine, whose second one can be lost and replaced."""

    def __init__(self, folder: Path, cpus: int, variables: Mapping[str, str]) -> None:
        self._folder, self._cpus, self._variables = folder, cpus, variables
        command, self.address = head(folder / "r", cpus)
        self.trees = [Tree("the head", command, variables, folder / "head")]
        try:
            wait_until_started(self.trees[0])
            self.add()
        except BaseException:
            self.end()
            raise

    def add(self) -> None:
        """Start another node, and wait until it serves."""
        number = len(self.trees)
        command = another(self.address, self._cpus)
        self.trees.append(Tree(f"node {number}", command, self._variables, self._folder / f"node{number}"))
        wait_until_started(self.trees[-1])

    def kill_raylet(self) -> None:
        """SIGKILL to the raylet of the newest node: that node is lost, and all that runs there."""
        for process in self.trees[-1].processes():
            if process.name() == "raylet":
                process.kill()
                return
        raise BenchmarkError(f"{self.trees[-1].name} has no raylet")

    def processes(self) -> list[psutil.Process]:
        """Every living process of all nodes."""
        return [process for tree in self.trees for process in tree.processes()]

    def end(self) -> None:
        """End every node, the head last."""
        for tree in reversed(self.trees):
            tree.end(patience_s=20)
