"""The same command in every pod: one long run through whatever befalls pods, told once and looked at from all sides."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from curves import assert_alike
from hosts import Host, Network, Pod, train
from sandbox import DEMO, Command, Sandbox, records

COUNT, DEVICES, BATCH = 3, 2, 24
MODEL = (*DEMO, "--micro-batch-size", "2", "--global-batch-size", str(BATCH), "--hidden-size", "64")
MODEL += ("--ffn-hidden-size", "128", "--kv-channels", "16", "--log-interval", "1", "--eval-interval", "0")
SAVING = ("--save-interval", "10", "--max-checkpoints", "0")
ENDLESS = (*MODEL, *SAVING, "--train-iters", "100000", "--node-rejoin-timeout-s", "300")
REFERENCE_STEPS = 60
PORTS = ("--ray-port", "21000")
"""Beside those of a run that the machine may have outside of the hosts."""


class Pods:
    """The pods of one run, one in each host, started by a platform that gives them its variables."""

    def __init__(self, hosts: list[Host], work: Path) -> None:
        self.hosts, self.work = hosts, work
        self.now: dict[int, Pod] = {}

    def start(self, rank: int, *flags: str, count: int = COUNT, **environment: str) -> Command:
        given = {"MASTER_ADDR": self.hosts[0].name, "WORLD_SIZE": str(count), "RANK": str(rank)}
        program = train(*flags, *PORTS)
        self.now[rank] = self.hosts[rank].pod(program, self.work, **given | environment)
        return self.now[rank].command

    def end(self) -> None:
        for pod in self.now.values():
            pod.kill()


@dataclass
class Story:
    """What the run printed, pod by pod, and left behind."""

    work: Path
    heads: list[Command] = field(default_factory=list)
    others: dict[str, Command] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)

    @property
    def board(self) -> Path:
        return self.work / "tensorboard_logs" / "demo"


@pytest.fixture(scope="module")
def hosts(network: Network) -> list[Host]:
    return [network.host(f"worker-{i}") for i in range(COUNT)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of six ranks on one machine."""
    sandbox = Sandbox(tmp_path_factory.mktemp("reference"))
    flags = ("--gpus-per-node", str(COUNT * DEVICES), "--save-interval", "0", "--save-at-end", "0")
    try:
        command = sandbox.run(*MODEL, *flags, "--train-iters", str(REFERENCE_STEPS), "--ray-dashboard", "0")
        assert command.process.returncode == 0, command.output
    finally:
        sandbox.close()
    return losses(sandbox.work / "tensorboard_logs" / "demo")


@pytest.fixture(scope="module")
def story(hosts: list[Host], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """One run: joins in the wrong order, loses a pod, a cable and its head, and is stopped."""
    work = tmp_path_factory.mktemp("run")
    pods, told = Pods(hosts, work), Story(work)
    flags = (*ENDLESS, "--gpus-per-node", str(DEVICES))
    try:
        # The last pod first, whose name for pod 0 does not resolve yet; pod 0 in the middle.
        told.others["2 early"] = last = pods.start(2, *flags)
        last.wait_for("waiting for the head: MASTER_ADDR worker-0 does not resolve here")
        hosts[2].knows(hosts[0])
        last.wait_for(r"waiting for the head: worker-0:21000 does not answer")
        told.heads.append(pods.start(0, *flags))
        told.heads[0].wait_for(r"waiting for pods? 1.* of 3")
        hosts[1].knows(hosts[0])
        told.others["1"] = pods.start(1, *flags)
        told.heads[0].wait_for("step +12/")

        pods.now[2].kill()
        told.heads[0].wait_for(r"node \S+ is gone")
        told.others["2 again"] = pods.start(2, *flags)
        told.heads[0].wait_for("recovered in .*")
        told.heads[0].wait_for("step .* attempt 1$")

        hosts[1].cut()
        told.heads[0].wait_for("attempt 1, rank [23].*")
        hosts[1].give_back()
        told.heads[0].wait_for("step .* attempt 2$")

        told.heads[0].wait_between_saves(10)
        pods.now[0].kill()
        told.others["2 again"].wait_for("the head is gone")
        told.heads.append(pods.start(0, *flags))
        told.heads[1].wait_for(r"step +\d+/")
        for pod in pods.now.values():
            pod.signal(signal.SIGTERM)
        told.codes = {rank: pod.wait() for rank, pod in pods.now.items()}
        yield told
    finally:
        pods.end()


def losses(board: Path) -> list[float]:
    """The loss of each step from 1 on; of one that was trained again, the later."""
    last = {step["step"]: step for step in records(board, "step")}
    assert sorted(last) == list(range(1, len(last) + 1))
    assert [last[step]["samples"] for step in sorted(last)] == [BATCH * step for step in sorted(last)]
    return [last[step]["loss"] for step in sorted(last)]


def test_the_loss_is_that_of_one_machine_with_as_many_devices(story: Story, reference: list[float]) -> None:
    assert_alike(losses(story.board), reference, tolerance=1e-4)
