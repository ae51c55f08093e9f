"""Every rule that a configuration must keep, checked together before Ray starts.

Those about how a model comes apart over ranks are in `config.layout_rules`; the rest are here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from raytrain_llama3.config import env, estimate
from raytrain_llama3.config.layout_rules import (
    count_of,
    layout_of,
    layout_problems,
    model_problems,
    world_problems,
)
from raytrain_llama3.config.load import Loaded
from raytrain_llama3.config.memory_rules import memory_problems, moments_dtype, tight_memory
from raytrain_llama3.config.plan import DeviceSupply, RunPaths, RunPlan
from raytrain_llama3.config.schema import Config
from raytrain_llama3.errors import ConfigError

__all__ = [
    "FP8_CAPABILITY",
    "adjustments",
    "check_anywhere",
    "devices_used",
    "is_mock",
    "plan_run",
    "resize",
    "run_paths",
    "tight_memory",
    "tokenizer_type",
    "unfit",
]

FP8_CAPABILITY = 8.9
_FP8_ATTENTION_CAPABILITY = 9.0
_FP8_ATTENTION_CHANNELS = 128
_SAME_MEMORY = 0.95
"""Devices of one kind report a little more or less memory, as their drivers take more or less of it."""


def plan_run(loaded: Loaded, supply: DeviceSupply, cores_per_node: int = 1) -> RunPlan:
    """Decide every `auto` for the devices in `supply`.

    Raises `ConfigError` with one line for every broken rule: the values, the arithmetic, the nearest legal ones.
    """
    config = loaded.config
    ranks_per_node, problems = _ranks_per_node(config, supply)
    world = sum(ranks_per_node)
    problems += [*_problems_anywhere(loaded), *_device_problems(config, supply)]
    problems += world_problems(config, world, ranks_per_node)
    _raise_if(problems)
    layout = layout_of(config, world)
    _raise_if(list(memory_problems(config, layout, supply)))
    threads = max(1, cores_per_node // max(ranks_per_node))
    return RunPlan(
        config=config,
        device=supply.device,
        layout=layout,
        ranks_per_node=tuple(ranks_per_node),
        paths=run_paths(config, Path.cwd()),
        train_steps=_train_steps(config),
        ends_at=time.time() + 60 * config.exit_duration_in_mins if config.exit_duration_in_mins else None,
        warmup_samples=config.lr_warmup_samples,
        decay_samples=config.lr_decay_samples,
        padded_vocab_size=estimate.padded_vocab_size(config.vocab_size),
        mock_data=is_mock(config),
        worker_environment=env.for_workers(
            loaded.environ, supply.device, supply.device_name, min(threads, 4) if world > 1 else threads
        ),
        moments_dtype=moments_dtype(config, layout, supply),
        peak_flops=estimate.peak_flops(supply.device_name, config.dtype),
        supply=supply,
    )


def resize(plan: RunPlan, sizes: Sequence[int]) -> RunPlan:
    """`plan` on nodes with `sizes` devices: the most data-parallel ranks that share the same global batch evenly.

    They are never more than the plan's own. Devices that are left over stay without a rank. Raises `ConfigError` when
    no number of ranks will do, or when they are so few that each needs more memory than it has.
    """
    c, model = plan.config, plan.layout.tp * plan.layout.cp * plan.layout.pp
    there = sum(sizes)
    most = min(there // model, plan.layout.dp)
    legal = [dp for dp in range(most, 0, -1) if not list(world_problems(c, dp * model, [dp * model]))]
    if not legal:
        raise ConfigError(tuple(world_problems(c, there, sizes)))
    layout, left, used = layout_of(c, legal[0] * model), legal[0] * model, []
    _raise_if(list(memory_problems(c, layout, plan.supply, plan.moments_dtype)))
    for size in sizes:
        used.append(min(size, left))
        left -= used[-1]
    return replace(plan, layout=layout, ranks_per_node=tuple(count for count in used if count))


def unfit(plan: RunPlan, name: str, memory_bytes: int, capability: float) -> list[str]:
    """What keeps one GPU from a rank's part of `plan`, one line each: the driver knows the cluster's least, if that."""
    supply = replace(plan.supply, per_node=(1,), device_name=name, memory_bytes=memory_bytes, capability=capability)
    lines = [*_device_problems(plan.config, supply)]
    if memory_bytes < _SAME_MEMORY * (plan.supply.memory_bytes or math.inf):
        lines += memory_problems(plan.config, plan.layout, supply, plan.moments_dtype)
    return lines


def check_anywhere(loaded: Loaded) -> None:
    """Check what holds on any cluster, before one is joined. Raises `ConfigError` as `plan_run` does."""
    _raise_if(_problems_anywhere(loaded))


def adjustments(config: Config, supply: DeviceSupply) -> list[str]:
    """One line for each value that is used differently from how it was asked for."""
    lines = []
    asked, there = config.gpus_per_node, _nodes(config, supply)
    if supply.device == "cuda" and asked != "auto" and asked > min(there):
        used = ", ".join(str(min(asked, count)) for count in there)
        lines.append(f"gpus_per_node {asked} is more than there are: {used} are used")
    left_over = len(supply.per_node) - len(there)
    if config.spare_nodes > left_over:
        lines.append(f"spare_nodes {config.spare_nodes}: only {left_over} of the nodes are not in use")
    if config.sequence_parallel is True and config.tp_size == 1:
        lines.append("sequence_parallel needs tp_size > 1: switched off")
    if is_mock(config) and config.data_arg.upper() != "MOCK":
        lines.append(f"data_arg {config.data_arg} is not used: without a tokenizer_arg tokens are made up")
    if config.reset_position_ids:
        lines.append("reset_position_ids changes nothing: rotary positions count distances, not places")
    if config.tokenizer_type not in ("auto", tokenizer_type(config)):
        lines.append(f"tokenizer_type {config.tokenizer_type} is not used: the data says {tokenizer_type(config)}")
    return lines


def devices_used(config: Config, supply: DeviceSupply) -> list[int]:
    """Ranks on each node of `supply`."""
    return _ranks_per_node(config, supply)[0]


def is_mock(config: Config) -> bool:
    """Whether tokens are made up: either argument is MOCK, or there is no tokenizer."""
    return "MOCK" in (config.tokenizer_arg.upper(), config.data_arg.upper()) or not config.tokenizer_arg


def tokenizer_type(config: Config) -> str:
    """Megatron-LM's word for the tokenizer, which follows from the data."""
    return "NullTokenizer" if is_mock(config) else "HuggingFaceTokenizer"


