"""Tiny runs for the tests in this folder: a plan from flags, and real workers in real Ray actors to run it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from raytrain_llama3.config.load import load
from raytrain_llama3.config.plan import DeviceSupply, RunPlan
from raytrain_llama3.config.rules import plan_run
from raytrain_llama3.data.feed import Link
from raytrain_llama3.launch.process import CONTROL, actor_class
from raytrain_llama3.messages import (
    RankResult,
    RankSpec,
    Rendezvous,
    ResumePoint,
    SaveRecord,
    StepRecord,
    WorkerReport,
)
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
    "--standby-processes",
    "0",
]

_attempts = itertools.count()


def plan(folder: Path, *flags: str, world: int = 1) -> RunPlan:
    """The plan of a tiny Llama3 on `world` CPU devices, with its folders under `folder`."""
    places = ["--checkpoint-path", str(folder / "checkpoints"), "--tensorboard-logs-path", str(folder / "tensorboard")]
    places += ["--logs-path", str(folder / "logs")]
    argv = [*TINY, "--gpus-per-node", str(world), *places, *flags]
    return plan_run(load(argv, {}), DeviceSupply("cpu", (world,)))


class Workers:
    """`count` prepared processes that run one plan after another, as a gang's processes outlive attempts."""

    def __init__(self, count: int, logs: Path, worker_class: type[TrainWorker] = TrainWorker) -> None:
        # A test module's own class is not there to import in a worker.
        if worker_class is not TrainWorker:
            ray.cloudpickle.register_pickle_by_value(sys.modules[worker_class.__module__])
        self.actors = [actor_class(worker_class).options(num_cpus=0).remote() for _ in range(count)]
        self.logs = [logs / f"rank_{i}.log" for i in range(count)]
        # As `config.env.for_workers` has it on a CPU: the compiler is a fifth of what a rank imports.
        environment = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
        ray.get([a.prepare.remote(environment, (), str(log)) for a, log in zip(self.actors, self.logs, strict=True)])

    def run(
        self,
        run_plan: RunPlan,
        resume: ResumePoint | None = None,
        attempt: int = 0,
        links: Mapping[int, Link] | None = None,
    ) -> tuple[list[RankResult], Records]:
        """Train to the end; results in rank order, and what rank 0 reported."""
        results = ray.get(self.start(run_plan, resume, attempt, links))
        report = self.poll(0)
        return results, Records(list(report.steps), list(report.saves), report.evals, report.warnings)

    def start(
        self,
        run_plan: RunPlan,
        resume: ResumePoint | None = None,
        attempt: int = 0,
        links: Mapping[int, Link] | None = None,
    ) -> list[Any]:
        """Begin to train; what each rank's `run` will give, in rank order. Without `links` ranks read by themselves."""
        world, number = run_plan.layout.world_size, next(_attempts)
        actors = self.actors[:world]
        rendezvous = Rendezvous("127.0.0.1", ray.get(actors[0].open_store.remote("127.0.0.1", 0)), f"attempt-{number}")
        return [
            a.run.remote(run_plan, spec(i, world, attempt), rendezvous, resume, (links or {}).get(i))
            for i, a in enumerate(actors)
        ]

    def poll(self, rank: int) -> WorkerReport:
        return ray.get(self.actors[rank].poll.options(concurrency_group=CONTROL).remote())

    def close(self) -> None:
        for actor in self.actors:
            ray.kill(actor)


class Records:
    def __init__(
        self, steps: list[StepRecord], saves: list[SaveRecord], evals: Sequence[Any], warnings: Sequence[str]
    ) -> None:
        self.steps, self.saves, self.evals, self.warnings = steps, saves, evals, warnings

    @property
    def losses(self) -> list[float]:
        return [record.loss for record in self.steps]


def spec(rank: int, world: int, attempt: int = 0) -> RankSpec:
    return RankSpec(rank, world, 0, rank, world, rank, "node", "127.0.0.1", attempt)
