from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from planning import EIGHT_H100, GIB, TINY, cpu, planned, refused

from raytrain_llama3.config import rules
from raytrain_llama3.config.load import load
from raytrain_llama3.config.plan import DeviceSupply, RunPlan
from raytrain_llama3.errors import ConfigError


def full_plan(argv: str, *per_node: int) -> RunPlan:
    """Micro-batches of two samples; of a global batch of 16 there are eight."""
    return planned([*TINY, *argv.split()], gpus(*per_node))


def gpus(*per_node: int) -> DeviceSupply:
    return DeviceSupply("cuda", per_node, "NVIDIA H100 80GB HBM3", 80 * GIB, 9.0)


def cannot(plan: RunPlan, sizes: Sequence[int]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        rules.resize(plan, sizes)
    return caught.value.problems


VIRTUAL = "--pp-size 2 --vpp-size 2 --global-batch-size 24"

SHRUNK = [
    # options, nodes of the full plan, what is left of them; then ranks on each node, and micro-batches on each rank
    ("", (4, 4), [4], (4,), 2),
    ("", (4, 4), [2, 2], (2, 2), 2),
    ("", (4, 4), [2], (2,), 4),
    ("", (4, 4), [1], (1,), 8),
    ("", (2, 2, 2, 2), [2, 2], (2, 2), 2),
    # 3 to 7 data-parallel ranks but 4 do not share eight micro-batches evenly: the rest are left over.
    ("", (4, 4), [4, 3], (4,), 2),
    ("", (4, 4), [3, 3], (3, 1), 2),
    ("", (4, 4), [3], (2,), 4),
    ("", (2, 2, 2, 2), [2, 2, 2], (2, 2), 2),
    ("--global-batch-size 24", (6, 6), [6, 5], (6,), 2),
    ("--global-batch-size 24", (6, 6), [4, 4], (4, 2), 2),
    ("--global-batch-size 24", (6, 6), [5], (4,), 3),
    # Tensor-parallel groups, pipelines and context-parallel groups stay whole.
    ("--tp-size 2", (4, 4), [4], (4,), 4),
    ("--tp-size 2", (4, 4), [3], (2,), 8),
    ("--tp-size 2", (4, 4), [4, 3], (4,), 4),
    ("--tp-size 2", (4, 4), [3, 2], (3, 1), 4),
    ("--tp-size 2 --pp-size 2", (4, 4), [4], (4,), 8),
    ("--tp-size 2 --pp-size 2", (4, 4), [4, 3], (4,), 8),
    ("--tp-size 2 --pp-size 2", (4, 4), [3, 3], (3, 1), 8),
    ("--cp-size 4", (8,), [7], (4,), 8),
    # The interleaved schedule wants as many micro-batches as stages, or a multiple: four ranks would have three.
    (VIRTUAL, (6, 6), [6, 3], (6,), 4),
    (VIRTUAL.replace("--vpp-size 2", ""), (6, 6), [6, 3], (6, 2), 3),
    (VIRTUAL, (6, 6), [6, 2], (6,), 4),
    (VIRTUAL, (6, 6), [5], (4,), 6),
    # As many as before, or devices for more: the plan's own number is the most.
    ("", (4, 4), [4, 4], (4, 4), 1),
    ("", (4, 4), [8], (8,), 1),
    ("", (4,), [8, 8], (4,), 2),
    ("", (4, 2, 2), [4, 4, 4], (4, 4), 1),
    # A node that has nothing to give has no rank.
    ("", (4, 4), [4, 0], (4,), 2),
    ("", (4, 4), [0, 4], (4,), 2),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "per_node", "sizes", "ranks", "micro_batches"), SHRUNK)
def test_fewer_devices_share_the_same_global_batch(
    argv: str, per_node: tuple[int, ...], sizes: list[int], ranks: tuple[int, ...], micro_batches: int
) -> None:
    plan = full_plan(argv, *per_node)
    smaller = rules.resize(plan, sizes)
    assert smaller.ranks_per_node == ranks
    layout = smaller.layout
    assert layout.num_micro_batches == micro_batches
    assert layout.num_micro_batches * layout.micro_batch_size * layout.dp == plan.layout.global_batch_size
    assert layout.world_size == layout.tp * layout.cp * layout.pp * layout.dp == sum(ranks)
    # What is not the number of ranks stays as it was.
    same = replace(plan.layout, world_size=layout.world_size, dp=layout.dp)
    assert smaller == replace(plan, layout=same, ranks_per_node=ranks)


@pytest.mark.parametrize(
    "argv", ["", "--tp-size 2", "--pp-size 2", "--pp-size 2 --vpp-size 2", "--tp-size 2 --pp-size 2"]
)
@pytest.mark.parametrize("batch", [8, 24, 48])
def test_it_is_the_largest_that_a_run_of_its_own_would_be_allowed(argv: str, batch: int) -> None:
    argv = f"{argv} --global-batch-size {batch}"
    plan = full_plan(f"{argv} --micro-batch-size 1", 8)
    for there in range(plan.layout.tp * plan.layout.pp, 9):
        allowed = [count for count in range(1, there + 1) if is_allowed(f"{argv} --micro-batch-size 1", count)]
        assert rules.resize(plan, [there]).layout.world_size == max(allowed), there


