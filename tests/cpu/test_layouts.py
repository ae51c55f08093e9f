"""The layout is a matter of speed: it changes no loss."""

from __future__ import annotations

from pathlib import Path

import pytest
from training import Workers, plan

LAYOUTS = {
    "dp2": ("--micro-batch-size", "2"),
    "tp2": ("--tp-size", "2", "--sequence-parallel", "0"),
    "tp2-sequence-parallel": ("--tp-size", "2", "--sequence-parallel", "1"),
    "pp2": ("--pp-size", "2"),
    "pp2-virtual": ("--pp-size", "2", "--vpp-size", "2"),
}
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}


@pytest.fixture(scope="module")
def one_rank(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    folder = tmp_path_factory.mktemp("one")
    return {
        dtype: workers.run(plan(folder / dtype, "--dtype", dtype, "--train-iters", "10"))[1].losses
        for dtype in TOLERANCE
    }


@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_losses_equal_those_of_one_rank(
    workers: Workers, one_rank: dict[str, list[float]], tmp_path: Path, layout: str, dtype: str
) -> None:
    flags = ("--dtype", dtype, "--train-iters", "10", *LAYOUTS[layout])
    losses = workers.run(plan(tmp_path, *flags, world=2))[1].losses
    assert len(losses) == 10
    assert losses == pytest.approx(one_rank[dtype], abs=TOLERANCE[dtype])
    assert losses[-1] != losses[0], "the model does not learn, so equal losses prove nothing"


def test_another_seed_gives_other_losses(workers: Workers, one_rank: dict[str, list[float]], tmp_path: Path) -> None:
    losses = workers.run(plan(tmp_path, "--dtype", "fp32", "--train-iters", "2", "--seed", "7"))[1].losses
    assert losses[0] != pytest.approx(one_rank["fp32"][0], abs=1e-4)
