"""Checkpoints in other nodes' memory: a fault goes on from there where the disk's is older."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from curves import assert_alike, assert_trained_again_alike, curve
from nodes import TWO_NODES, Nodes, undisturbed
from sandbox import Sandbox, events

ENDLESS = (*TWO_NODES, "--train-iters", "100000", "--save-interval", "40", "--memory-checkpoint-interval", "3")
REFERENCE_STEPS = 60


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    nodes.have(2)
    yield nodes
    nodes.close()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return undisturbed(tmp_path_factory.mktemp("reference"), REFERENCE_STEPS)


def test_a_lost_rank_and_a_lost_node_cost_no_more_than_the_interval(
    sandbox: Sandbox, nodes: Nodes, reference: list[float]
) -> None:
    board = sandbox.work / "tensorboard_logs" / "demo"
    plan = "0:1:11:kill,1:2:17:kill_node,2:0:44:exception"
    flags = ("--rehearse-faults", plan, "--node-rejoin-timeout-s", "60")
    command = sandbox.start(*ENDLESS, *flags, RAY_ADDRESS=nodes.address, RAY_AUTH_MODE="disabled")
    command.wait_for(r"resuming from memory \(step 9, 144 samples\)")
    command.wait_for(r"node \S+ is gone")
    nodes.add()
    command.wait_for(r"step .* attempt 3$")
    command.signal(signal.SIGTERM)
    assert command.wait() == 143, command.output
    resumed = [attempt["resume_step"] for attempt in events(board, "attempt")]
    assert resumed[0] == 0
    assert resumed[1] == 9
    # Of the node that was lost the other one had every part. Ranks may train on for a while without their raylet.
    assert resumed[2] % 3 == 0
    assert 12 <= resumed[2] < 40
    assert f"resuming from memory (step {resumed[2]}, " in command.output
    # 40 is on the disk; 42 in memory, or on its way there.
    assert resumed[3] in (40, 42)
    assert_trained_again_alike(board)
    assert_alike(curve(board), reference)
    assert sandbox.leftovers() == []
    assert nodes.ranks() == []
