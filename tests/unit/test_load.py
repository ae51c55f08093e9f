from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from planning import set_by, unreadable

from raytrain_llama3.config import pods
from raytrain_llama3.config.load import load, table
from raytrain_llama3.config.schema import Config


def toml(folder: Path, text: str, name: str = "run.toml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_with_nothing_given_every_option_is_at_its_default() -> None:
    loaded = load([], {})
    assert loaded.config == Config()
    assert loaded.origins == {}
    assert loaded.warnings == ()


@pytest.mark.parametrize(
    ("argv", "environ", "with_file", "value", "origin"),
    [
        (["--tp-size", "8"], {"TP_SIZE": "4"}, True, 8, "--tp-size"),
        ([], {"TP_SIZE": "4"}, True, 4, "TP_SIZE"),
        (["--tensor-model-parallel-size=8"], {"TP_SIZE": "4"}, False, 8, "--tensor-model-parallel-size"),
        ([], {}, True, 2, "run.toml:2"),
        ([], {"TP_SIZE": ""}, True, 2, "run.toml:2"),
        ([], {"TP_SIZE": ""}, False, 1, None),
        ([], {}, False, 1, None),
    ],
)
def test_a_flag_wins_over_the_environment_that_over_a_file_that_over_the_default(
    argv: list[str],
    environ: dict[str, str],
    with_file: bool,
    value: int,
    origin: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    toml(tmp_path, "# sizes\ntp_size = 2\n")
    loaded = load([*(["--config", "run.toml"] if with_file else []), *argv], environ)
    assert loaded.config.tp_size == value
    assert loaded.origins.get("tp_size") == origin


def test_of_two_files_the_later_wins(tmp_path: Path) -> None:
    first = toml(tmp_path, "tp_size = 2\npp_size = 2\n", "first.toml")
    second = toml(tmp_path, "\n\ntp_size = 4\n", "second.toml")
    assert set_by(load(["--config", first, "--config", second], {})) == {
        "tp_size": (4, f"{second}:3"),
        "pp_size": (2, f"{first}:2"),
    }


def test_every_option_is_a_flag_a_variable_and_a_key(tmp_path: Path) -> None:
    # Those that a pod's variables give are in test_pods.py.
    values = {name: written(name) for name in Config.model_fields if name not in pods.OPTIONS}
    flags = load([f"--{name.replace('_', '-')}={value}" for name, value in values.items()], {})
    variables = load([], {name.upper(): value for name, value in values.items()})
    file = load(["--config", toml(tmp_path, "".join(f"{n} = '{v}'\n" for n, v in values.items()))], {})
    assert flags.config == variables.config == file.config
    changed = [name for name in values if getattr(flags.config, name) != Config.model_fields[name].default]
    assert sorted(set(values) - set(changed)) == ["ckpt_format", "fast_test_mode"]


def written(name: str) -> str:
    """A value that `name` may have, another than its default where there is one."""
    special = {
        "fast_test_mode": "0",
        "pods": "0",
        "ray_port": "7000",
        "split": "98,1,1",
        "empty_unused_memory_level": "2",
    }
    special |= {"recompute_modules": "mlp", "offload_modules": "core_attn, attn_proj", "profile_ranks": "0,3"}
    special |= {"straggler_factor": "2.5", "rehearse_faults": "0:1:5:kill, 1:0:9:stop"}
    if name in special:
        return special[name]
    field = Config.model_fields[name]
    if get_origin(field.annotation) is Literal:
        return max(get_args(field.annotation), key=lambda choice: choice != field.default)
    kinds = str(field.annotation)
    if "bool" in kinds:
        return "0" if field.default is True else "1"
    return "0.25" if "float" in kinds else "7" if "int" in kinds else "other"


@pytest.mark.parametrize("value", ["1", "true", "True", "yes", "on"])
@pytest.mark.parametrize("text", ["--use-exp-structure={}", "USE_EXP_STRUCTURE"])
def test_words_for_yes(value: str, text: str) -> None:
    argv, environ = ([text.format(value)], {}) if "{" in text else ([], {text: value})
    assert load(argv, environ).config.use_exp_structure is True


@pytest.mark.parametrize(
    ("argv", "environ", "line"),
    [
        (["--dtype", "int8"], {}, "--dtype int8: must be 'bf16', 'fp8', 'fp16' or 'fp32'"),
        ([], {"LEARNING_RATE": "fast"}, "LEARNING_RATE=fast: must be a valid number"),
        ([], {"TP_SIZE": "two"}, "TP_SIZE=two: must be a valid integer"),
        (["--tp-size=0"], {}, "--tp-size 0: must be greater than 0"),
        (["--tp-size", "1.5"], {}, "--tp-size 1.5: must be a valid integer"),
        (["--num-nodes", "some"], {}, "--num-nodes some: must be 'auto' or a valid integer"),
        (["--sequence-parallel=maybe"], {}, "--sequence-parallel maybe: must be 'auto' or a valid boolean"),
        (["--hidden-dropout", "1"], {}, "--hidden-dropout 1: must be less than 1"),
        (["--split", "99,1"], {}, "--split 99,1: must be three numbers such as 99,1,0"),
        ([], {"SPLIT": "all"}, "SPLIT=all: must be three numbers such as 99,1,0"),
        (["--split", "99,1,-1"], {}, "--split 99,1,-1: must be three numbers such as 99,1,0"),
        (["--seed", "-1"], {}, "--seed -1: must be greater than or equal to 0"),
    ],
)
def test_a_value_that_cannot_be_read_is_named_with_its_flag_or_variable(
    argv: list[str], environ: dict[str, str], line: str
) -> None:
    assert unreadable(argv, environ) == (line,)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("tp_size = 2\n\ndtype = 'int8'\n", ":3: dtype = 'int8': must be 'bf16', 'fp8', 'fp16' or 'fp32'"),
        ("# tp_sise\ntp_sise = 2\n", ":2: tp_sise: there is no such option; did you mean tp_size"),
        ("'learning_rate' = 'fast'\n", ":1: learning_rate = 'fast': must be a valid number"),
        ("zzz = 1\n", ":1: zzz: there is no such option"),
        ("\n[model]\ntp_size = 2\n", ":2: model: there is no such option"),
        ("seq_length = [8192]\n", ":1: seq_length = [8192]: must be a valid integer"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_file_and_line(text: str, line: str, tmp_path: Path) -> None:
    path = toml(tmp_path, text)
    (told,) = unreadable(["--config", path])
    assert told.startswith(f"{path}{line}")


def test_text_that_is_not_toml_is_named_with_its_line(tmp_path: Path) -> None:
    path = toml(tmp_path, "tp_size = 2\npp_size = = 3\n")
    (told,) = unreadable(["--config", path])
    assert told.startswith(f"{path}: is not TOML")
    assert "line 2" in told


def test_bytes_that_are_no_text_are_not_toml(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"exp_name = '\xff'\n")
    (told,) = unreadable(["--config", str(path)])
    assert told.startswith(f"{path}: is not TOML")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none.toml"
    assert unreadable(["--config", str(path)]) == (f"--config {path}: cannot be read: No such file or directory",)


def test_every_mistake_of_every_source_is_told_at_once(tmp_path: Path) -> None:
    path = toml(tmp_path, "tp_sise = 2\nseed = 'x'\n")
    lines = unreadable(
        ["--config", path, "--config", "none.toml", "--dtype", "int8", "--pp-sise", "2", "--swiglu", "0"],
        {"LEARNING_RATE": "fast", "SPLIT": "1"},
    )
    starts = ["--pp-sise", "--swiglu 0", "--config none.toml", f"{path}:1", f"{path}:2", "LEARNING_RATE", "SPLIT"]
    starts.append("--dtype int8")
    assert len(lines) == len(starts)
    assert all(any(line.startswith(start) for line in lines) for start in starts)


def test_a_value_that_a_stronger_source_replaces_is_not_a_mistake() -> None:
    assert load(["--learning-rate", "1e-3"], {"LEARNING_RATE": "fast"}).config.learning_rate == 1e-3


def test_variables_of_other_programs_are_not_ours() -> None:
    assert load([], {"PATH": "/bin", "WORLD_SIZES": "x", "TP_SISE": "2", "tp_size": "2"}).config == Config()


def test_the_cluster_named_by_ray_address_is_joined() -> None:
    assert load([], {"RAY_ADDRESS": "10.0.0.1:6379"}).config.ray_address == "10.0.0.1:6379"


def test_fast_test_mode_wins_and_says_so_in_one_line() -> None:
    loaded = load(["--global-batch-size", "64", "--train-iters=7"], {"FAST_TEST_MODE": "1", "TRAIN_SAMPLES": "9"})
    c = loaded.config
    assert (c.train_samples, c.lr_decay_samples, c.lr_warmup_samples, c.global_batch_size) == (1000, 800, 100, 32)
    assert c.train_iters is None
    (line,) = loaded.warnings
    assert line == (
        "fast_test_mode: train_samples 1000, lr_decay_samples 800, lr_warmup_samples 100, global_batch_size 32 "
        "(over train_samples from TRAIN_SAMPLES, global_batch_size from --global-batch-size, train_iters from "
        "--train-iters)"
    )
    assert loaded.origins["train_samples"] == loaded.origins["global_batch_size"] == "fast_test_mode"
    assert "train_iters" not in loaded.origins


def test_fast_test_mode_with_nothing_to_win_over_names_nothing() -> None:
    assert load(["--fast-test-mode"], {}).warnings == (
        "fast_test_mode: train_samples 1000, lr_decay_samples 800, lr_warmup_samples 100, global_batch_size 32",
    )


@pytest.mark.parametrize(
    ("argv", "environ", "said"),
    [
        (["--dtype", "fp16"], {}, None),
        (["--dtype", "fp32"], {}, None),
        (["--dtype", "bf16"], {"USE_BF16": "1"}, None),
        (["--dtype", "fp8"], {"USE_BF16": "1"}, None),
        (["--dtype", "fp16"], {"USE_BF16": "0"}, None),
        (["--dtype", "fp16"], {"USE_BF16": "1"}, "USE_BF16 says 1, but dtype=fp16 decides"),
        (["--fp16", "--bf16"], {}, "--bf16 says 1, but dtype=fp16 decides"),
        ([], {"USE_BF16": "0"}, "USE_BF16 says 0, but dtype=bf16 decides"),
        ([], {"USE_BF16": "0", "DTYPE": "fp8"}, "USE_BF16 says 0, but dtype=fp8 decides"),
    ],
)
def test_dtype_decides_and_a_contradiction_is_one_warning(
    argv: list[str], environ: dict[str, str], said: str | None
) -> None:
    warnings = load(argv, environ).warnings
    assert len(warnings) == (said is not None)
    assert said is None or warnings[0].startswith(said)


@pytest.mark.parametrize(("value", "said"), [("/opt/megatron/pretrain_gpt.py", True), ("", False)])
def test_the_scripts_path_to_its_training_script_is_one_line(value: str, said: bool) -> None:
    warnings = load([], {"PRETRAIN_SCRIPT_PATH": value}).warnings
    assert warnings == ((f"PRETRAIN_SCRIPT_PATH={value} is not used: this package is the script",) if said else ())


@pytest.mark.parametrize(
    ("argv", "decay", "warmup"),
    [
        ([], 1_949_218_748, 3_906_252),
        (["--train-iters", "100", "--global-batch-size", "16"], 1600, 16),
        (["--train-samples", "5000"], 5000, 50),
        (["--train-iters", "100", "--global-batch-size", "16", "--lr-decay-samples", "800"], 800, 8),
        (["--train-iters", "100", "--global-batch-size", "16", "--lr-decay-samples", "9999"], 9999, 16),
        (["--train-iters", "100", "--global-batch-size", "16", "--lr-warmup-samples", "320"], 1600, 320),
        (["--train-iters", "1", "--global-batch-size", "1"], 1, 0),
        (["--lr-warmup-samples", "7"], 1_949_218_748, 7),
    ],
)
def test_the_schedule_follows_the_length_of_training_where_only_that_is_set(
    argv: list[str], decay: int, warmup: int
) -> None:
    config = load(argv, {}).config
    assert (config.lr_decay_samples, config.lr_warmup_samples) == (decay, warmup)


@pytest.mark.parametrize("cause", ["train_iters", "train_samples"])
def test_a_value_that_follows_another_says_which(cause: str) -> None:
    assert load([], {cause.upper(): "100"}).origins == {
        cause: cause.upper(),
        "lr_decay_samples": f"follows {cause}",
        "lr_warmup_samples": f"follows {cause}",
    }


def test_the_table_shows_every_option_with_its_source(tmp_path: Path) -> None:
    path = toml(tmp_path, "hidden_size = 128\n")
    lines = table(load(["--config", path, "--no-manual-gc"], {"SPLIT": "98,1.5,0.5"})).splitlines()
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line.startswith("  ")}
    assert set(rows) == set(Config.model_fields)
    assert rows["hidden_size"] == f"128 ({path}:1)"
    assert rows["manual_gc"] == "0 (--no-manual-gc)"
    assert rows["split"] == "98,1.5,0.5 (SPLIT)"
    assert rows["vpp_size"] == "unset"
