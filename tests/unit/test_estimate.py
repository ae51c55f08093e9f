from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from planning import EIGHT_NODES, GIB, ONE_H200, TINY, cpu, planned

from raytrain_llama3.config import estimate
from raytrain_llama3.config.load import load
from raytrain_llama3.config.schema import Config
from raytrain_llama3.config.summary import summary

PRESETS = Path(__file__).parents[2] / "configs"


def preset(name: str) -> Config:
    return load(["--config", str(PRESETS / name)], {}).config


def matrices(c: Config) -> Iterator[tuple[int, int]]:
    """Rows and columns of every weight that a token is multiplied with."""
    for _ in range(c.num_layers):
        yield c.num_attention_heads * c.kv_channels, c.hidden_size  # queries
        yield c.num_query_groups * c.kv_channels, c.hidden_size  # keys
        yield c.num_query_groups * c.kv_channels, c.hidden_size  # values
        yield c.hidden_size, c.num_attention_heads * c.kv_channels  # attention's output
        yield c.ffn_hidden_size, c.hidden_size  # gate
        yield c.ffn_hidden_size, c.hidden_size  # up
        yield c.hidden_size, c.ffn_hidden_size  # down
    yield c.vocab_size, c.hidden_size  # logits


@pytest.mark.parametrize(("name", "count"), [("llama3_8b.toml", 8_030_261_248), ("llama3_70b.toml", 70_553_706_496)])
def test_parameters_are_those_that_meta_counts(name: str, count: int) -> None:
    assert estimate.parameters(preset(name)) == count


def test_8b_is_the_default() -> None:
    assert estimate.parameters(Config()) == 8_030_261_248


def test_the_demo_has_between_a_third_and_two_million_parameters() -> None:
    assert 300_000 < estimate.parameters(preset("demo.toml")) < 2_000_000


def test_padding_the_vocabulary_adds_rows_to_both_ends() -> None:
    small, large = (estimate.parameters(load([*TINY, "--vocab-size", v], {}).config) for v in ("257", "384"))
    assert small == large
    assert estimate.parameters(load([*TINY, "--vocab-size", "385"], {}).config) - large == 2 * 128 * 128


@pytest.mark.parametrize("name", ["llama3_8b.toml", "llama3_70b.toml"])
def test_flops_of_a_token_are_its_products_and_half_of_its_attention(name: str) -> None:
    c = preset(name)
    products = sum(2 * rows * columns for rows, columns in matrices(c))
    width = c.num_attention_heads * c.kv_channels
    # A token at position p attends to p + 1 tokens: scores and weighted sum are 2 operations a channel each.
    attended = sum(range(1, c.seq_length + 1)) / c.seq_length
    attention = c.num_layers * 2 * 2 * width * attended
    # The backward pass costs twice the forward pass.
    assert estimate.flops_per_token(c) == pytest.approx(3 * (products + attention), rel=2e-4)


def test_a_longer_sequence_costs_more_attention_and_nothing_else() -> None:
    short, long = (estimate.flops_per_token(Config(seq_length=n)) for n in (8192, 16384))
    assert long - short == 6 * 32 * 4096 * 8192


@pytest.mark.parametrize(
    ("argv", "measured"),
    [
        ("", 112.45),
        ("--dtype fp8 --fp8-attention", 118.45),
        ("--recompute-modules layer --optimizer-moments-dtype fp32", 110.33),
        ("--num-layers 12 --recompute-modules mlp --optimizer-moments-dtype fp32", 55.59),
        ("--num-layers 8 --micro-batch-size 4 --seq-length 4096", 59.24),
        ("--num-layers 8 --dtype fp8 --fp8-recipe tensorwise", 56.81),
        ("--num-layers 8 --dtype fp8", 50.71),
        ("--num-layers 8 --use-distributed-optimizer 0", 53.79),
    ],
)
def test_memory_is_what_was_measured_on_one_h200(argv: str, measured: float) -> None:
    plan = planned(argv.split(), ONE_H200)
    need = estimate.memory(plan.config, plan.layout, "cuda", plan.moments_dtype)
    assert need.total == pytest.approx(measured * GIB, rel=0.02)


def bytes_of(argv: list[str], device: str = "cuda") -> estimate.Memory:
    supply = EIGHT_NODES if device == "cuda" else cpu()
    plan = planned([*TINY, "--global-batch-size", "128", *argv], supply)
    return estimate.memory(plan.config, plan.layout, plan.device)


ONE_NODE = ["--num-nodes", "1", "--gpus-per-node", "1"]


