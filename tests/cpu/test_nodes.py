"""Nodes that are lost, replaced and left out, on a Ray cluster of several nodes."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from curves import assert_alike, assert_trained_again_alike, curve
from nodes import TWO_NODES, Nodes, undisturbed
from sandbox import Command, Sandbox, events, records

LATEST_S = 20
"""A dead node is told of at the latest so long after its last step."""
ENDLESS = (*TWO_NODES, "--train-iters", "100000", "--max-checkpoints", "0")
REFERENCE_STEPS = 80


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    yield nodes
    nodes.close()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return undisturbed(tmp_path_factory.mktemp("reference"), REFERENCE_STEPS)


def board(sandbox: Sandbox) -> Path:
    return sandbox.work / "tensorboard_logs" / "demo"


def start(sandbox: Sandbox, nodes: Nodes, *flags: str) -> Command:
    return sandbox.start(*ENDLESS, *flags, RAY_ADDRESS=nodes.address, RAY_AUTH_MODE="disabled")


def stop(command: Command, sandbox: Sandbox, nodes: Nodes) -> None:
    """End the run as a platform does; nothing of it is left."""
    command.signal(signal.SIGTERM)
    assert command.wait() == 143, command.output
    command.wait_for("stopped after step .* saved at step")
    assert sandbox.leftovers() == []
    assert nodes.ranks() == []


def dp_sizes(sandbox: Sandbox) -> dict[int, int]:
    """How many data-parallel ranks wrote each checkpoint, by step."""
    sidecars = (sandbox.work / "checkpoints" / "demo").glob("iter_*/sidecar.json")
    return {int(path.parent.name[5:]): json.loads(path.read_text())["layout"]["dp"] for path in sidecars}


def assert_node_died(sandbox: Sandbox, fault: dict[str, object]) -> None:
    failure = fault["failure"]
    assert isinstance(failure, dict)
    assert failure["kind"] == "node died"
    last = max(s["time"] for s in records(board(sandbox), "step") if s["attempt"] == fault["attempt"])
    decided = fault["time"]
    assert isinstance(decided, float)
    assert failure["at"] + failure["detect_s"] - last < LATEST_S


def test_a_run_goes_on_with_fewer_nodes_and_grows_back(sandbox: Sandbox, nodes: Nodes, reference: list[float]) -> None:
    nodes.have(2)
    flags = ("--elastic-min-nodes", "1", "--node-rejoin-timeout-s", "3", "--save-interval", "5")
    # Evaluations give the new node time to start before the steps that are compared are over.
    flags += ("--eval-interval", "1", "--eval-iters", "20", "--standby-processes", "0")
    command = start(sandbox, nodes, *flags, "--rehearse-faults", "0:2:8:kill_node")
    command.wait_for(r"node \S+ is gone")
    command.wait_for("1 of 2 nodes are usable: waiting 3 s at most for another")
    command.wait_for("going on with 1 of 2 nodes")
    command.wait_for("starting 2 ranks")
    nodes.add()
    command.wait_for("recovered in .* 2 processes kept")
    command.wait_for("nodes are back: the ranks save, and go on as 4")
    command.wait_for("starting 4 ranks")
    command.wait_for("step .* attempt 2$")
    stop(command, sandbox, nodes)

    (fault,) = events(board(sandbox), "fault")
    assert_node_died(sandbox, fault)
    attempts = events(board(sandbox), "attempt")
    assert [attempt["resume_step"] for attempt in attempts[:2]] == [0, 5]
    grown_at = attempts[2]["resume_step"]
    assert 5 < grown_at < REFERENCE_STEPS
    sizes = dp_sizes(sandbox)
    assert {dp for step, dp in sizes.items() if step <= 5} == {4}
    assert {dp for step, dp in sizes.items() if 5 < step <= grown_at} == {2}
    assert {dp for step, dp in sizes.items() if step > grown_at} == {4}
    assert_trained_again_alike(board(sandbox), tolerance=1e-4)
    assert_alike(curve(board(sandbox)), reference, tolerance=1e-4)


def test_a_node_that_keeps_failing_is_left_out(sandbox: Sandbox, nodes: Nodes, reference: list[float]) -> None:
    nodes.have(3)
    flags = ("--node-strikes", "2", "--save-interval", "5")
    command = start(sandbox, nodes, *flags, "--rehearse-faults", "0:2:7:exception,1:3:13:exception")
    command.wait_for("has failed 2 times .node_strikes 2.: left out")
    command.wait_for("step .* attempt 2$")
    first, second = events(board(sandbox), "fault")
    bad = second["failure"]["node_id"]
    assert bad == first["failure"]["node_id"]
    assert "left out" not in first["decision"]
    used = {raylet_of(sandbox, 2, rank).pid for rank in range(4)}
    assert used == {nodes.raylet(node).pid for node in nodes.living if node.node_id != bad}
    stop(command, sandbox, nodes)
    assert_alike(curve(board(sandbox)), reference)


def test_a_spare_node_takes_a_lost_ones_place_with_processes_that_stand_by(
    sandbox: Sandbox, nodes: Nodes, reference: list[float]
) -> None:
    nodes.have(3)
    command = start(sandbox, nodes, "--spare-nodes", "1", "--save-interval", "20", "--node-rejoin-timeout-s", "60")
    command.wait_for("standby ready: 2 processes wait for a fault")
    command.wait_between_saves(20)
    raylet_of(sandbox, 0, 2).kill()
    command.wait_for("recovered in .* 2 processes kept, 2 from standby")
    stop(command, sandbox, nodes)
    (fault,), (recovery,) = events(board(sandbox), "fault"), events(board(sandbox), "recovery")
    assert_node_died(sandbox, fault)
    assert fault["decision"] == "preemption 1 of 20"
    assert recovery["processes"] == {"kept": 2, "standby": 2, "new": 0}
    assert recovery["phases"]["import"] == 0
    assert_trained_again_alike(board(sandbox))
    assert_alike(curve(board(sandbox)), reference)


def raylet_of(sandbox: Sandbox, attempt: int, rank: int) -> psutil.Process:
    raylet = sandbox.rank_process(attempt, rank).parent()
    assert raylet is not None
    assert raylet.name() == "raylet"
    return raylet
