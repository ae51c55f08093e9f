from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from planning import EIGHT_H100, EIGHT_NODES, GIB, ONE_H200, TINY, cpu, planned, refused

from raytrain_llama3.config import estimate, rules
from raytrain_llama3.config.load import load
from raytrain_llama3.config.plan import DeviceSupply
from raytrain_llama3.config.schema import Config
from raytrain_llama3.errors import ConfigError

A100 = DeviceSupply("cuda", (8,), "NVIDIA A100-SXM4-80GB", 80 * GIB, 8.0)
UNEQUAL = DeviceSupply("cuda", (4, 8, 2), "NVIDIA H100 80GB HBM3", 80 * GIB, 9.0)

BROKEN = [
    # The model's shape.
    (
        "--num-attention-heads 6",
        cpu(),
        "num_attention_heads 6 does not divide by num_query_groups 4: nearest legal num_attention_heads 4 or 8, or "
        "num_query_groups 3 or 6",
    ),
    ("--kv-channels 33", cpu(), "kv_channels 33 must be even: rotary positions turn it in two halves"),
    ("--max-position-embeddings 64", cpu(), "max_position_embeddings 64 is less than seq_length 128"),
    ("--split 0,99,1", cpu(), "split (0.0, 99.0, 1.0) leaves nothing to train on: the first number must be more than"),
    # The schedule.
    ("--lr 1e-5 --min-lr 1e-4", cpu(), "min_learning_rate 0.0001 is more than learning_rate 1e-05"),
    (
        "--lr-decay-samples 100 --lr-warmup-samples 100",
        cpu(),
        "lr_warmup_samples 100 must be less than lr_decay_samples 100, which counts from the start and contains it",
    ),
    (
        "--train-iters 5 --train-samples 80",
        cpu(),
        "train_iters 5 (--train-iters) and train_samples 80 (--train-samples) both say how long to train",
    ),
    ("--train-samples 15", cpu(), "train_samples 15 is less than one step's global_batch_size 16"),
    (
        "--enable-profiling --profile-step-start 6",
        cpu(),
        "profile_step_end 6 must be more than profile_step_start 6",
    ),
    # What a device can do.
    ("--dtype fp8", cpu(), "dtype fp8 needs a GPU of compute capability 8.9 or more"),
    ("--dtype fp16", cpu(), "dtype fp16 needs a GPU (its loss scaling is CUDA code); on a CPU use bf16 or fp32"),
    ("--cp-size 2", cpu(2), "cp_size 2 needs GPUs (its attention is Transformer Engine's); on a CPU use cp_size 1"),
    (
        "--dtype fp8",
        A100,
        "dtype fp8 needs compute capability 8.9 or more; NVIDIA A100-SXM4-80GB has 8.0: use --dtype bf16",
    ),
    (
        "--dtype fp8 --fp8-param-gather --optimizer-moments-dtype bf16",
        EIGHT_H100,
        "fp8_param_gather needs optimizer_moments_dtype fp32: Transformer Engine's Adam has no bf16 moments",
    ),
    # Sizes that fp8 kernels take, after every split.
    ("--dtype fp8 --hidden-size 120", ONE_H200, "hidden_size = 120 must be a multiple of 16 for fp8_recipe delayed"),
    (
        "--dtype fp8 --tp-size 4 --ffn-hidden-size 416",
        EIGHT_H100,
        "ffn_hidden_size 416 / tp_size 4 = 104 must be a multiple of 16 for fp8_recipe delayed",
    ),
    (
        "--dtype fp8 --num-attention-heads 4 --kv-channels 18",
        ONE_H200,
        "num_attention_heads × kv_channels / tp_size 1 = 72 must be a multiple of 16",
        "num_query_groups × kv_channels / tp_size 1 = 72 must be a multiple of 16",
    ),
    (
        "--dtype fp8 --micro-batch-size 1 --seq-length 72",
        ONE_H200,
        "micro_batch_size × a rank's part of seq_length = 72 must be a multiple of 16 for fp8_recipe delayed",
    ),
    (
        "--dtype fp8 --fp8-recipe mxfp8 --tp-size 2 --ffn-hidden-size 416",
        EIGHT_H100,
        "ffn_hidden_size 416 / tp_size 2 = 208 must be a multiple of 32 for fp8_recipe mxfp8",
    ),
    (
        "--dtype fp8 --fp8-recipe blockwise --hidden-size 192",
        ONE_H200,
        "hidden_size = 192 must be a multiple of 128 for fp8_recipe blockwise",
    ),
    (
        "--dtype fp8 --cp-size 8 --seq-length 32 --micro-batch-size 2",
        EIGHT_H100,
        "micro_batch_size × a rank's part of seq_length = 8 must be a multiple of 16",
    ),
    # What each split divides.
    (
        "--tp-size 3 --vocab-size 128256",
        cpu(3),
        "num_attention_heads 8 does not divide by tp_size 3: nearest legal num_attention_heads 6 or 9, or tp_size 2 or",
        "num_query_groups 4 does not divide by tp_size 3: nearest legal num_query_groups 3 or 6, or tp_size 2 or 4",
        "seq_length 128 does not divide by tp_size (sequence parallel) 3: nearest legal seq_length 126 or 129",
    ),
    (
        "--tp-size 8 --num-query-groups 4 --gpus-per-node 8",
        cpu(8),
        "num_query_groups 4 does not divide by tp_size 8: nearest legal num_query_groups 8, or tp_size 4",
    ),
    (
        "--tp-size 2 --ffn-hidden-size 385",
        cpu(2),
        "ffn_hidden_size 385 does not divide by tp_size 2: nearest legal ffn_hidden_size 384 or 386, or tp_size 1 or 5",
    ),
    (
        "--tp-size 5 --num-attention-heads 5 --num-query-groups 5 --ffn-hidden-size 400 --seq-length 100",
        cpu(5),
        "vocab_size 257, padded to 384, does not divide by tp_size 5: nearest legal tp_size 4 or 6",
    ),
    (
        "--pp-size 3",
        cpu(3),
        "num_layers 4 does not divide by pp_size 3: nearest legal num_layers 3 or 6, or pp_size 2 or 4",
    ),
    (
        "--pp-size 2 --vpp-size 4",
        cpu(2),
        "num_layers 4 does not divide by pp_size 2 × vpp_size 4 = 8: nearest legal num_layers 8",
    ),
    ("--vpp-size 2", cpu(), "vpp_size 2 needs pp_size > 1: virtual stages are pieces of pipeline stages"),
    ("--tp-size 2 --seq-length 127", cpu(2), "seq_length 127 does not divide by tp_size (sequence parallel) 2:"),
    ("--cp-size 4 --seq-length 100", EIGHT_H100, "seq_length 100 does not divide by 2 × cp_size 8: nearest legal"),
    (
        "--cp-size 2 --tp-size 4 --seq-length 120",
        EIGHT_H100,
        "seq_length 120 does not divide by 2 × cp_size × tp_size (sequence parallel) 16: nearest legal seq_length 112",
    ),
    # The world.
    (
        "--tp-size 4 --pp-size 2",
        cpu(4),
        "tp_size 4 × cp_size 1 × pp_size 2 = 8 ranks are more than the 4 there are (1 node, 4 devices): lower a size, "
        "or use 8 devices",
    ),
    (
        "--tp-size 4",
        DeviceSupply("cuda", (4, 2), "NVIDIA H100 80GB HBM3", 80 * GIB, 9.0),
        "6 ranks (2 nodes, 4+2 devices) do not divide by tp_size 4 × cp_size 1 × pp_size 1 = 4: use 4 or 8 devices",
    ),
    ("--num-nodes 3", cpu(), "num_nodes 3 is more than the 1 there are"),
    (
        "--global-batch-size 18",
        cpu(2),
        "global_batch_size 18 does not divide by micro_batch_size 2 × data-parallel 2 = 4: nearest legal "
        "global_batch_size 16 or 20",
    ),
    (
        "--tp-size 4 --global-batch-size 15",
        cpu(2),
        "tp_size 4 × cp_size 1 × pp_size 1 = 4 ranks are more than the 2 there are (1 node, 2 devices)",
        "global_batch_size 15 does not divide by micro_batch_size 2: nearest legal global_batch_size 14 or 16, or "
        "micro_batch_size 1 or 3",
    ),
    (
        "--pp-size 4 --vpp-size 1 --global-batch-size 12",
        cpu(4),
        "global_batch_size 12 does not divide by micro_batch_size 2 × data-parallel 1 × pp_size 4 (for virtual "
        "stages) = 8: nearest legal global_batch_size 8 or 16",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "supply", "lines"), [(argv, supply, lines) for argv, supply, *lines in BROKEN])
