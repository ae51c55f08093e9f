"""Tiny runs for the tests in this folder: a plan from flags, and real workers in real Ray actors to run it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from raytrain_llama3.config.load import load
from raytrain_llama3.config.plan import DeviceSupply, RunPlan
from raytrain_llama3.config.rules import plan_run
from raytrain_llama3.launch.gang import CONTROL, actor_class
from raytrain_llama3.messages import RankResult, RankSpec, Rendezvous, ResumePoint, SaveRecord, StepRecord
from raytrain_llama3.train.worker import TrainWorker

TINY = [
    "--device",
    "cpu",
    "--num-layers",
    "4",
    "--hidden-size",
    "64",
    "--ffn-hidden-size",
    "176",
    "--num-attention-heads",
    "4",
    "--num-query-groups",
    "2",
    "--kv-channels",
    "16",
    "--seq-length",
    "32",
    "--vocab-size",
    "256",
    "--micro-batch-size",
    "2",
    "--global-batch-size",
    "8",
    "--learning-rate",
    "1e-3",
    "--min-learning-rate",
    "1e-4",
    "--lr-warmup-samples",
    "16",
    "--lr-decay-samples",
    "800",
    "--eval-interval",
    "0",
    "--save-interval",
    "0",
]

_attempts = itertools.count()


def plan(folder: Path, *flags: str, world: int = 1) -> RunPlan:
    """The plan of a tiny Llama3 on `world` CPU devices, with its folders under `folder`."""
    places = ["--checkpoint-path", str(folder / "checkpoints"), "--tensorboard-logs-path", str(folder / "tensorboard")]
    argv = [*TINY, "--gpus-per-node", str(world), *places, *flags]
    return plan_run(load(argv, {}), DeviceSupply("cpu", (world,)))


class Workers:
    """`count` prepared processes that run one plan after another, as a gang's processes outlive attempts."""

    def __init__(self, count: int, logs: Path) -> None:
        self._actors = [actor_class(TrainWorker).options(num_cpus=0).remote() for _ in range(count)]
        environment = {"OMP_NUM_THREADS": "1"}
        ray.get([a.prepare.remote(environment, (), str(logs / f"rank_{i}.log")) for i, a in enumerate(self._actors)])

    def run(self, run_plan: RunPlan, resume: ResumePoint | None = None) -> tuple[list[RankResult], Records]:
        """Train to the end; results in rank order, and what rank 0 reported."""
        world, attempt = run_plan.layout.world_size, next(_attempts)
        actors = self._actors[:world]
        rendezvous = Rendezvous("127.0.0.1", ray.get(actors[0].open_store.remote("127.0.0.1", 0)), f"attempt-{attempt}")
        results = ray.get([a.run.remote(run_plan, spec(i, world), rendezvous, resume) for i, a in enumerate(actors)])
        report = ray.get(actors[0].poll.options(concurrency_group=CONTROL).remote())
        return results, Records(list(report.steps), list(report.saves), report.evals, report.warnings)


class Records:
    def __init__(
        self, steps: list[StepRecord], saves: list[SaveRecord], evals: Sequence[Any], warnings: Sequence[str]
    ) -> None:
        self.steps, self.saves, self.evals, self.warnings = steps, saves, evals, warnings

    @property
    def losses(self) -> list[float]:
        return [record.loss for record in self.steps]


def spec(rank: int, world: int) -> RankSpec:
    return RankSpec(rank, world, 0, rank, world, rank, "node", "127.0.0.1", 0)