def run_paths(config: Config, base: Path) -> RunPaths:
    """The run's folders, absolute, with the script's names where none are given."""
    name = config.exp_name
    if config.use_exp_structure:
        root = config.exp_dir / name
        checkpoints, tensorboard, logs = root / "checkpoints", root / "tensorboard", root / "logs"
    else:
        checkpoints = config.checkpoint_path or Path("checkpoints") / name
        tensorboard = config.tensorboard_logs_path or Path("tensorboard_logs") / name
        logs = config.logs_path or Path("logs") / name
    cache = config.data_cache_path or Path(f"benchmark_cache_{name}")
    made = ((base / path.expanduser()).resolve() for path in (checkpoints, tensorboard, logs, cache))
    load = (base / config.load_path.expanduser()).resolve() if config.load_path else None
    paths = RunPaths(*made)
    return replace(paths, load=None if load == paths.checkpoints else load)


def _problems_anywhere(loaded: Loaded) -> list[str]:
    config = loaded.config
    return [*model_problems(config), *_schedule_problems(loaded), *layout_problems(config)]


def _raise_if(problems: list[str]) -> None:
    if problems:
        raise ConfigError(tuple(problems))


def _nodes(config: Config, supply: DeviceSupply) -> list[int]:
    """Devices on each of the nodes to use: all nodes but the spare ones, or the `num_nodes` largest."""
    nodes = list(supply.per_node)
    if config.num_nodes == "auto" and not config.spare_nodes:
        return nodes
    count = len(nodes) - config.spare_nodes if config.num_nodes == "auto" else config.num_nodes
    return sorted(nodes, reverse=True)[: max(count, 1)]


def _ranks_per_node(config: Config, supply: DeviceSupply) -> tuple[list[int], list[str]]:
    nodes, problems = _nodes(config, supply), []
    if config.num_nodes != "auto" and config.num_nodes > len(nodes):
        problems.append(f"num_nodes {config.num_nodes} is more than the {len(supply.per_node)} there are")
    if config.num_nodes == "auto" and config.spare_nodes >= (count := len(supply.per_node)):
        problems.append(
            f"spare_nodes {config.spare_nodes} leaves none of {count_of(count, 'node')} to train on: at most "
            f"{count - 1} can be spare; lower it, or add nodes"
        )
    if config.elastic_min_nodes is not None and config.elastic_min_nodes > (count := len(nodes)):
        problems.append(
            f"elastic_min_nodes {config.elastic_min_nodes} is more than the {count_of(count, 'node')} to train on at "
            f"first: set {count} or less, or use more nodes"
        )
    if config.gpus_per_node != "auto":
        nodes = [min(count, config.gpus_per_node) for count in nodes]
    return nodes, problems


