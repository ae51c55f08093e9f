"""What one layout saves, every other loads: the same numbers, bit for bit, and the same losses after."""

from __future__ import annotations

import itertools
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from checkpoints import assert_same_numbers
from training import Workers, plan, spec

from raytrain_llama3.checkpoint.distcp import read_metadata
from raytrain_llama3.checkpoint.store import CheckpointStore
from raytrain_llama3.config.plan import RunPlan
from raytrain_llama3.data.feed import RankFeed, local_link
from raytrain_llama3.messages import ProcessFacts, RankSpec, Rendezvous, ResumePoint, SaveRecord
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
            feed = RankFeed(local_link(run_plan), run_plan.layout, process.dp_rank)
            loop = TrainingLoop(run_plan, process, None, self._reporter, self._stop, {}, feed)
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
        state = torch_dist.OwnState(rank, loop._chunks, loop._optimizer)
        loop.saves.begin(path, SAVED_AT, 0, state.files(progress), {})
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
    # Smaller than other tests' model: there are a hundred loads.
    small = ("--num-layers", "2", "--micro-batch-size", "1", "--global-batch-size", "4")
    flags = ("--dtype", "fp32", "--train-iters", str(steps), *small, *own, *flags)
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


def test_megatrons_own_loader_reads_what_we_write(saved: dict[str, ResumePoint], tmp_path: Path) -> None:
    """In this process: Megatron-core's `fully_reshardable` state and its `load`, and then ours, of one checkpoint."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.utils import unwrap_model

    from raytrain_llama3.checkpoint import torch_dist
    from raytrain_llama3.checkpoint.pieces import describe, model_pieces, optimizer_pieces
    from raytrain_llama3.checkpoint.reading import FolderSource
    from raytrain_llama3.train.model import build_model
    from raytrain_llama3.train.optimizer import build_optimizer
    from raytrain_llama3.train.process import host_store, open_process

    def held(chunks: Any, optimizer: Any) -> dict[Any, torch.Tensor]:
        model = describe(chunks)
        pieces = [*model_pieces(model), *optimizer_pieces(model, optimizer)]
        return {(piece.box.key, piece.box.offsets): piece.read().clone() for piece in pieces}

    run_plan, path = planned(tmp_path, "dp1", SAVED_AT), saved["tp2-dp2-sp"].path
    store, facts = host_store("127.0.0.1", 0, 1), ProcessFacts(0, "here", {}, 0.0, 0.0)
    rendezvous = Rendezvous("127.0.0.1", store.port, "megatron")
    with open_process(run_plan, spec(0, 1), rendezvous, facts, store) as process:
        chunks = build_model(run_plan, process)
        optimizer = build_optimizer(run_plan, chunks)
        torch_dist.load(FolderSource(Path(path)), chunks, optimizer)
        ours = held(chunks, optimizer)
        chunks = build_model(run_plan, process)
        optimizer = build_optimizer(run_plan, chunks)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        form = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
        form |= {"singleton_local_shards": False, "dp_cp_group": group}
        module = unwrap_model(chunks[0])
        model = module.sharded_state_dict(metadata=form)
        state = {"model": model, "optimizer": optimizer.sharded_state_dict(model, is_loading=True, metadata=form)}
        loaded = dist_checkpointing.load(state, path)
        module.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        theirs = held(chunks, optimizer)
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []
    assert {group["step"] for group in optimizer.param_groups} == {SAVED_AT}
    assert loaded["progress"]["step"] == SAVED_AT


def test_extra_state_may_differ_and_nothing_else(saved: dict[str, ResumePoint], tmp_path: Path) -> None:
    """As between bf16 and fp8: keys of extra state that are not there are no matter; a weight that is not there is."""
    from raytrain_llama3.checkpoint import torch_dist
    from raytrain_llama3.checkpoint.reading import FolderSource
    from raytrain_llama3.errors import CheckpointError
    from raytrain_llama3.train.model import build_model
    from raytrain_llama3.train.optimizer import build_optimizer
    from raytrain_llama3.train.process import host_store, open_process

    run_plan = planned(tmp_path, "dp1", SAVED_AT)
    store, facts = host_store("127.0.0.1", 0, 1), ProcessFacts(0, "here", {}, 0.0, 0.0)
    rendezvous = Rendezvous("127.0.0.1", store.port, "extra")
    with open_process(run_plan, spec(0, 1), rendezvous, facts, store) as process:
        chunks = build_model(run_plan, process)
        optimizer = build_optimizer(run_plan, chunks)
        source = Path(saved["dp1"].path)
        torch_dist.load(FolderSource(without(source, tmp_path / "a", "_extra_state")), chunks, optimizer)
        lacking = without(source, tmp_path / "b", "output_layer.weight")
        with pytest.raises(CheckpointError, match=r"b: does not load .*output_layer.weight is not in the checkpoint"):
            torch_dist.load(FolderSource(lacking), chunks, optimizer)


def without(source: Path, copy: Path, word: str) -> Path:
    """A copy of a checkpoint whose index lacks the keys that contain `word`."""
    shutil.copytree(source, copy)
    metadata = read_metadata(copy)
    metadata.state_dict_metadata = {k: v for k, v in metadata.state_dict_metadata.items() if word not in k}
    metadata.storage_data = {k: v for k, v in metadata.storage_data.items() if word not in k.fqn}
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    return copy