def test_a_broken_rule_stands_on_a_line_of_its_own(argv: str, supply: DeviceSupply, lines: list[str]) -> None:
    told = refused([*TINY, *argv.split()], supply)
    assert len(told) == len(lines)
    for line, start in zip(told, lines, strict=True):
        assert line.startswith(start)


def test_the_base_of_the_table_breaks_no_rule() -> None:
    for supply in (cpu(), cpu(4), ONE_H200, EIGHT_H100, A100):
        assert planned(TINY, supply).layout.world_size == sum(supply.per_node)


ALLOWED = [
    ("--max-position-embeddings 128", cpu()),
    ("--split 1,0,0", cpu()),
    ("--lr 1e-4 --min-lr 1e-4", cpu()),
    ("--lr-decay-samples 100 --lr-warmup-samples 99", cpu()),
    ("--train-samples 16", cpu()),
    ("--profile-step-start 6", cpu()),
    ("--enable-profiling", cpu()),
    ("--enable-profiling --profile-step-start 5", cpu()),
    ("--dtype bf16", cpu()),
    ("--dtype fp16", ONE_H200),
    ("--dtype bf16 --fp8-param-gather --optimizer-moments-dtype bf16", ONE_H200),
    ("--dtype fp8 --optimizer-moments-dtype bf16", ONE_H200),
    ("--dtype fp8 --fp8-param-gather", ONE_H200),
    ("--dtype fp8", replace(ONE_H200, capability=8.9)),
    ("--dtype fp8", replace(ONE_H200, capability=None)),
    ("--dtype fp8 --fp8-recipe mxfp8", ONE_H200),
    ("--dtype fp8 --fp8-recipe blockwise", ONE_H200),
    ("--dtype fp8 --cp-size 2 --tp-size 4 --ffn-hidden-size 448 --kv-channels 64", EIGHT_H100),
    ("--hidden-size 120 --ffn-hidden-size 100", ONE_H200),
    ("--cp-size 8 --seq-length 32", EIGHT_H100),
    ("--pp-size 2 --vpp-size 2 --global-batch-size 4", cpu(2)),
    ("--tp-size 4 --pp-size 2", cpu(8)),
    ("--num-nodes 1", cpu()),
]
"""Neighbours of the table above, each just within its rule."""


