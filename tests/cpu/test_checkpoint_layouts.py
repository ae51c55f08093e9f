"""What one layout saves, every other loads: the same numbers, bit for bit, and the same losses after."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from checkpoints import assert_same_numbers
from training import Workers, plan, spec

from raytrain_llama3.checkpoint.store import CheckpointStore
from raytrain_llama3.config.plan import RunPlan
from raytrain_llama3.messages import RankSpec, Rendezvous, ResumePoint, SaveRecord
from raytrain_llama3.train.worker import TrainWorker

LAYOUTS = {
    "dp1": (1,),
    "dp2": (2,),
    "dp4": (4,),
    "tp2": (2, "--tp-size", "2", "--sequence-parallel", "0"),
    "tp2-sp": (2, "--tp-size", "2", "--sequence-parallel", "1"),
    "pp2": (2, "--pp-size", "2"),
    "tp2-pp2": (4, "--tp-size", "2", "--pp-size", "2", "--sequence-parallel", "0"),
    "tp2-pp2-sp": (4, "--tp-size", "2", "--pp-size", "2", "--sequence-parallel", "1"),
    "tp2-dp2-sp": (4, "--tp-size", "2", "--sequence-parallel", "1"),
    "pp2-dp2": (4, "--pp-size", "2"),
    "pp2-vpp2": (2, "--pp-size", "2", "--vpp-size", "2"),
}
SAVED_AT, STEPS = 3, 5


class MatrixWorker(TrainWorker):
    """Opens its groups once for a layout, and there loads one checkpoint after another."""

    def matrix(
        self, run_plan: RunPlan, me: RankSpec, rendezvous: Rendezvous, sources: list[ResumePoint | None], again: str
    ) -> tuple[list[list[float]], list[SaveRecord]]:
        """Of each source: the losses from there on; and what was saved before the first of these steps."""
        from raytrain_llama3.train.loop import TrainingLoop
        from raytrain_llama3.train.process import open_process

        losses, saves = [], []
        self._reporter.begin(me.rank)
        with open_process(run_plan, me, rendezvous, self._facts, self._store) as process:
            loop = TrainingLoop(run_plan, process, self._reporter, self._stop, {})
            for number, source in enumerate(sources):
                if source is not None:
                    loop.load(source)
                    self._save(loop, me.rank, Path(again) / str(number))
                loop.run()
                report = self._reporter.poll()
                losses.append([step.loss for step in report.steps])
                saves += report.saves
            loop.saves.close()
            loop.untie()
        return losses, saves

    def _save(self, loop: Any, rank: int, path: Path) -> None:
        from raytrain_llama3.checkpoint import torch_dist

        progress = torch_dist.Progress(SAVED_AT, 0)
        loop.saves.begin(path, SAVED_AT, 0, torch_dist.files_of_rank(rank, progress, loop._chunks, loop._optimizer), {})
        loop.saves.settle()


@pytest.fixture(scope="module")
def four(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    workers = Workers(4, tmp_path_factory.mktemp("logs"), MatrixWorker)
    yield workers
    workers.close()


_runs = itertools.count()


def run(
    workers: Workers, run_plan: RunPlan, sources: list[ResumePoint | None], again: Path
) -> tuple[list[list[float]], list[SaveRecord]]:
    world = run_plan.layout.world_size
    actors = workers.actors[:world]
    port = ray.get(actors[0].open_store.remote("127.0.0.1", 0))
    rendezvous = Rendezvous("127.0.0.1", port, f"matrix-{next(_runs)}")
    refs = [a.matrix.remote(run_plan, spec(i, world), rendezvous, sources, str(again)) for i, a in enumerate(actors)]
    return ray.get(refs)[0]


def planned(folder: Path, layout: str, steps: int, *flags: str) -> RunPlan:
    world, *own = LAYOUTS[layout]
    flags = ("--dtype", "fp32", "--train-iters", str(steps), *own, *flags)
    return plan(folder, *flags, world=world)


@pytest.fixture(scope="module")
def saved(four: Workers, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ResumePoint]:
    """A checkpoint of each layout."""
    root, points = tmp_path_factory.mktemp("saved"), {}
    for number, layout in enumerate(LAYOUTS):
        # Both ways of saving: the files are the same.
        flags = ("--async-save", str(number % 2))
        run_plan = planned(root / layout, layout, SAVED_AT, *flags)
        _, saves = run(four, run_plan, [None], root)
        store = CheckpointStore(run_plan.paths.checkpoints, None)
        with store.lock():
            for save in saves:
                store.publish(save)
        points[layout] = store.at(SAVED_AT, verify=True)
    return points


@pytest.fixture(scope="module")
def undisturbed(four: Workers, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("whole")
    (losses,), _ = run(four, planned(folder, "dp1", SAVED_AT + STEPS, "--save-at-end", "0"), [None], folder)
    return losses


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_checkpoint_loads_here(
    four: Workers, saved: dict[str, ResumePoint], undisturbed: list[float], tmp_path: Path, layout: str
) -> None:
    run_plan = planned(tmp_path / "run", layout, SAVED_AT + STEPS, "--save-at-end", "0")
    losses, saves = run(four, run_plan, list(saved.values()), tmp_path)
    for number, name in enumerate(saved):
        assert losses[number] == pytest.approx(undisturbed[SAVED_AT:], abs=1e-4), f"{name} loaded at {layout}"
        assert Path(saves[number].path) == tmp_path / str(number)
        assert_same_numbers(Path(saved[name].path), tmp_path / str(number))
    assert len(undisturbed[SAVED_AT:]) == STEPS
    shutil.rmtree(tmp_path)


def test_megatrons_own_loader_reads_what_we_write(saved: dict[str, ResumePoint]) -> None:
    from megatron.core import dist_checkpointing

    folder = saved["tp2-dp2-sp"].path
    there = dist_checkpointing.load_tensors_metadata(folder)
    assert there["decoder.layers.mlp.linear_fc1.weight"].global_shape == (4, 352, 64)
    common = dist_checkpointing.load_common_state_dict(folder)
    assert common["optimizer"]["param_state_sharding_type"] == "fully_reshardable"
    assert {group["step"] for group in common["optimizer"]["optimizer"]["param_groups"]} == {SAVED_AT}
