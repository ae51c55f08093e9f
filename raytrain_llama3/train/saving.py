"""What a save needs to know of the run: who saves together, and what is written beside the weights."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from raytrain_llama3 import __version__
from raytrain_llama3.checkpoint.destinations import Direct, ThroughWriter, ToKeepers
from raytrain_llama3.checkpoint.saves import Company, Saves
from raytrain_llama3.config.host_memory import saves_async
from raytrain_llama3.config.plan import RunPlan
from raytrain_llama3.messages import ResumePoint, SaveFailure, SaveRecord
from raytrain_llama3.train.process import Process
from raytrain_llama3.train.reporter import Reporter
from raytrain_llama3.train.stop import StopRequest

_SHAPE = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "rotary_base", "rotary_percent", "normalization", "norm_epsilon", "apply_layernorm_1p", "max_position_embeddings",
)  # fmt: skip
"""Options that say which model it is, beside its vocabulary and sequence length."""


def open_saves(plan: RunPlan, process: Process, reporter: Reporter, stop: StopRequest) -> Saves:
    """The saves of one attempt; asynchronous ones where asked for."""
    destination = Direct()
    if saves_async(plan.config, plan.device):
        destination = ThroughWriter(on_gpu=plan.device == "cuda")
    return Saves(_company(process, stop, "disk"), destination, reporter.add, plan.config.max_failed_saves)


def open_kept_saves(
    plan: RunPlan, process: Process, resume: ResumePoint | None, reporter: Reporter, stop: StopRequest
) -> Saves | None:
    """The memory checkpoints of one attempt, where there are some. However many fail, training goes on.

    One that this attempt goes on from stays until there is a newer one.
    """
    if not process.keepers or not plan.config.memory_checkpoint_interval:
        return None
    whole = (resume.kept_in_attempt, resume.step) if resume and resume.kept else None
    destination = ToKeepers(
        process.rank, process.world_size, process.attempt, process.keepers, whole, on_gpu=plan.device == "cuda"
    )

    def report(record: SaveRecord | SaveFailure) -> None:
        if isinstance(record, SaveFailure):
            reporter.add(f"step {record.step} was not kept in memory: {record.reason}")

    return Saves(_company(process, stop, "memory"), destination, report, math.inf)


def _company(process: Process, stop: StopRequest, name: str) -> Company:
    store = dist.PrefixStore(name, process.store)
    return Company(process.rank, process.world_size, store, lambda: stop.is_abandoned)


def sidecar_of(
    plan: RunPlan, versions: dict[str, str], samples: int, learning_rate: float, data: dict[str, Any]
) -> dict[str, object]:
    """What is known of a checkpoint without reading it; plain JSON values. `data` is the data's fingerprint."""
    c, layout = plan.config, plan.layout
    return {
        "raytrain_llama3": __version__,
        "versions": versions,
        "layout": asdict(layout),
        "device": plan.device,
        "dtype": c.dtype,
        "optimizer_moments_dtype": plan.moments_dtype,
        "model": {name: getattr(c, name) for name in _SHAPE},
        "vocab_size": c.vocab_size,
        "padded_vocab_size": plan.padded_vocab_size,
        "tokenizer": c.tokenizer_arg,
        "tokens": samples * c.seq_length,
        "learning_rate": learning_rate,
        "seed": c.seed,
        "seq_length": c.seq_length,
        "data": data,
        "wall_time": time.time(),
    }
