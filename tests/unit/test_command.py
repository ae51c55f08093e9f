from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from command import REPOSITORY, Ended, run
from planning import EIGHT_NODES, GIB, cpu, planned

from raytrain_llama3 import __version__
from raytrain_llama3.config.plan import DeviceSupply
from raytrain_llama3.config.schema import Config, flag_of

FITTING = {
    "demo.toml": cpu(2),
    "llama3_8b.toml": DeviceSupply("cuda", (8,), "NVIDIA H200", 140 * GIB, 9.0),
    "llama3_70b.toml": EIGHT_NODES,
}
HEAVY = {"torch", "ray", "megatron", "megatron.core", "tensorboard", "transformer_engine"}


def assert_refused_at_once(ended: Ended) -> None:
    assert ended.code == 2
    assert ended.out == ""
    assert "raytrain_llama3.cli" in ended.imported
    assert not HEAVY & ended.imported
    assert ended.cpu_s < 2
    assert all(line.startswith("error: ") for line in ended.errors)


def test_every_broken_rule_on_a_line_of_its_own_before_torch_or_ray() -> None:
    argv = "--tp-size 3 --pp-size 5 --global-batch-size 100 --micro-batch-size 3 --device cpu --gpus-per-node 4"
    ended = run(*argv.split())
    assert_refused_at_once(ended)
    assert [line.split(" does not")[0].split(" =")[0] for line in ended.errors] == [
        "error: num_attention_heads 32",
        "error: num_query_groups 8",
        "error: ffn_hidden_size 14336",
        "error: num_layers 32",
        "error: seq_length 8192",
        "error: tp_size 3 × cp_size 1 × pp_size 5",
        "error: global_batch_size 100",
    ]


def test_on_a_named_cluster_too_before_ray_is_imported() -> None:
    ended = run("--pp-size", "5", environ={"RAY_ADDRESS": "127.0.0.1:1"})
    assert_refused_at_once(ended)
    assert ended.errors[0].startswith("error: num_layers 32 does not divide by pp_size 5")


def test_what_cannot_be_read_is_told_at_once_with_file_and_line_flag_and_variable(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("# sizes\ntp_sise = 2\n")
    ended = run(
        *("--config", "run.toml", "--dtype", "int8", "--pp-sise", "2"), cwd=tmp_path, environ={"LEARNING_RATE": "fast"}
    )
    assert_refused_at_once(ended)
    assert sorted(ended.errors) == [
        "error: --dtype int8: must be 'bf16', 'fp8', 'fp16' or 'fp32'",
        "error: --pp-sise: there is no such option; did you mean --pp-size or --vpp-size?",
        "error: LEARNING_RATE=fast: must be a valid number",
        "error: run.toml:2: tp_sise: there is no such option; did you mean tp_size or pp_size?",
    ]


@pytest.mark.parametrize(
    ("argv", "environ", "start"),
    [
        (["--config", "unknown.toml"], {}, "error: unknown.toml:1: tp_sise: there is no such option"),
        (["--dtype", "int8"], {}, "error: --dtype int8: must be"),
        ([], {"LEARNING_RATE": "fast"}, "error: LEARNING_RATE=fast: must be"),
        (["--config=configs/demo.toml", "--dtype", "fp8", "--device", "cpu"], {}, "error: dtype fp8 needs a GPU"),
        (["--config=configs/demo.toml", "--cp-size", "2", "--device", "cpu"], {}, "error: cp_size 2 needs GPUs"),
    ],
)
def test_one_mistake_is_one_line(argv: list[str], environ: dict[str, str], start: str, tmp_path: Path) -> None:
    (tmp_path / "unknown.toml").write_text("tp_sise = 2\n")
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    ended = run(*argv, cwd=tmp_path, environ=environ)
    assert_refused_at_once(ended)
    assert len(ended.errors) == 1
    assert ended.errors[0].startswith(start)


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a GPU")
def test_8b_on_a_machine_without_a_gpu_is_refused_with_its_memory_and_the_demos_command() -> None:
    ended = run("--dtype", "bf16")
    assert_refused_at_once(ended)
    (line,) = ended.errors
    assert re.search(r"a model of 8\.03 billion parameters needs about \d+ GiB", line)
    assert "make demo" in line
    assert "--config configs/demo.toml" in line


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a GPU")
def test_a_gpu_that_is_asked_for_and_not_there_is_refused() -> None:
    ended = run("--device", "cuda")
    assert_refused_at_once(ended)
    assert ended.errors == [
        "error: device=cuda: nvidia-smi shows no GPU on this machine; install the driver, or use device=cpu"
    ]


def test_help_shows_every_option_and_command() -> None:
    ended = run("--help")
    assert ended.code == 0
    assert not HEAVY & ended.imported
    shown = {line.split()[0] for line in ended.out.splitlines() if line.startswith("  --")}
    assert shown == {"--config", "--env-file"} | {flag_of(name) for name in Config.model_fields}
    assert all(f"raytrain-llama3 {command}" in ended.out for command in ("[train]", "plan", "data"))


def test_version() -> None:
    ended = run("--version")
    assert (ended.code, ended.out) == (0, __version__ + "\n")


def test_plan_shows_the_run_and_every_option_and_starts_nothing(tmp_path: Path) -> None:
    demo = REPOSITORY / "configs" / "demo.toml"
    ended = run("plan", "--config", str(demo), "--use-bf16", cwd=tmp_path, environ={"SEED": "7"})
    assert (ended.code, ended.errors) == (0, [])
    assert not HEAVY & ended.imported
    assert list(tmp_path.iterdir()) == []
    summary, options = ended.out.split("\nevery option:\n")
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in summary.splitlines() if line.startswith("  ")}
    assert rows["devices"] == "2 × CPU on 1 node: TP 1 × CP 1 × PP 1 × DP 2"
    assert rows["batch"] == "16 samples = 2 data-parallel × 1 micro-batch(es) × 8"
    assert rows["checkpoints"] == str(tmp_path / "checkpoints" / "demo")
    assert "SEED 7" in summary
    assert "note: --use-bf16 says 1, but dtype=fp32 decides: use_bf16 is not used" in summary.splitlines()
    assert {line.split()[0] for line in options.splitlines() if line.startswith("  ")} == set(Config.model_fields)