@pytest.mark.parametrize(
    ("argv", "a_parameter"),
    [
        # weights + gradients + moments + what is kept of the master weights
        (["--dtype", "fp32"], 4 + 4 + 8 + 0),
        (["--dtype", "bf16"], 2 + 2 + 8 + 2),
        (["--dtype", "bf16", "--optimizer-moments-dtype", "bf16"], 2 + 2 + 4 + 2),
        (["--dtype", "bf16", "--no-grad-reduce-in-bf16"], 2 + 4 + 8 + 2),
        (["--dtype", "bf16", "--no-use-distributed-optimizer"], 2 + 2 + 8 + 4),
        (["--dtype", "fp16"], 2 + 2 + 8 + 4),
        (["--dtype", "fp16", "--optimizer-moments-dtype", "bf16"], 2 + 2 + 8 + 4),
        (["--dtype", "bf16", "--fp8-recipe", "tensorwise"], 2 + 2 + 8 + 2),
        (["--dtype", "fp8"], 2 + 2 + 8 + 2),
        (["--dtype", "fp8", "--fp8-recipe", "tensorwise"], 2 + 2 + 8 + 4),
        (["--dtype", "bf16", "--device", "cpu"], 2 + 2 + 8 + 4),
    ],
)
def test_bytes_a_parameter_on_one_gpu(argv: list[str], a_parameter: int) -> None:
    need = bytes_of([*ONE_NODE, *argv], "cpu" if "cpu" in argv else "cuda")
    parameters = estimate.parameters(load(TINY, {}).config)
    # Each matrix of a layer also as fp8, and transposed.
    copies = 2 * (parameters - 2 * 384 * 128) if "fp8" in argv else 0
    assert need.weights + need.gradients + need.optimizer == a_parameter * parameters + copies
    kept = need.weights + need.gradients + need.optimizer + need.workspace
    assert need.total == kept + max(need.activations + need.logits, need.update)


def test_each_way_to_divide_the_model_lowers_what_it_should() -> None:
    one, data = bytes_of(ONE_NODE), bytes_of(["--num-nodes", "1"])
    assert data.optimizer == one.optimizer / 8
    assert data.weights == one.weights
    assert data.activations == one.activations
    tensor = bytes_of([*ONE_NODE, "--gpus-per-node", "4", "--tp-size", "4"])
    assert tensor.weights == one.weights / 4
    assert tensor.activations < one.activations / 3.9
    whole = bytes_of([*ONE_NODE, "--gpus-per-node", "4", "--tp-size", "4", "--no-sequence-parallel"])
    assert tensor.activations < whole.activations < one.activations
    pipeline = bytes_of([*ONE_NODE, "--gpus-per-node", "4", "--pp-size", "4"])
    embedding = 384 * 128 * 4
    # A quarter of the layers and one of the two ends; four micro-batches in flight, but no logits.
    assert pipeline.weights == (one.weights - 2 * embedding) / 4 + embedding
    assert pipeline.activations == one.activations
    assert (one.logits, pipeline.logits) == (2 * 128 * 384 * 4, 0)
    context = bytes_of([*ONE_NODE, "--gpus-per-node", "2", "--cp-size", "2"])
    assert context.activations == one.activations / 2


def test_without_the_distributed_optimizer_every_rank_holds_all_of_its_state() -> None:
    whole = bytes_of(["--num-nodes", "1", "--no-use-distributed-optimizer"])
    assert whole.optimizer == bytes_of([*ONE_NODE, "--no-use-distributed-optimizer"]).optimizer


def test_a_cpu_keeps_the_scores_of_every_pair_of_tokens_unless_told_to_recompute_them() -> None:
    kept, again = bytes_of([], "cpu"), bytes_of(["--recompute-activations"], "cpu")
    layers, micro_batch, heads, seq, width = 4, 2, 8, 128, 4
    assert kept.activations - again.activations == 2 * layers * micro_batch * heads * seq * seq * width


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 80GB HBM3", "fp16", 989e12),
        ("NVIDIA H100 80GB HBM3", "fp8", 1979e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H100 NVL", "bf16", 835e12),
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA H20", "bf16", 148e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A100-SXM4-80GB", "fp8", None),
        ("NVIDIA H100 80GB HBM3", "fp32", None),
        ("CPU", "bf16", None),
        ("", "bf16", None),
    ],
)
def test_the_peak_of_a_device_by_its_name(name: str, dtype: str, peak: float | None) -> None:
    assert estimate.peak_flops(name, dtype) == peak


def test_the_summary_tells_the_memory_of_what_was_chosen() -> None:
    loaded = load([], {})
    plan = planned([], ONE_H200)
    assert plan.moments_dtype == "bf16"
    assert "memory       about 112" in summary(loaded, plan, ONE_H200)
