"""Every rule that a configuration must keep, checked together before Ray starts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from raytrain_llama3.config import env, estimate
from raytrain_llama3.config.load import Loaded
from raytrain_llama3.config.plan import DeviceSupply, Layout, RunPaths, RunPlan
from raytrain_llama3.config.schema import Config
from raytrain_llama3.errors import ConfigError

_FP8_CAPABILITY = 8.9
_ESTIMATE_MARGIN = 1.04
"""How far the memory estimate may be off: 4 % above what 8B on one H200 really took."""


def plan_run(loaded: Loaded, supply: DeviceSupply, cores_per_node: int = 1) -> RunPlan:
    """Decide every `auto` for the devices in `supply`.

    Raises `ConfigError` with one line for every broken rule: the values, the arithmetic, the nearest legal ones.
    """
    config = loaded.config
    ranks_per_node, problems = _ranks_per_node(config, supply)
    world = sum(ranks_per_node)
    problems += [*_problems_anywhere(loaded), *_device_problems(config, supply)]
    problems += _world_problems(config, world, ranks_per_node)
    _raise_if(problems)
    layout = _layout(config, world)
    _raise_if(list(_memory_problems(config, layout, supply)))
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
        worker_environment=env.for_workers(loaded.environ, supply.device, min(threads, 4) if world > 1 else threads),
        peak_flops=estimate.peak_flops(supply.device_name, config.dtype),
        supply=supply,
    )


def resize(plan: RunPlan, sizes: Sequence[int]) -> RunPlan:
    """`plan` on nodes with `sizes` devices: the most data-parallel ranks that share the same global batch evenly.

    Devices that are left over stay without a rank. Raises `ConfigError` when no number of ranks will do.
    """
    c, model = plan.config, plan.layout.tp * plan.layout.cp * plan.layout.pp
    there = sum(sizes)
    legal = [dp for dp in range(there // model, 0, -1) if not list(_world_problems(c, dp * model, [dp * model]))]
    if not legal:
        raise ConfigError(tuple(_world_problems(c, there, list(sizes))))
    layout, left, used = _layout(c, legal[0] * model), legal[0] * model, []
    _raise_if(list(_memory_problems(c, layout, plan.supply)))
    for size in sizes:
        used.append(min(size, left))
        left -= used[-1]
    return replace(plan, layout=layout, ranks_per_node=tuple(count for count in used if count))


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
    if config.sequence_parallel is True and config.tp_size == 1:
        lines.append("sequence_parallel needs tp_size > 1: switched off")
    if is_mock(config) and config.data_arg.upper() != "MOCK":
        lines.append(f"data_arg {config.data_arg} is not used: without a tokenizer_arg tokens are made up")
    if config.tokenizer_type not in ("auto", tokenizer_type(config)):
        lines.append(f"tokenizer_type {config.tokenizer_type} is not used: the data says {tokenizer_type(config)}")
    return lines


def tight_memory(plan: RunPlan, supply: DeviceSupply) -> list[str]:
    """A line when the estimate says that memory may not be enough, within what the estimate can tell."""
    need = estimate.memory(plan.config, plan.layout, plan.device).total
    if supply.memory_bytes is None or need < supply.memory_bytes / _ESTIMATE_MARGIN:
        return []
    return [
        f"memory is tight: about {need / estimate.GIB:.0f} of {supply.memory_bytes / estimate.GIB:.0f} GiB a device; "
        f"if it runs out, {_memory_remedy(plan.config, supply)}"
    ]


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
    return RunPaths(*((base / path.expanduser()).resolve() for path in (checkpoints, tensorboard, logs, cache)))


def _problems_anywhere(loaded: Loaded) -> list[str]:
    config = loaded.config
    return [*_model_problems(config), *_schedule_problems(loaded), *_layout_problems(config)]


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
    if config.num_nodes == "auto" and config.spare_nodes >= len(supply.per_node):
        problems.append(f"spare_nodes {config.spare_nodes} leaves none of the {len(supply.per_node)} nodes to train on")
    if config.elastic_min_nodes is not None and config.elastic_min_nodes > len(nodes):
        problems.append(
            f"elastic_min_nodes {config.elastic_min_nodes} is more than the {len(nodes)} nodes that are used at first"
        )
    if config.gpus_per_node != "auto":
        nodes = [min(count, config.gpus_per_node) for count in nodes]
    return nodes, problems


def _model_problems(config: Config) -> Iterator[str]:
    c = config
    if c.num_attention_heads % c.num_query_groups:
        yield _indivisible("num_attention_heads", c.num_attention_heads, "num_query_groups", c.num_query_groups)
    if c.kv_channels % 2:
        yield f"kv_channels {c.kv_channels} must be even: rotary positions turn it in two halves"
    if c.max_position_embeddings is not None and c.max_position_embeddings < c.seq_length:
        yield f"max_position_embeddings {c.max_position_embeddings} is less than seq_length {c.seq_length}"
    if not sum(c.split[:1]):
        yield f"split {c.split} leaves nothing to train on: the first number must be more than 0"


def _schedule_problems(loaded: Loaded) -> Iterator[str]:
    c, origins = loaded.config, loaded.origins
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
    if c.train_iters is None and c.train_samples < c.global_batch_size:
        yield f"train_samples {c.train_samples} is less than one step's global_batch_size {c.global_batch_size}"
    if c.enable_profiling and c.profile_step_end <= c.profile_step_start:
        yield f"profile_step_end {c.profile_step_end} must be more than profile_step_start {c.profile_step_start}"


def _device_problems(config: Config, supply: DeviceSupply) -> Iterator[str]:
    c = config
    if c.dtype == "fp8" and c.fp8_param_gather and c.optimizer_moments_dtype == "bf16":
        yield (
            "fp8_param_gather needs optimizer_moments_dtype fp32: Transformer Engine's Adam has no bf16 moments for "
            "fp8 weights"
        )
    if supply.device == "cpu":
        if c.dtype == "fp8":
            yield (
                f"dtype fp8 needs a GPU of compute capability {_FP8_CAPABILITY} or more (its kernels are Transformer "
                "Engine's); on a CPU use bf16 or fp32"
            )
        if c.dtype == "fp16":
            yield "dtype fp16 needs a GPU (its loss scaling is CUDA code); on a CPU use bf16 or fp32"
        if c.cp_size > 1:
            yield f"cp_size {c.cp_size} needs GPUs (its attention is Transformer Engine's); on a CPU use cp_size 1"
    elif c.dtype == "fp8" and supply.capability is not None and supply.capability < _FP8_CAPABILITY:
        yield (
            f"dtype fp8 needs compute capability {_FP8_CAPABILITY} or more; {supply.device_name} has "
            f"{supply.capability}: use --dtype bf16"
        )


def _layout_problems(config: Config) -> Iterator[str]:
    c, tp = config, config.tp_size
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
        if getattr(c, name) % tp:
            yield _indivisible(name, getattr(c, name), "tp_size", tp)
    padded = estimate.padded_vocab_size(c.vocab_size)
    if padded % tp:
        yield (
            f"vocab_size {c.vocab_size}, padded to {padded}, does not divide by tp_size {tp}: "
            f"nearest legal tp_size {_divisors_near(padded, tp)}"
        )
    stages = c.pp_size * (c.vpp_size or 1)
    if c.num_layers % stages:
        what = "pp_size" if not c.vpp_size else f"pp_size {c.pp_size} × vpp_size {c.vpp_size} ="
        yield _indivisible("num_layers", c.num_layers, what, stages)
    if c.vpp_size and c.pp_size == 1:
        yield f"vpp_size {c.vpp_size} needs pp_size > 1: virtual stages are pieces of pipeline stages"
    parts, why = _sequence_parts(c)
    if c.seq_length % parts:
        yield _indivisible("seq_length", c.seq_length, why, parts)
    if c.dtype == "fp8":
        yield from _fp8_problems(c)


def _world_problems(config: Config, world: int, ranks_per_node: list[int]) -> Iterator[str]:
    c, model = config, config.tp_size * config.cp_size * config.pp_size
    product = f"tp_size {c.tp_size} × cp_size {c.cp_size} × pp_size {c.pp_size} = {model}"
    there = f"{_count(len(ranks_per_node), 'node')}, {'+'.join(map(str, ranks_per_node))} devices"
    if model > world:
        yield f"{product} ranks are more than the {world} there are ({there}): lower a size, or use {model} devices"
    elif world % model:
        legal = f"{world - world % model} or {world + model - world % model}"
        yield f"{world} ranks ({there}) do not divide by {product}: use {legal} devices"
    if world % model:
        if c.global_batch_size % c.micro_batch_size:
            yield _indivisible("global_batch_size", c.global_batch_size, "micro_batch_size", c.micro_batch_size)
        return
    dp = world // model
    once = c.micro_batch_size * dp
    if c.global_batch_size % once:
        yield _indivisible(
            "global_batch_size",
            c.global_batch_size,
            f"micro_batch_size {c.micro_batch_size} × data-parallel {dp} =",
            once,
        )
    elif c.vpp_size and c.pp_size > 1 and (c.global_batch_size // once) % c.pp_size:
        yield _indivisible(
            "global_batch_size",
            c.global_batch_size,
            f"micro_batch_size {c.micro_batch_size} × data-parallel {dp} × pp_size {c.pp_size} (for virtual stages) =",
            once * c.pp_size,
        )


def _sequence_parts(config: Config) -> tuple[int, str]:
    """Into how many equal parts a sequence must come apart, and the words for it."""
    c = config
    if c.sequence_parallel is not False and c.tp_size > 1:
        by_cp = 2 * c.cp_size if c.cp_size > 1 else 1
        return by_cp * c.tp_size, f"{'2 × cp_size × ' if c.cp_size > 1 else ''}tp_size (sequence parallel)"
    return (2 * c.cp_size, "2 × cp_size") if c.cp_size > 1 else (1, "")


def _fp8_problems(config: Config) -> Iterator[str]:
    """Matrix sizes that fp8 kernels take, after every split."""
    c = config
    unit = {"delayed": 16, "tensorwise": 16, "mxfp8": 32, "blockwise": 128}[c.fp8_recipe]
    sequence = c.seq_length // _sequence_parts(c)[0] * (2 if c.cp_size > 1 else 1)
    sizes = {
        "hidden_size": c.hidden_size,
        f"ffn_hidden_size {c.ffn_hidden_size} / tp_size {c.tp_size}": c.ffn_hidden_size // c.tp_size,
        f"num_attention_heads × kv_channels / tp_size {c.tp_size}": c.num_attention_heads * c.kv_channels // c.tp_size,
        f"num_query_groups × kv_channels / tp_size {c.tp_size}": c.num_query_groups * c.kv_channels // c.tp_size,
        "micro_batch_size × a rank's part of seq_length": c.micro_batch_size * sequence,
    }
    for name, size in sizes.items():
        if size % unit:
            yield f"{name} = {size} must be a multiple of {unit} for fp8_recipe {c.fp8_recipe}"


def _memory_problems(config: Config, layout: Layout, supply: DeviceSupply) -> Iterator[str]:
    if supply.memory_bytes is None:
        return
    need = estimate.memory(config, layout, supply.device)
    if need.total <= supply.memory_bytes * _ESTIMATE_MARGIN:
        return
    parts = ", ".join(
        f"{name} {getattr(need, name) / estimate.GIB:.1f}"
        for name in ("weights", "gradients", "optimizer", "activations")
    )
    billions = estimate.parameters(config) / 1e9
    where = "a process on this CPU" if supply.device == "cpu" else supply.device_name
    yield (
        f"a model of {billions:.2f} billion parameters needs about {need.total / estimate.GIB:.0f} GiB a device "
        f"({parts}); {where} has {supply.memory_bytes / estimate.GIB:.0f} GiB: {_memory_remedy(config, supply)}"
    )


def _memory_remedy(config: Config, supply: DeviceSupply) -> str:
    if supply.device == "cpu":
        return "use GPUs, or see a small model train here: make demo, or --config configs/demo.toml"
    options = ["raise tp_size or pp_size", "lower micro_batch_size or seq_length"]
    if (
        config.optimizer_moments_dtype == "fp32"
        and config.dtype in ("bf16", "fp8")
        and config.use_distributed_optimizer
    ):
        options.append("--optimizer-moments-dtype bf16")
    return ", ".join(options)


def _layout(config: Config, world: int) -> Layout:
    c = config
    return Layout(
        world_size=world,
        tp=c.tp_size,
        cp=c.cp_size,
        pp=c.pp_size,
        dp=world // (c.tp_size * c.cp_size * c.pp_size),
        vpp=c.vpp_size,
        sequence_parallel=c.tp_size > 1 and c.sequence_parallel is not False,
        micro_batch_size=c.micro_batch_size,
        global_batch_size=c.global_batch_size,
    )


def _train_steps(config: Config) -> int:
    return config.train_iters or config.train_samples // config.global_batch_size


def _indivisible(name: str, value: int, by: str, divisor: int) -> str:
    """`global_batch_size 100 does not divide by micro_batch_size 3 × data-parallel 2 = 6: nearest legal 96 or 102`."""
    below, above = value - value % divisor, value + divisor - value % divisor
    legal = f"{below} or {above}" if below else f"{above}"
    others = _legal_divisors(value, by, divisor)
    return f"{name} {value} does not divide by {by} {divisor}: nearest legal {name} {legal}{others}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"


def _legal_divisors(value: int, by: str, divisor: int) -> str:
    if not by.endswith("_size") and by != "num_query_groups":
        return ""
    return f", or {by} {_divisors_near(value, divisor)}"


def _divisors_near(value: int, divisor: int) -> str:
    lower = max(d for d in range(1, divisor + 1) if value % d == 0)
    higher = min((d for d in range(divisor, value + 1) if value % d == 0), default=lower)
    return " or ".join(str(d) for d in sorted({lower, higher}))