def test_text_becomes_shards_that_can_be_looked_at(tmp_path: Path) -> None:
    texts = {"a.txt": "To be, or not to be", "b.txt": "that is the question"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    made = run("data", "tokenize", "--input", "a.txt", "b.txt", "--output", "out", cwd=tmp_path)
    assert (made.code, made.errors) == (0, [])
    assert not {"torch", "ray"} & made.imported
    assert made.out.splitlines()[-1] == "train on it: --data-arg out --tokenizer-arg bytes --vocab-size 257"
    looked = run("data", "inspect", "out", cwd=tmp_path)
    assert looked.code == 0
    rows = {line.split()[0]: line.split()[1].strip(",") for line in looked.out.splitlines()}
    assert rows["documents"] == "2"
    assert rows["tokens"] == str(sum(len(text) + 1 for text in texts.values()))


def test_preprocess_datas_own_flags_and_there_and_back(tmp_path: Path) -> None:
    (tmp_path / "in.json").write_text("".join(f'{{"body": "line {i}"}}\n' for i in range(9)))
    flags = ("--input", "in.json", "--output-prefix", "out/x", "--json-keys", "body", "--append-eod")
    made = run(
        "data", "tokenize", *flags, "--tokenizer-type", "ByteTokenizer", "--tokenizer-model", "bytes", cwd=tmp_path
    )
    assert (made.code, made.errors) == (0, [])
    assert "note: --tokenizer-type ByteTokenizer is not used" in made.out
    assert "--data-arg out/x_body_document " in made.out.splitlines()[-1]
    there = run(
        "data", "convert", "--input", "out/x_body_document", "--output", "back", "--to", "indexed", cwd=tmp_path
    )
    assert (there.code, sorted(p.name for p in tmp_path.glob("back.*"))) == (0, ["back.bin", "back.idx"])
    back = run("data", "convert", "--input", "back", "--output", "again", "--to", "arrow", cwd=tmp_path)
    assert back.code == 0
    shard = "shard-00000.arrow"
    assert (tmp_path / "again" / shard).read_bytes() == (tmp_path / "out" / "x_body_document" / shard).read_bytes()
    neither = run("data", "tokenize", "--input", "in.json", cwd=tmp_path)
    assert (neither.code, neither.errors) == (
        2,
        ["error: data tokenize: give --output or --output-prefix, one of the two"],
    )


def test_a_folder_that_holds_no_dataset_is_refused(tmp_path: Path) -> None:
    ended = run("data", "inspect", str(tmp_path))
    assert ended.code == 2
    (line,) = ended.errors
    assert line.startswith("error: ")
    assert str(tmp_path) in line


@pytest.mark.parametrize("name", sorted(path.name for path in (REPOSITORY / "configs").glob("*.toml")))
def test_every_preset_plans_on_machines_that_fit_it(name: str) -> None:
    plan = planned(["--config", str(REPOSITORY / "configs" / name)], FITTING[name])
    assert plan.layout.world_size == sum(FITTING[name].per_node)
    assert plan.train_steps > 0