@pytest.mark.parametrize(("argv", "supply"), ALLOWED)
def test_what_keeps_every_rule_is_planned(argv: str, supply: DeviceSupply) -> None:
    assert planned([*TINY, *argv.split()], supply).device == supply.device


INDIVISIBLE = re.compile(r"^(?P<name>\w+) \d+ does not divide by (?P<by>\w+).*: nearest legal (?P<offers>.*)$")


@pytest.mark.parametrize(("argv", "supply"), [(argv, supply) for argv, supply, *_ in BROKEN])
def test_the_nearest_legal_values_keep_the_rule(argv: str, supply: DeviceSupply) -> None:
    given = [*TINY, *argv.split()]
    for match in filter(None, map(INDIVISIBLE.match, refused(given, supply))):
        for offer in match["offers"].split(", or "):
            option, values = offer.split(" ", 1)
            for value in values.split(" or "):
                told = mended([*given, f"--{option.replace('_', '-')}", value], supply)
                again = [m for m in map(INDIVISIBLE.match, told) if m and m["name"] == match["name"]]
                assert match["by"] not in [m["by"] for m in again], f"{option} {value}"


def mended(argv: list[str], supply: DeviceSupply) -> tuple[str, ...]:
    try:
        rules.plan_run(load(argv, {}), supply)
    except ConfigError as error:
        return error.problems
    return ()


