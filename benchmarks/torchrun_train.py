"""The training code of the package, started by torch's own launcher: the peer that the benchmarks measure against.

Run it as `torchrun --standalone --nproc-per-node 2 benchmarks/torchrun_train.py --records FILE`, with the command's own
flags behind. No Ray is imported. Rank 0 appends a JSON line for each step to FILE, and at the end one with its seconds
by phase.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import psutil

from raytrain_llama3.config import env, machine, rules
from raytrain_llama3.config.load import load
from raytrain_llama3.config.plan import RunPlan
from raytrain_llama3.messages import RankSpec, Rendezvous
from raytrain_llama3.train.worker import TrainWorker

# As often as our driver asks its ranks.
_POLL_S = 0.5
_HOST = "127.0.0.1"
_PORT_KEY = "raytrain-store-port"


def main(argv: Sequence[str]) -> int:
    """Train as the rank that torchrun's environment says; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--records", type=Path, required=True, help="JSON lines file that rank 0 writes")
    given, flags = parser.parse_known_args(argv)
    environ = env.snapshot()
    loaded = load(flags, env.without_pod(environ))
    plan = rules.plan_run(loaded, machine.local_supply(loaded.config, loaded.environ), machine.cores())
    spec = _rank(environ, plan)
    worker = TrainWorker()
    worker.prepare(plan.worker_environment, env.POD_NAMES, str(plan.paths.logs / f"torchrun_rank_{spec.rank}.log"))
    port = _meet(worker, spec, plan, environ["MASTER_ADDR"], int(environ["MASTER_PORT"]))
    rendezvous = Rendezvous(_HOST, port, "torchrun")
    if spec.rank:
        worker.run(plan, spec, rendezvous, None)
        return 0
    with given.records.open("a") as file:
        _run_and_tell(worker, plan, spec, rendezvous, file)
    return 0


def _rank(environ: dict[str, str], plan: RunPlan) -> RankSpec:
    world, local_world = int(environ["WORLD_SIZE"]), int(environ["LOCAL_WORLD_SIZE"])
    if world != plan.layout.world_size:
        raise SystemExit(f"torchrun started {world} ranks, the flags ask for {plan.layout.world_size}")
    return RankSpec(
        rank=int(environ["RANK"]),
        world_size=world,
        node_rank=int(environ["GROUP_RANK"]),
        local_rank=int(environ["LOCAL_RANK"]),
        local_world_size=local_world,
        device_index=int(environ["LOCAL_RANK"]),
        node_id="torchrun",
        node_ip=_HOST,
        attempt=0,
    )


def _meet(worker: TrainWorker, spec: RankSpec, plan: RunPlan, host: str, port: int) -> int:
    """Rank 0 opens the attempt's store and tells its port to the others through torchrun's own store."""
    import torch.distributed as dist

    agents = dist.TCPStore(host, port, is_master=False)
    if spec.rank == 0:
        agents.set(_PORT_KEY, str(worker.open_store(_HOST, 0, plan.config.distributed_timeout_minutes)))
    return int(agents.get(_PORT_KEY))


def _run_and_tell(worker: TrainWorker, plan: RunPlan, spec: RankSpec, rendezvous: Rendezvous, file: TextIO) -> None:
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(_POLL_S):
            _write_steps(worker, file)

    teller = threading.Thread(target=tell, name="teller")
    teller.start()
    try:
        worker.run(plan, spec, rendezvous, None)
    finally:
        ended.set()
        teller.join()
    seconds = _write_steps(worker, file)
    born = psutil.Process(os.getpid()).create_time()
    file.write(json.dumps({"kind": "phases", "born": born, "seconds": seconds}) + "\n")


def _write_steps(worker: TrainWorker, file: TextIO) -> dict[str, float]:
    """Append the steps since the last call; seconds by phase so far."""
    report = worker.poll()
    for step in report.steps:
        values = dataclasses.asdict(step)
        file.write(json.dumps({"kind": "step", "time": values.pop("finished_at"), **values}) + "\n")
    file.flush()
    return report.phase_seconds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
