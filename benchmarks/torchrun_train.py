"""The training code of the package, started by torch's own launcher: the peer that the benchmarks measure against.

Run it as `torchrun --standalone --nproc-per-node 2 benchmarks/torchrun_train.py --records FILE`, with the command's own
flags behind. No Ray is imported. Rank 0 appends JSON lines to FILE (see `peer`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import peer

from raytrain_llama3.config import env
from raytrain_llama3.config.plan import RunPlan
from raytrain_llama3.train.worker import TrainWorker


def main(argv: Sequence[str]) -> int:
    """Train as the rank that torchrun's environment says; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--records", type=Path, required=True, help="JSON lines file that rank 0 writes")
    given, flags = parser.parse_known_args(argv)
    environ = env.snapshot()
    plan = peer.planned(flags)
    world, rank = int(environ["WORLD_SIZE"]), int(environ["RANK"])
    if world != plan.layout.world_size:
        raise SystemExit(f"torchrun started {world} ranks, the flags ask for {plan.layout.world_size}")
    worker, import_s = peer.prepared(plan, rank)
    told = _meet(worker, plan, rank, environ)
    spec = peer.rank_of(plan, rank, int(environ["LOCAL_RANK"]), "torchrun")
    peer.train(worker, plan, spec, told, given.records, import_s)
    return 0


def _meet(worker: TrainWorker, plan: RunPlan, rank: int, environ: dict[str, str]) -> peer.Opening:
    """Rank 0 opens the attempt's store and tells the others its port, through torchrun's own store."""
    import torch.distributed as dist

    agents = dist.TCPStore(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_master=False)
    # That store outlives a restart, and so would the port of the attempt before.
    key = f"raytrain-opening/{environ['TORCHELASTIC_RESTART_COUNT']}"
    if rank == 0:
        agents.set(key, peer.opening(worker, plan).dump())
    return peer.Opening.parse(agents.get(key).decode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
