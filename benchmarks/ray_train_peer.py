"""The training code of the package under Ray Train's TorchTrainer: the other peer that recovery is measured against.

Run it as `python benchmarks/ray_train_peer.py --records FILE --ray-folder FOLDER`, with the command's own flags behind.
It starts a Ray of its own in FOLDER (a short path: sockets lie below it). Rank 0 appends JSON lines to FILE (see
`peer`); the controller adds a line `noticed` to FILE.noticed whenever it sees ranks fail.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peer
import psutil
import ray
import ray.train
import ray.train.collective
from ray.train.torch import TorchConfig, TorchTrainer

_OBJECT_STORE_BYTES = 256 * 2**20
_NOT_LIMITED = -1


class Watcher(ray.train.UserCallback):
    """Notes when the controller sees a failure."""

    def __init__(self, file: str) -> None:
        self._file = file

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Called in the controller's process after a poll that found failed ranks."""
        line = {"kind": "noticed", "time": time.time(), "ranks": sorted(worker_exceptions)}
        with Path(self._file).open("a") as file:
            file.write(json.dumps(line) + "\n")


def train_rank(config: dict[str, Any]) -> None:
    """One rank: what TorchTrainer runs in each worker, again after every failure."""
    import torch.distributed as dist

    context = ray.train.get_context()
    rank = context.get_world_rank()
    plan = peer.planned(config["flags"])
    worker, import_s = peer.prepared(plan, rank)
    told: peer.Opening = ray.train.collective.broadcast_from_rank_zero(
        peer.opening(worker, plan) if rank == 0 else None
    )
    # TorchTrainer has opened a group already; the training code opens its own.
    dist.destroy_process_group()
    spec = peer.rank_of(plan, rank, context.get_local_rank(), "ray-train")
    peer.train(worker, plan, spec, told, Path(config["records"]), import_s)


def main(argv: Sequence[str]) -> int:
    """Train to the end under TorchTrainer; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--records", type=Path, required=True, help="JSON lines file that rank 0 writes")
    parser.add_argument("--ray-folder", type=Path, required=True, help="where Ray keeps its session")
    given, flags = parser.parse_known_args(argv)
    ranks = peer.planned(flags).layout.world_size
    ray.init(
        address="local",
        num_cpus=max(psutil.cpu_count() or 1, ranks),
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        _temp_dir=str(given.ray_folder),
    )
    trainer = TorchTrainer(
        train_rank,
        train_loop_config={"flags": list(flags), "records": str(given.records)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=ranks),
        run_config=ray.train.RunConfig(
            name="run",
            storage_path=str(given.records.parent / "ray_train"),
            failure_config=ray.train.FailureConfig(max_failures=_NOT_LIMITED),
            callbacks=[Watcher(f"{given.records}.noticed")],
        ),
    )
    trainer.fit()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