def test_every_broken_rule_is_told_at_once() -> None:
    argv = ["--tp-size=3", "--pp-size=5", "--global-batch-size=100", "--micro-batch-size=3"]
    starts = [line.split(" does not")[0] for line in refused(argv, cpu(4))]
    assert starts[:5] == [
        "num_attention_heads 32",
        "num_query_groups 8",
        "ffn_hidden_size 14336",
        "num_layers 32",
        "seq_length 8192",
    ]
    assert starts[5].startswith("tp_size 3 × cp_size 1 × pp_size 5 = 15 ranks are more than the 4 there are")
    assert starts[6:] == ["global_batch_size 100"]


def test_what_holds_on_any_cluster_is_checked_before_one_is_joined() -> None:
    with pytest.raises(ConfigError) as caught:
        rules.check_anywhere(load([*TINY, "--pp-size", "3", "--tp-size", "64", "--dtype", "fp8"], {}))
    told = "\n".join(caught.value.problems)
    assert "num_layers 4 does not divide by pp_size 3" in told
    assert "ranks" not in told
    rules.check_anywhere(load([*TINY, "--dtype", "fp8"], {}))


@pytest.mark.parametrize(
    ("argv", "supply", "ranks"),
    [
        ([], EIGHT_H100, (8,)),
        (["--gpus-per-node", "4"], EIGHT_H100, (4,)),
        (["--gpus-per-node", "16"], EIGHT_H100, (8,)),
        ([], EIGHT_NODES, (8,) * 8),
        (["--num-nodes", "auto", "--gpus-per-node", "2"], EIGHT_NODES, (2,) * 8),
        (["--num-nodes", "2"], EIGHT_NODES, (8, 8)),
        (["--num-nodes", "2", "--global-batch-size", "24"], UNEQUAL, (8, 4)),
        (["--gpus-per-node", "4", "--micro-batch-size", "1", "--global-batch-size", "40"], UNEQUAL, (4, 4, 2)),
        (["--gpus-per-node", "2"], cpu(2), (2,)),
    ],
)
def test_ranks_are_all_devices_or_as_many_as_were_asked_for(
    argv: list[str], supply: DeviceSupply, ranks: tuple[int, ...]
) -> None:
    plan = planned([*TINY, "--global-batch-size", "128", *argv], supply)
    assert plan.ranks_per_node == ranks
    assert plan.layout.world_size == plan.layout.dp == sum(ranks)


@pytest.mark.parametrize(
    ("argv", "supply", "lines"),
    [
        (["--gpus-per-node", "8"], EIGHT_H100, []),
        (["--gpus-per-node", "16"], EIGHT_H100, ["gpus_per_node 16 is more than there are: 8 are used"]),
        (["--gpus-per-node", "8"], UNEQUAL, ["gpus_per_node 8 is more than there are: 4, 8, 2 are used"]),
        (["--gpus-per-node", "8", "--num-nodes", "1"], UNEQUAL, []),
        (["--sequence-parallel"], EIGHT_H100, ["sequence_parallel needs tp_size > 1: switched off"]),
        (["--sequence-parallel", "--tp-size", "2"], EIGHT_H100, []),
        (["--sequence-parallel=auto"], EIGHT_H100, []),
        (
            ["--tokenizer-type", "HuggingFaceTokenizer"],
            EIGHT_H100,
            ["tokenizer_type HuggingFaceTokenizer is not used: the data says NullTokenizer"],
        ),
        (["--tokenizer-type", "NullTokenizer"], EIGHT_H100, []),
    ],
)
def test_a_value_that_is_used_differently_is_told_in_one_line(
    argv: list[str], supply: DeviceSupply, lines: list[str]
) -> None:
    assert rules.adjustments(load(argv, {}).config, supply) == lines


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], False),
        (["--sequence-parallel"], False),
        (["--tp-size", "2"], True),
        (["--tp-size", "2", "--sequence-parallel", "auto"], True),
        (["--tp-size", "2", "--no-sequence-parallel"], False),
    ],
)
def test_sequence_parallel_is_on_with_tensor_parallel_unless_told_otherwise(argv: list[str], expected: bool) -> None:
    assert planned([*TINY, *argv], cpu(2)).layout.sequence_parallel is expected


def test_without_sequence_parallel_the_sequence_need_not_divide_by_tp() -> None:
    assert planned([*TINY, "--tp-size", "2", "--seq-length", "127", "--no-sequence-parallel"], cpu(2)).layout.tp == 2