def is_allowed(argv: str, ranks: int) -> bool:
    try:
        full_plan(argv, ranks)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize(
    ("argv", "sizes", "line"),
    [
        (
            "--tp-size 4",
            [3],
            "tp_size 4 × cp_size 1 × pp_size 1 = 4 ranks are more than the 3 there are (1 node, 3 devices): lower a "
            "size, or use 4 devices",
        ),
        (
            "--tp-size 2 --pp-size 4",
            [4, 3],
            "tp_size 2 × cp_size 1 × pp_size 4 = 8 ranks are more than the 7 there are (2 nodes, 4+3 devices): lower a "
            "size, or use 8 devices",
        ),
        (
            "",
            [],
            "tp_size 1 × cp_size 1 × pp_size 1 = 1 ranks are more than the 0 there are (0 nodes, 0 devices): lower a "
            "size, or use 1 devices",
        ),
        (
            "",
            [0, 0],
            "tp_size 1 × cp_size 1 × pp_size 1 = 1 ranks are more than the 0 there are (2 nodes, 0+0 devices): lower a "
            "size, or use 1 devices",
        ),
    ],
)
def test_too_few_for_one_copy_of_the_model_are_refused_with_the_arithmetic(
    argv: str, sizes: list[int], line: str
) -> None:
    assert cannot(full_plan(argv, 4, 4), sizes) == (line,)


def test_what_fewer_ranks_have_no_memory_for_is_refused() -> None:
    plan = planned(["--num-nodes", "4", "--recompute-modules", "mlp"], replace(EIGHT_H100, per_node=(8, 8, 8, 8)))
    assert rules.resize(plan, [8, 8]).layout.dp == 16
    (line,) = cannot(plan, [2])
    assert line.startswith("a model of 8.03 billion parameters needs about ")
    # 10 bytes a parameter, over two ranks: a run keeps the moments that it began with.
    assert plan.moments_dtype == "fp32"
    assert "optimizer 37.4" in line
    assert "NVIDIA H100 80GB HBM3 has 80 GiB: nearest that fits: --" in line


def test_memory_that_nobody_knows_refuses_nothing() -> None:
    plan = planned([], replace(EIGHT_H100, per_node=(8, 8), memory_bytes=None))
    assert rules.resize(plan, [2]).layout.dp == 2


@pytest.mark.parametrize(
    ("argv", "per_node", "ranks"),
    [
        ("", (4, 4, 4, 4), (4, 4, 4, 4)),
        ("--spare-nodes 2", (4, 4, 4, 4), (4, 4)),
        # Those in use are the largest.
        ("--spare-nodes 1", (2, 4, 4), (4, 4)),
        ("--spare-nodes 1", (4, 2, 4), (4, 4)),
        ("--spare-nodes 1 --gpus-per-node 2", (4, 4), (2,)),
        # num_nodes says how many are used, whatever is spare beside them.
        ("--spare-nodes 1 --num-nodes 2", (4, 4, 4), (4, 4)),
        ("--spare-nodes 1 --num-nodes 2", (4, 4, 4, 4), (4, 4)),
        ("--spare-nodes 3 --num-nodes 2", (4, 4), (4, 4)),
        # The fewest to go on with change nothing at the start.
        ("--elastic-min-nodes 1", (4, 4), (4, 4)),
        ("--elastic-min-nodes 2", (4, 4), (4, 4)),
        ("--elastic-min-nodes 2 --spare-nodes 1", (4, 4, 4), (4, 4)),
    ],
)
def test_spare_nodes_are_not_trained_on(argv: str, per_node: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    assert full_plan(f"{argv} --global-batch-size 32", *per_node).ranks_per_node == ranks


@pytest.mark.parametrize(
    ("argv", "per_node", "line"),
    [
        (
            "--spare-nodes 2",
            (4, 4),
            "spare_nodes 2 leaves none of 2 nodes to train on: at most 1 can be spare; lower it, or add nodes",
        ),
        (
            "--spare-nodes 9",
            (4, 4),
            "spare_nodes 9 leaves none of 2 nodes to train on: at most 1 can be spare; lower it, or add nodes",
        ),
        (
            "--elastic-min-nodes 3",
            (4, 4),
            "elastic_min_nodes 3 is more than the 2 nodes to train on at first: set 2 or less, or use more nodes",
        ),
        (
            "--elastic-min-nodes 2 --spare-nodes 1",
            (4, 4),
            "elastic_min_nodes 2 is more than the 1 node to train on at first: set 1 or less, or use more nodes",
        ),
        (
            "--elastic-min-nodes 2 --num-nodes 1",
            (4, 4),
            "elastic_min_nodes 2 is more than the 1 node to train on at first: set 1 or less, or use more nodes",
        ),
    ],
)
def test_more_nodes_in_reserve_than_there_are_is_refused(argv: str, per_node: tuple[int, ...], line: str) -> None:
    assert refused([*TINY, *argv.split()], gpus(*per_node)) == (line,)


def test_a_machine_of_ones_own_has_no_spare_node() -> None:
    (line,) = refused([*TINY, "--spare-nodes", "1"], cpu(2))
    assert line == "spare_nodes 1 leaves none of 1 node to train on: at most 0 can be spare; lower it, or add nodes"


def test_nodes_that_are_spare_are_not_warned_about() -> None:
    config = load([*TINY, "--spare-nodes", "1", "--gpus-per-node", "4"], {}).config
    assert rules.adjustments(config, gpus(2, 4, 4)) == []