def _schedule_problems(loaded: Loaded) -> Iterator[str]:
    c, origins = loaded.config, loaded.origins
    if not sum(c.split[:1]):
        yield f"split {c.split} leaves nothing to train on: the first number must be more than 0"
    if c.min_learning_rate > c.learning_rate:
        yield f"min_learning_rate {c.min_learning_rate:g} is more than learning_rate {c.learning_rate:g}"
    if c.lr_warmup_samples >= c.lr_decay_samples:
        yield (
            f"lr_warmup_samples {c.lr_warmup_samples} must be less than lr_decay_samples {c.lr_decay_samples}, which "
            "counts from the start and contains it"
        )
    if c.train_iters is not None and "train_samples" in origins:
        yield (
            f"train_iters {c.train_iters} ({origins['train_iters']}) and train_samples {c.train_samples} "
            f"({origins['train_samples']}) both say how long to train: leave one out"
        )
    if c.load_weights_only and c.load_path is None:
        yield "load_weights_only needs a load_path that says whose weights"
    if c.train_iters is None and c.train_samples < c.global_batch_size:
        yield f"train_samples {c.train_samples} is less than one step's global_batch_size {c.global_batch_size}"
    if c.enable_profiling and c.profile_step_end <= c.profile_step_start:
        yield f"profile_step_end {c.profile_step_end} must be more than profile_step_start {c.profile_step_start}"


def _device_problems(config: Config, supply: DeviceSupply) -> Iterator[str]:
    c = config
    if c.dtype == "fp8" and c.fp8_attention:
        yield from _fp8_attention_problems(c, supply)
    if c.offload_modules and supply.device == "cpu":
        yield f"offload_modules {','.join(c.offload_modules)} needs a GPU: on a CPU they are in its memory already"
    if c.dtype == "fp8" and c.fp8_param_gather and c.optimizer_moments_dtype == "bf16":
        yield (
            "fp8_param_gather needs optimizer_moments_dtype fp32: Transformer Engine's Adam has no bf16 moments for "
            "fp8 weights"
        )
    if c.reset_attention_mask and supply.device == "cuda":
        yield "reset_attention_mask needs a CPU: the GPU's attention kernels as used here are causal over the sequence"
    if supply.device == "cpu":
        if c.dtype == "fp8":
            yield (
                f"dtype fp8 needs a GPU of compute capability {FP8_CAPABILITY} or more (its kernels are Transformer "
                "Engine's); on a CPU use bf16 or fp32"
            )
        if c.dtype == "fp16":
            yield "dtype fp16 needs a GPU (its loss scaling is CUDA code); on a CPU use bf16 or fp32"
        if c.cp_size > 1:
            yield f"cp_size {c.cp_size} needs GPUs (its attention is Transformer Engine's); on a CPU use cp_size 1"
    elif c.dtype == "fp8" and supply.capability is not None and supply.capability < FP8_CAPABILITY:
        yield (
            f"dtype fp8 needs compute capability {FP8_CAPABILITY} or more; {supply.device_name} has "
            f"{supply.capability}: use --dtype bf16"
        )


def _fp8_attention_problems(config: Config, supply: DeviceSupply) -> Iterator[str]:
    if config.fp8_recipe != "delayed":
        yield f"fp8_attention needs fp8_recipe delayed, not {config.fp8_recipe}, for want of a kernel; leave it off"
    if config.kv_channels != _FP8_ATTENTION_CHANNELS:
        yield (
            f"fp8_attention needs kv_channels {_FP8_ATTENTION_CHANNELS}, not {config.kv_channels}: cuDNN has no kernel "
            "for others; leave it off"
        )
    if supply.capability is not None and supply.capability < _FP8_ATTENTION_CAPABILITY:
        yield (
            f"fp8_attention needs compute capability {_FP8_ATTENTION_CAPABILITY} or more; {supply.device_name} has "
            f"{supply.capability}: leave it off"
        )


def _train_steps(config: Config) -> int:
    return config.train_iters or config.train_samples // config.global_batch_size
