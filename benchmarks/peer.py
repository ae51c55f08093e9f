"""The package's training code without the package's launcher: what the peers' ranks have in common.

A peer starts the processes and sees them fall; a rank's work is `TrainWorker`'s, as under our own command. Since there
is no driver, rank 0 does what ours would: it chooses the checkpoint to resume from, publishes those that are saved, and
writes JSON lines: `step`, `save`, and once `phases`, when the first step is done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import psutil

from raytrain_llama3.checkpoint.store import CheckpointStore
from raytrain_llama3.config import env, machine, rules
from raytrain_llama3.config.load import load
from raytrain_llama3.config.plan import RunPlan
from raytrain_llama3.errors import CheckpointError
from raytrain_llama3.messages import RankSpec, Rendezvous, ResumePoint
from raytrain_llama3.train.worker import TrainWorker

HOST = "127.0.0.1"
# As often as our driver asks its ranks.
_POLL_S = 0.5
_LOCK_RETRY_S = 0.1
_LOCK_PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Opening:
    """What rank 0 tells the others before they train."""

    port: int
    resume: ResumePoint | None

    def dump(self) -> str:
        """As text, for a peer's own store."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def parse(cls, text: str) -> Opening:
        """Back from `dump`."""
        value = json.loads(text)
        return cls(value["port"], ResumePoint(**value["resume"]) if value["resume"] else None)


def planned(flags: Sequence[str]) -> RunPlan:
    """The plan that our command makes of the same flags on this machine."""
    loaded = load(flags, env.without_pod(env.snapshot()))
    return rules.plan_run(loaded, machine.local_supply(loaded.config, loaded.environ), machine.cores())


def rank_of(plan: RunPlan, rank: int, local_rank: int, where: str) -> RankSpec:
    """A rank of one machine."""
    world = plan.layout.world_size
    return RankSpec(
        rank=rank,
        world_size=world,
        node_rank=0,
        local_rank=local_rank,
        local_world_size=world,
        device_index=local_rank,
        node_id=where,
        node_ip=HOST,
        attempt=0,
    )


def prepared(plan: RunPlan, rank: int) -> tuple[TrainWorker, float]:
    """A worker with everything imported, whose output goes where our ranks' goes, and the seconds that it took."""
    worker = TrainWorker()
    log = plan.paths.logs / "attempt_0" / f"rank_{rank}.log"
    facts = worker.prepare(plan.worker_environment, env.POD_NAMES, str(log))
    return worker, facts.import_s


def opening(worker: TrainWorker, plan: RunPlan) -> Opening:
    """Rank 0 only: open the attempt's store, and look for the newest complete checkpoint."""
    port = worker.open_store(HOST, 0, plan.config.distributed_timeout_minutes)
    return Opening(port, CheckpointStore(plan.paths.checkpoints, None).resume_point())


def train(worker: TrainWorker, plan: RunPlan, spec: RankSpec, told: Opening, file: Path, import_s: float) -> None:
    """Train to the end as `spec`; rank 0 publishes and writes to `file` meanwhile, `import_s` among the phases."""
    rendezvous = Rendezvous(HOST, told.port, spec.node_id)
    if spec.rank:
        worker.run(plan, spec, rendezvous, told.resume)
        return
    ended = threading.Event()
    with file.open("a") as opened, ThreadPoolExecutor(1) as executor:
        telling = executor.submit(_tell, worker, plan, opened, ended, import_s)
        try:
            worker.run(plan, spec, rendezvous, told.resume)
        finally:
            ended.set()
        telling.result()


def _tell(worker: TrainWorker, plan: RunPlan, file: TextIO, ended: threading.Event, import_s: float) -> None:
    """Publish and write every half second, off the training's path, and once more when it has ended."""
    born = psutil.Process(os.getpid()).create_time()
    has_told_phases = False
    with _holding(CheckpointStore(plan.paths.checkpoints, plan.config.max_checkpoints)) as store:
        is_last = False
        while not is_last:
            is_last = ended.wait(_POLL_S)
            report = worker.poll()
            for step in report.steps:
                values = dataclasses.asdict(step)
                _write(file, "step", values.pop("finished_at"), born, values)
            for save in report.saves:
                store.publish(save)
                _write(file, "save", time.time(), born, {"step": save.step, "seconds": save.seconds})
            if report.steps and not has_told_phases:
                seconds = {"import": import_s, **report.phase_seconds}
                _write(file, "phases", time.time(), born, {"born": born, "seconds": seconds})
                has_told_phases = True
            file.flush()


def _write(file: TextIO, kind: str, at: float, born: float, values: dict[str, object]) -> None:
    """A line as in our metrics.jsonl; a process lives for one attempt, so that its birth tells attempts apart."""
    file.write(json.dumps({"kind": kind, "time": at, "attempt": born, **values}) + "\n")


@contextlib.contextmanager
def _holding(store: CheckpointStore) -> Iterator[CheckpointStore]:
    """Hold the folder. The last rank 0 may be a moment in going: its lock goes with it."""
    deadline = time.monotonic() + _LOCK_PATIENCE_S
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(store.lock())
                break
            except CheckpointError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_LOCK_RETRY_S)
        yield store
