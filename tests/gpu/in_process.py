"""Trains one plan after another in one process, without Ray: `in_process.py RUNS.json RESULTS.json`.

Starting a process that imports everything takes 20 s, a small run a few seconds. RUNS holds a list of the command's
flags for each run; RESULTS gets for each the losses, the gradient norms, the seconds and the peak memory of its steps.
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from raytrain_llama3 import data
from raytrain_llama3.config import estimate, rules
from raytrain_llama3.config.load import load
from raytrain_llama3.config.machine import local_supply
from raytrain_llama3.config.plan import RunPlan
from raytrain_llama3.errors import RaytrainError
from raytrain_llama3.messages import RankSpec, Rendezvous
from raytrain_llama3.train.worker import TrainWorker


def main(runs: Path, results: Path) -> None:
    worker, done = TrainWorker(), list[dict[str, Any]]()
    for number, flags in enumerate(json.loads(runs.read_text())):
        plan = planned(flags)
        if not number:
            worker.prepare(plan.worker_environment, (), str(results.with_suffix(".log")))
        try:
            done.append(trained(worker, plan, number))
        except RaytrainError:
            done.append({"error": traceback.format_exc()})
            worker.poll()
        results.write_text(json.dumps(done))
        worker.reset()
        forget()


def planned(flags: list[str]) -> RunPlan:
    loaded = load(flags, {})
    return rules.plan_run(loaded, local_supply(loaded.config, {}))


def trained(worker: TrainWorker, plan: RunPlan, number: int) -> dict[str, Any]:
    data.prepare(plan, lambda _: None)
    port = worker.open_store("127.0.0.1", 0)
    rank = RankSpec(0, 1, 0, 0, 1, 0, "node", "127.0.0.1", 0)
    worker.run(plan, rank, Rendezvous("127.0.0.1", port, f"run-{number}"), None)
    steps = worker.poll().steps
    need = estimate.memory(plan.config, plan.layout, plan.device, plan.moments_dtype)
    return {
        "losses": [step.loss for step in steps],
        "grad_norms": [step.grad_norm for step in steps],
        "step_s": [step.step_s for step in steps],
        "peak_bytes": max(step.peak_memory_bytes for step in steps),
        "moments": plan.moments_dtype,
        "estimate": asdict(need) | {"total": need.total},
    }


def forget() -> None:
    """What a process would have left to the end: memory, and Transformer Engine's table of fp8 tensors."""
    import torch

    if "transformer_engine" in sys.modules:
        from transformer_engine.pytorch.module import base as module_base
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        FP8GlobalStateManager.reset()
        module_base._dummy_wgrads.clear()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
