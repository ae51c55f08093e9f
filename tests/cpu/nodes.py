"""A Ray cluster of several nodes on this machine, which can be lost one by one and replaced."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import psutil
from curves import curve
from ray.cluster_utils import Cluster
from sandbox import FOUR, Sandbox

CPUS = 2
TWO_NODES = (*FOUR, "--num-nodes", "2", "--gpus-per-node", str(CPUS), "--micro-batch-size", "4")
_KINDS = ("TrainWorker", "Feeder")
_MARK = "RAYTRAIN_TEST_CLUSTER"


class Nodes:
    """A head without CPUs, and nodes of two CPUs each beside it."""

    def __init__(self) -> None:
        # Short, as Ray's sockets want.
        self._folder = Path(tempfile.mkdtemp(prefix="rn-", dir="/tmp"))
        (self._folder / "ray").mkdir()
        self._mark = uuid.uuid4().hex
        # What Ray's processes, and through them the ranks, inherit.
        own = {_MARK: self._mark, "RAY_worker_niceness": "0", "RAY_TMPDIR": str(self._folder)}
        self._before = {name: os.environ.get(name) for name in own}
        os.environ.update(own)
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "include_dashboard": False, "temp_dir": str(self._folder)},
        )
        self._closing = threading.Event()
        self._reaper = threading.Thread(target=self._reap, daemon=True)
        self._reaper.start()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    @property
    def living(self) -> list[Any]:
        """Nodes beside the head whose raylet is there."""
        return [node for node in list(self._cluster.worker_nodes) if self.raylet(node).is_running()]

    def have(self, count: int) -> None:
        """Add or take away nodes until there are so many."""
        while len(self.living) < count:
            self.add()
        for node in self.living[count:]:
            self._cluster.remove_node(node, allow_graceful=False)

    def add(self, gpus: int = 0) -> None:
        """Start one more node, and wait until the cluster knows it. `gpus` are there in Ray's books alone."""
        self._cluster.add_node(num_cpus=CPUS, num_gpus=gpus, include_dashboard=False, temp_dir=str(self._folder))

    def raylet(self, node: Any) -> psutil.Process:
        (info,) = node.all_processes["raylet"]
        try:
            return psutil.Process(info.process.pid)
        except psutil.NoSuchProcess:
            return _Gone()  # type: ignore[return-value]

    def ranks(self, patience_s: float = 10.0) -> list[int]:
        """Processes of ranks, training or standing by, and of feeders, that are still there after some time."""
        deadline = time.monotonic() + patience_s
        while (found := self._ranks()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def close(self) -> None:
        self._closing.set()
        self._reaper.join()
        self._cluster.shutdown()
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ranks(self) -> list[int]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                name = " ".join(process.cmdline())
                if any(kind in name for kind in _KINDS) and process.environ().get(_MARK) == self._mark:
                    found.append(process.pid)
        return found

    def _reap(self) -> None:
        """A raylet that was killed is our child: a zombie until it is waited for, which its workers take for alive."""
        while not self._closing.wait(0.1):
            for node in list(self._cluster.worker_nodes):
                node.dead_processes()


def undisturbed(folder: Path, steps: int) -> list[float]:
    """The losses of a run on one node that nothing befell."""
    sandbox = Sandbox(folder)
    flags = ("--micro-batch-size", "4", "--save-interval", "0", "--save-at-end", "0")
    try:
        command = sandbox.run(*FOUR, *flags, "--train-iters", str(steps))
        assert command.process.returncode == 0, command.output
    finally:
        sandbox.close()
    return curve(sandbox.work / "tensorboard_logs" / "demo")


class _Gone:
    def is_running(self) -> bool:
        return False