def test_the_layout_divides_the_world() -> None:
    argv = ["--tp-size=2", "--cp-size=2", "--pp-size=4", "--vpp-size=1", "--global-batch-size=64"]
    layout = planned([*TINY, *argv], EIGHT_NODES).layout
    assert (layout.world_size, layout.tp, layout.cp, layout.pp, layout.dp, layout.vpp) == (64, 2, 2, 4, 4, 1)
    assert layout.num_micro_batches == 8


@pytest.mark.parametrize(("vocab_size", "padded"), [(128256, 128256), (257, 384), (128, 128), (129, 256)])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_the_padded_vocabulary_does_not_depend_on_tensor_parallelism(vocab_size: int, padded: int, tp: int) -> None:
    argv = [*TINY, "--vocab-size", str(vocab_size), "--tp-size", str(tp), "--num-query-groups", "8"]
    assert planned(argv, EIGHT_H100).padded_vocab_size == padded


@pytest.mark.parametrize(
    ("argv", "steps", "warmup", "decay"),
    [
        ([], 1_953_125_000 // 16, 3_906_252, 1_949_218_748),
        (["--train-iters", "100"], 100, 16, 1600),
        (["--train-samples", "1000"], 62, 10, 1000),
        (["--fast-test-mode"], 31, 100, 800),
    ],
)
def test_the_number_of_steps_follows_samples_or_iterations(
    argv: list[str], steps: int, warmup: int, decay: int
) -> None:
    plan = planned([*TINY, *argv], cpu())
    assert (plan.train_steps, plan.warmup_samples, plan.decay_samples) == (steps, warmup, decay)


DEFAULT_FOLDERS = ("checkpoints/{}", "tensorboard_logs/{}", "logs/{}", "benchmark_cache_{}")
RUN = "llama3-8b-training"


@pytest.mark.parametrize(
    ("argv", "folders"),
    [
        ([], [folder.format(RUN) for folder in DEFAULT_FOLDERS]),
        (["--exp-name", "x"], [folder.format("x") for folder in DEFAULT_FOLDERS]),
        (["c", "t"], ["c", "t", f"logs/{RUN}", f"benchmark_cache_{RUN}"]),
        (["--save=/c", "--logs-path=/l", "--data-cache-path=d"], ["/c", f"tensorboard_logs/{RUN}", "/l", "d"]),
        (
            ["--use-exp-structure", "--exp-name", "x", "--save=/c", "--tensorboard-dir=/t", "--logs-path=/l"],
            ["experiments/x/checkpoints", "experiments/x/tensorboard", "experiments/x/logs", "benchmark_cache_x"],
        ),
        (
            ["--use-exp-structure", "1", "--exp-dir", "/e"],
            [f"/e/{RUN}/checkpoints", f"/e/{RUN}/tensorboard", f"/e/{RUN}/logs", f"benchmark_cache_{RUN}"],
        ),
    ],
)
def test_folders_have_the_scripts_names_and_are_absolute(argv: list[str], folders: list[str]) -> None:
    paths = rules.run_paths(load(argv, {}).config, Path("/base"))
    assert [paths.checkpoints, paths.tensorboard, paths.logs, paths.data_cache] == [Path("/base") / f for f in folders]


def test_a_folder_below_home_may_be_written_with_a_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    paths = rules.run_paths(load(["--save", "~/c"], {}).config, Path("/base"))
    assert paths.checkpoints == Path("/home/someone/c")


@pytest.mark.parametrize(
    ("tokenizer", "data", "mock"),
    [
        ("MOCK", "MOCK", True),
        ("mock", "/data", True),
        ("tok.json", "MOCK", True),
        ("", "/data", True),
        ("tok.json", "/data", False),
        ("/models/llama3", "PYTHON_STDLIB", False),
    ],
)
def test_mock_data_when_either_says_so_or_there_is_no_tokenizer(tokenizer: str, data: str, mock: bool) -> None:
    argv = [*TINY, "--tokenizer-arg", tokenizer, "--data-arg", data]
    plan = planned(argv, cpu())
    assert plan.mock_data is mock
    assert rules.tokenizer_type(plan.config) == ("NullTokenizer" if mock else "HuggingFaceTokenizer")


def test_with_nothing_given_data_are_made_up() -> None:
    assert rules.is_mock(Config())


def test_8b_on_a_cpu_is_refused_with_the_memory_it_needs_and_the_demos_command() -> None:
    (line,) = refused(["--dtype", "bf16"], cpu())
    assert line.startswith("a model of 8.03 billion parameters needs about ")
    need = re.search(r"about (\d+) GiB a device \(weights 15\.0, gradients 15\.0, optimizer 89\.7, activations", line)
    assert need
    assert int(need[1]) > 119
    assert "a process on this CPU has 24 GiB" in line
    assert "make demo" in line
    assert "--config configs/demo.toml" in line


TWO_H100, H100S = replace(EIGHT_H100, per_node=(2,)), EIGHT_H100
SEVENTY_B = ["--num-layers", "80", "--hidden-size", "8192", "--ffn-hidden-size", "28672", "--num-attention-heads", "64"]


@pytest.mark.parametrize(
    ("argv", "supply", "remedy"),
    [
        (["--optimizer-moments-dtype", "fp32"], ONE_H200, "--optimizer-moments-dtype bf16"),
        (["--seq-length", "16384"], ONE_H200, "--recompute-modules mlp"),
        (["--seq-length", "65536"], ONE_H200, "--recompute-modules layer"),
        (["--dtype", "fp32"], ONE_H200, "--recompute-modules layer"),
        (["--micro-batch-size", "2"], H100S, "--micro-batch-size 1"),
        (["--dtype", "fp16"], H100S, "--recompute-modules mlp"),
        ([], TWO_H100, "--recompute-modules mlp"),
    ],
)
def test_a_model_too_large_for_a_gpu_is_refused_with_the_nearest_that_fits(
    argv: list[str], supply: DeviceSupply, remedy: str
) -> None:
    (line,) = refused(argv, supply)
    fact, told = line.split(" GiB: ")
    assert f"; {supply.device_name} has " in fact
    found = re.fullmatch(r"nearest that fits: (.*) \(about (\d+) GiB\)", told)
    assert found
    assert found[1] == remedy
    # What it says is so, and the plan that it leads to is not even tight.
    plan = planned([*argv, *remedy.split()], supply)
    total = estimate.memory(plan.config, plan.layout, "cuda", plan.moments_dtype).total
    assert round(total / GIB) == int(found[2])
    assert not rules.tight_memory(plan, supply)


@pytest.mark.parametrize(
    ("argv", "supply", "devices"),
    [
        (["--no-use-distributed-optimizer"], ONE_H200, 2),
        (["--dtype", "fp32"], replace(EIGHT_H100, per_node=(1,)), 2),
        ([], replace(EIGHT_H100, per_node=(1,)), 2),
        (SEVENTY_B, EIGHT_H100, 16),
    ],
)
def test_where_nothing_fits_the_number_of_devices_that_would_do_is_told(
    argv: list[str], supply: DeviceSupply, devices: int
) -> None:
    (line,) = refused(argv, supply)
    assert line.endswith(f" GiB: nothing fits {sum(supply.per_node)} of them; {devices} would do")


def test_a_model_that_fits_no_number_of_devices_is_told_so() -> None:
    (line,) = refused(["--seq-length", str(2**24)], ONE_H200)
    assert line.endswith("use a smaller model, or GPUs with more memory")


@pytest.mark.parametrize(
    "remedy",
    [
        *(["--tp-size", "2"], ["--pp-size", "2"], ["--seq-length", "4096"], ["--optimizer-moments-dtype", "bf16"]),
        *(["--micro-batch-size", "1"], ["--recompute-modules", "mlp"], ["--recompute-modules", "layer"]),
    ],
)
def test_each_remedy_helps(remedy: list[str]) -> None:
    unlimited = replace(EIGHT_H100, memory_bytes=None)
    before, after = (planned(["--micro-batch-size", "2", *more], unlimited) for more in ([], remedy))
    assert (
        estimate.memory(after.config, after.layout, "cuda").total
        < estimate.memory(before.config, before.layout, "cuda").total
    )


@pytest.mark.parametrize(
    ("argv", "supply", "moments"),
    [
        ([], ONE_H200, "bf16"),
        ([], H100S, "bf16"),
        ([], EIGHT_NODES, "fp32"),
        (["--optimizer-moments-dtype", "bf16"], EIGHT_NODES, "bf16"),
        (["--num-layers", "8"], ONE_H200, "fp32"),
        (TINY, cpu(), "fp32"),
    ],
)
def test_moments_are_fp32_unless_only_bf16_fits(argv: list[str], supply: DeviceSupply, moments: str) -> None:
    assert planned(argv, supply).moments_dtype == moments


@pytest.mark.parametrize(
    ("argv", "supply", "line"),
    [
        (["--kv-channels", "64"], ONE_H200, "fp8_attention needs kv_channels 128, not 64"),
        (["--fp8-recipe", "tensorwise"], ONE_H200, "fp8_attention needs fp8_recipe delayed, not tensorwise"),
        (
            ["--num-layers", "4"],
            replace(ONE_H200, device_name="NVIDIA L40S", capability=8.9),
            "fp8_attention needs compute capability 9.0 or more; NVIDIA L40S has 8.9",
        ),
    ],
)
def test_attention_in_fp8_is_refused_where_there_is_no_kernel(argv: list[str], supply: DeviceSupply, line: str) -> None:
    (told,) = refused([*argv, "--dtype", "fp8", "--fp8-attention"], supply)
    assert told.startswith(line)
    assert planned([*argv, "--dtype", "fp8"], supply)
    assert planned([*argv, "--dtype", "bf16", "--fp8-attention"], supply)


def test_8b_fits_one_h200_with_moments_in_bf16() -> None:
    assert planned(["--optimizer-moments-dtype", "bf16"], ONE_H200).layout.world_size == 1


def test_memory_is_not_judged_where_the_cluster_does_not_say_how_much_there_is() -> None:
    assert planned([], DeviceSupply("cuda", (1,), "H100")).layout.world_size == 1


@pytest.mark.parametrize(
    ("supply", "cores", "environ", "threads"),
    [
        (cpu(1), 8, {}, "8"),
        (cpu(2), 8, {}, "4"),
        (cpu(2), 16, {}, "4"),
        (cpu(2), 2, {}, "1"),
        (cpu(4), 2, {}, "1"),
        (EIGHT_H100, 16, {}, "2"),
        (EIGHT_H100, 16, {"OMP_NUM_THREADS": "7"}, "7"),
    ],
)
def test_threads_are_a_ranks_share_of_its_nodes_cores(
    supply: DeviceSupply, cores: int, environ: dict[str, str], threads: str
) -> None:
    plan = rules.plan_run(load(TINY, environ), supply, cores)
    assert plan.worker_environment["OMP_NUM_THREADS"] == threads


def test_the_plan_carries_the_peak_of_the_device_at_this_precision() -> None:
    assert planned([*TINY, "--dtype", "fp8"], EIGHT_H100).peak_flops == 1979e12
    assert planned(TINY, cpu()).peak_flops is None


def test_a_node_that_the_driver_could_not_ask_is_checked_by_its_own_rank() -> None:
    unknown = DeviceSupply("cuda", (8,))
    fp8 = planned(["--dtype", "fp8", "--tp-size", "8"], unknown)
    assert rules.unfit(fp8, "NVIDIA H100 80GB HBM3", 80 * GIB, 9.0) == []
    assert rules.unfit(fp8, "NVIDIA A100-SXM4-80GB", 80 * GIB, 8.0) == [
        "dtype fp8 needs compute capability 8.9 or more; NVIDIA A100-SXM4-80GB has 8.0: use --dtype bf16"
    ]
    (line,) = rules.unfit(fp8, "NVIDIA L40", 8 * GIB, 8.9)
    assert "NVIDIA L40 has 8 GiB" in line


def test_a_device_of_the_same_kind_may_report_a_little_less_memory() -> None:
    plan = planned([], ONE_H200)
    need = int(estimate.memory(plan.config, plan.layout, "cuda", plan.moments_dtype).total)
    tight = replace(plan, supply=replace(ONE_H200, memory_bytes=need))
    assert rules.unfit(tight, "NVIDIA H200", int(0.99 * need), 9.0) == []
    assert len(rules.unfit(tight, "NVIDIA H200", int(0.9 * need), 9.0)) == 1
