"""The table that every run starts with."""

from __future__ import annotations

from raytrain_llama3.config import estimate, flags, rules
from raytrain_llama3.config.host_memory import host_bytes
from raytrain_llama3.config.load import Loaded
from raytrain_llama3.config.plan import DeviceSupply, RunPlan


def summary(loaded: Loaded, plan: RunPlan, supply: DeviceSupply) -> str:
    """What the run is, in a dozen lines: model, precision, devices, batch, schedule, data, memory, folders."""
    c, layout = plan.config, plan.layout
    nodes = len(plan.ranks_per_node)
    parts = f"TP {layout.tp} × CP {layout.cp} × PP {layout.pp} × DP {layout.dp}"
    if layout.vpp:
        parts += f", {layout.vpp} virtual stages"
    if layout.sequence_parallel:
        parts += ", sequence parallel"
    memory = estimate.memory(c, layout, plan.device, plan.moments_dtype).total
    host = host_bytes(c, layout, plan.device, plan.moments_dtype, nodes)
    rows = {
        "model": (
            f"{_count(estimate.parameters(c))} parameters: {c.num_layers} layers, hidden {c.hidden_size}, "
            f"FFN {c.ffn_hidden_size}, {c.num_attention_heads} heads in {c.num_query_groups} groups, "
            f"sequence {c.seq_length}"
        ),
        "precision": c.dtype + (f" ({c.fp8_format}, {c.fp8_recipe})" if c.dtype == "fp8" else ""),
        "devices": f"{layout.world_size} × {supply.device_name or plan.device} on {_plural(nodes, 'node')}: {parts}",
        "batch": (
            f"{layout.global_batch_size} samples = {layout.dp} data-parallel × "
            f"{layout.num_micro_batches} micro-batch(es) × {layout.micro_batch_size}"
        ),
        "training": (
            f"{plan.train_steps} steps; learning rate {c.learning_rate:g} to {c.min_learning_rate:g}, "
            f"{c.lr_decay_style}, warm-up {plan.warmup_samples} of {plan.decay_samples} samples"
        ),
        "data": _data(plan),
        "memory": f"about {_bytes(memory)} a device, estimated"
        + (f"; {_bytes(host)} of the node's for each rank, for checkpoints" if host else ""),
        "checkpoints": str(plan.paths.checkpoints),
        "tensorboard": str(plan.paths.tensorboard),
        "rank logs": str(plan.paths.logs),
        "set by": _set_by(loaded),
    }
    return "\n".join([c.exp_name, *(f"  {name:<12} {text}" for name, text in rows.items())])


def _data(plan: RunPlan) -> str:
    kind = rules.tokenizer_type(plan.config)
    return f"mock tokens ({kind})" if plan.mock_data else f"{plan.config.data_arg} ({kind} {plan.config.tokenizer_arg})"


def _set_by(loaded: Loaded) -> str:
    """Flags and variables with their values, files by how much they set."""
    shown, in_files = [], dict[str, int]()
    for name, origin in loaded.origins.items():
        file, colon, _ = origin.rpartition(":")
        if colon:
            in_files[file] = in_files.get(file, 0) + 1
        else:
            shown.append(f"{origin} {flags.shown(getattr(loaded.config, name))}")
    files = [f"{file} ({_plural(count, 'option')})" for file, count in in_files.items()]
    return ", ".join(files + shown) or "nothing: every option is at its default"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _bytes(count: float) -> str:
    return f"{count / estimate.GIB:.1f} GiB" if count >= estimate.GIB else f"{count / 2**20:.0f} MiB"


def _count(number: float) -> str:
    for size, unit in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:.0f}"
