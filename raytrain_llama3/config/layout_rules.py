"""How a model comes apart over ranks: the sizes that must divide each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from raytrain_llama3.config import estimate
from raytrain_llama3.config.plan import Layout
from raytrain_llama3.config.schema import Config


def layout_of(config: Config, world: int) -> Layout:
    """The parallel sizes of `world` ranks; data parallelism takes what the others leave."""
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


def model_problems(config: Config) -> Iterator[str]:
    """What of the model's shape holds on no number of ranks."""
    c = config
    if c.num_attention_heads % c.num_query_groups:
        yield _indivisible("num_attention_heads", c.num_attention_heads, "num_query_groups", c.num_query_groups)
    if c.kv_channels % 2:
        yield f"kv_channels {c.kv_channels} must be even: rotary positions turn it in two halves"
    if c.max_position_embeddings is not None and c.max_position_embeddings < c.seq_length:
        yield f"max_position_embeddings {c.max_position_embeddings} is less than seq_length {c.seq_length}"


def layout_problems(config: Config) -> Iterator[str]:
    """Sizes of the model that the parallel sizes do not divide, whatever devices there are."""
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


def world_problems(config: Config, world: int, ranks_per_node: Sequence[int]) -> Iterator[str]:
    """Why `world` ranks cannot form whole groups, or cannot share the global batch evenly."""
    c, model = config, config.tp_size * config.cp_size * config.pp_size
    product = f"tp_size {c.tp_size} × cp_size {c.cp_size} × pp_size {c.pp_size} = {model}"
    there = f"{count_of(len(ranks_per_node), 'node')}, {'+'.join(map(str, ranks_per_node)) or 0} devices"
    if model > world:
        yield f"{product} ranks are more than the {world} there are ({there}): lower a size, or use {model} devices"
    elif world % model:
        legal = f"{world - world % model} or {world + model - world % model}"
        yield f"{world} ranks ({there}) do not divide by {product}: use {legal} devices"
    if world % model or not world:
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


def _indivisible(name: str, value: int, by: str, divisor: int) -> str:
    """`global_batch_size 100 does not divide by micro_batch_size 3 × data-parallel 2 = 6: nearest legal 96 or 102`."""
    below, above = value - value % divisor, value + divisor - value % divisor
    legal = f"{below} or {above}" if below else f"{above}"
    others = _legal_divisors(value, by, divisor)
    return f"{name} {value} does not divide by {by} {divisor}: nearest legal {name} {legal}{others}"


def count_of(number: int, noun: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _legal_divisors(value: int, by: str, divisor: int) -> str:
    if not by.endswith("_size") and by != "num_query_groups":
        return ""
    return f", or {by} {_divisors_near(value, divisor)}"


def _divisors_near(value: int, divisor: int) -> str:
    lower = max(d for d in range(1, divisor + 1) if value % d == 0)
    higher = min((d for d in range(divisor, value + 1) if value % d == 0), default=lower)
    return " or ".join(str(d) for d in sorted({lower, higher}))
