"""`Elastic` with a real `Crew` that holds nothing; only what Ray says of the nodes is made up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import pytest
from planning import EIGHT_H100, GIB, TINY, planned

from raytrain_llama3.config.plan import DeviceSupply, RunPlan
from raytrain_llama3.errors import ClusterFormationError
from raytrain_llama3.launch.crew import Crew
from raytrain_llama3.launch.elastic import Elastic
from raytrain_llama3.launch.session import Node, Session


class Nodes:
    """The living nodes of a session: free GPUs by id."""

    def __init__(self, free: Mapping[str, float]) -> None:
        self.free = dict(free)

    def nodes(self) -> list[Node]:
        return [
            Node(name, f"10.0.0.{i}", {"GPU": 8.0}, {"GPU": free} if free else {})
            for i, (name, free) in enumerate(self.free.items())
        ]


def gpus(*per_node: int) -> DeviceSupply:
    return DeviceSupply("cuda", per_node, "NVIDIA H100 80GB HBM3", 80 * GIB, 9.0)


def elastic(plan: RunPlan, **free: float) -> tuple[Elastic, Crew, Nodes]:
    nodes = Nodes(free)
    crew = Crew(object, plan, cast(Session, nodes), "run")
    return Elastic(plan, crew), crew, nodes


def plan_of(*per_node: int, argv: str = "") -> RunPlan:
    return planned([*TINY, *argv.split()], gpus(*per_node))


FOUR_NODES = plan_of(2, 2, 2, 2)
"""Eight ranks that share eight micro-batches."""


def test_a_run_begins_with_all_of_its_plan() -> None:
    found, _, _ = elastic(FOUR_NODES, a=2, b=2, c=2, d=2)
    assert found.plan is found.full is FOUR_NODES
    assert not found.is_shrunk
    assert found.larger() is None
    assert found.usable == 4


@pytest.mark.parametrize(
    ("per_node", "free", "barred", "lost", "usable", "sizes"),
    [
        ((2, 2), {"a": 2, "b": 2, "c": 2}, "", "", 3, [2, 2]),
        ((2, 2), {"a": 2, "b": 1, "c": 0}, "", "", 1, [2, 1]),
        # More than a share is no use to it.
        ((2, 2), {"a": 2, "b": 8}, "", "", 2, [2, 2]),
        # The smallest share is enough to serve; the largest comes first.
        ((4, 2), {"a": 2, "b": 4, "c": 1}, "", "", 2, [4, 2]),
        # Nodes left out, and nodes that are gone whatever Ray says.
        ((2, 2), {"a": 2, "b": 2, "c": 2}, "a", "", 2, [2, 2]),
        ((2, 2), {"a": 2, "b": 2, "c": 2}, "a", "b", 1, [2]),
        ((2, 2), {"a": 2, "b": 2}, "", "ab", 0, []),
        ((2, 2), {}, "", "", 0, []),
    ],
)
def test_which_nodes_could_serve(
    per_node: tuple[int, ...], free: dict[str, float], barred: str, lost: str, usable: int, sizes: list[int]
) -> None:
    found, crew, _ = elastic(plan_of(*per_node, argv="--global-batch-size 48"), **free)
    found.barred |= set(barred)
    crew.lost |= set(lost)
    assert found.usable == usable
    assert crew.sizes(2, found.barred) == sizes


@pytest.mark.parametrize(
    ("free", "barred", "nodes", "ranks"),
    [
        ({"a": 2, "b": 2, "c": 2}, "", 3, (2, 2)),
        ({"a": 2, "b": 2}, "", 2, (2, 2)),
        ({"a": 2}, "", 1, (2,)),
        ({"a": 1, "b": 2, "c": 1}, "", 3, (2, 1, 1)),
        # No more than so many nodes, whatever else is there.
        ({"a": 2, "b": 2, "c": 2}, "", 1, (2,)),
        # One that is left out does not count, nor does what a node has beyond its share.
        ({"a": 2, "b": 1, "c": 1}, "a", 2, (1, 1)),
        ({"a": 8, "b": 8}, "", 2, (2, 2)),
    ],
)
def test_a_run_shrinks_to_the_nodes_there_are(
    free: dict[str, float], barred: str, nodes: int, ranks: tuple[int, ...]
) -> None:
    found, _, _ = elastic(FOUR_NODES, **free)
    found.barred |= set(barred)
    found.shrink(nodes)
    assert found.is_shrunk
    assert found.plan.ranks_per_node == ranks
    assert found.plan.layout.dp == sum(ranks)
    assert found.plan.layout.global_batch_size == FOUR_NODES.layout.global_batch_size
    assert found.full is FOUR_NODES
    found.restore()
    assert found.plan is FOUR_NODES
    assert not found.is_shrunk


@pytest.mark.parametrize(
    ("plan", "free", "said"),
    [
        (
            plan_of(4, 4, argv="--tp-size 4"),
            {"a": 3.0},
            "cannot go on with 3 devices: tp_size 4 × cp_size 1 × pp_size 1 = 4 ranks are more than the 3 there are "
            "(1 node, 3 devices): lower a size, or use 4 devices",
        ),
        (
            plan_of(4, 4, argv="--tp-size 8 --num-query-groups 8"),
            {"a": 4.0, "b": 3.0},
            "cannot go on with 4+3 devices: ",
        ),
        # Between counting the nodes and asking for their sizes, all may have gone.
        (plan_of(4, 4), {}, "cannot go on with no devices: tp_size 1 × cp_size 1 × pp_size 1 = 1 ranks are more than"),
        (planned([], EIGHT_H100), {"a": 2.0}, "cannot go on with 2 devices: a model of 8.03 billion parameters needs"),
    ],
)
def test_where_no_layout_fits_the_run_cannot_go_on(plan: RunPlan, free: dict[str, float], said: str) -> None:
    found, _, _ = elastic(plan, **free)
    with pytest.raises(ClusterFormationError) as caught:
        found.shrink(2)
    assert str(caught.value).startswith(said)
    assert found.plan is plan


SHRUNK_TO_ONE, SHRUNK_TO_TWO = {"a": 2.0}, {"a": 2.0, "b": 2.0}


@pytest.mark.parametrize(
    ("shrunk_to", "now", "barred", "ranks"),
    [
        # nothing came
        (SHRUNK_TO_TWO, SHRUNK_TO_TWO, "", None),
        (SHRUNK_TO_TWO, {"a": 2}, "", None),
        (SHRUNK_TO_TWO, {}, "", None),
        (SHRUNK_TO_TWO, {"a": 0, "b": 0}, "", None),
        # some came, but six ranks do not share eight micro-batches evenly
        (SHRUNK_TO_TWO, {"a": 2, "b": 2, "c": 2}, "", None),
        (SHRUNK_TO_TWO, {"a": 2, "b": 2, "c": 2, "d": 1}, "", None),
        # some came, and more ranks do
        (SHRUNK_TO_ONE, {"a": 2, "b": 2}, "", (2, 2)),
        (SHRUNK_TO_ONE, {"a": 2, "b": 2, "c": 2}, "", (2, 2)),
        (SHRUNK_TO_ONE, {"a": 2, "b": 1, "c": 1}, "", (2, 1, 1)),
        # all are back, or others in their place
        (SHRUNK_TO_ONE, {"a": 2, "b": 2, "c": 2, "d": 2}, "", (2, 2, 2, 2)),
        (SHRUNK_TO_TWO, {"a": 2, "b": 2, "x": 8, "y": 2}, "", (2, 2, 2, 2)),
        (SHRUNK_TO_TWO, {"a": 2, "b": 2, "c": 2, "d": 2, "e": 2}, "", (2, 2, 2, 2)),
        # what is left out does not help
        (SHRUNK_TO_TWO, {"a": 2, "b": 2, "c": 2, "d": 2}, "d", None),
        (SHRUNK_TO_TWO, {"a": 2, "b": 2, "c": 2, "d": 2, "e": 2}, "d", (2, 2, 2, 2)),
    ],
)
def test_a_shrunk_run_grows_when_more_ranks_can_share_its_batch(
    shrunk_to: dict[str, float], now: dict[str, float], barred: str, ranks: tuple[int, ...] | None
) -> None:
    found, _, nodes = elastic(FOUR_NODES, **shrunk_to)
    found.shrink(len(shrunk_to))
    nodes.free, found.barred = dict(now), set(barred)
    larger = found.larger()
    assert (larger.ranks_per_node if larger else None) == ranks
    if ranks == FOUR_NODES.ranks_per_node:
        assert larger is FOUR_NODES


def test_a_run_that_has_grown_to_its_full_plan_grows_no_more() -> None:
    found, _, nodes = elastic(FOUR_NODES, a=2)
    found.shrink(1)
    nodes.free = {"a": 2, "b": 2}
    found.plan = found.larger() or pytest.fail("did not grow")
    assert found.is_shrunk
    nodes.free = {"a": 2, "b": 2, "c": 2, "d": 2}
    found.plan = found.larger() or pytest.fail("did not grow")
    assert not found.is_shrunk
    nodes.free["e"] = 8
    assert found.larger() is None


def test_a_larger_node_in_a_lost_ones_place_makes_no_more_ranks_than_planned() -> None:
    unequal = plan_of(4, 2, 2)
    found, _, nodes = elastic(unequal, a=4)
    found.shrink(1)
    nodes.free = {"a": 4, "x": 4, "y": 4}
    assert found.larger() is unequal
