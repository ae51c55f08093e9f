from __future__ import annotations

import pytest

from raytrain_llama3.config import flags, schema
from raytrain_llama3.config.load import load


def given(*argv: str) -> dict[str, object]:
    line = flags.parse(argv)
    assert line.problems == []
    return {assignment.name: assignment.raw for assignment in line.assignments}


def problems(*argv: str) -> list[str]:
    return flags.parse(argv).problems


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--tp-size", "2"], {"tp_size": "2"}),
        (["--tp-size=2"], {"tp_size": "2"}),
        (["--tp_size", "2"], {"tp_size": "2"}),
        (["--tp_size=2"], {"tp_size": "2"}),
        (["--tp-size 2"], {"tp_size": "2"}),
        (["--fp8-format hybrid"], {"fp8_format": "hybrid"}),
        (["--fp8-format hybrid", "--fp8-recipe delayed"], {"fp8_format": "hybrid", "fp8_recipe": "delayed"}),
        (["--split '99,1,0'"], {"split": "99,1,0"}),
        (["--split", "'99,1,0'"], {"split": "99,1,0"}),
        (["--split='99,1,0'"], {"split": "99,1,0"}),
        (['--split "99,1,0"'], {"split": "99,1,0"}),
        (["--attention-backend  fused "], {"attention_backend": "fused"}),
        (["--exp-name", "two words"], {"exp_name": "two words"}),
        (["--exp-name=two words"], {"exp_name": "two words"}),
        (["--exp-name", ""], {"exp_name": ""}),
        (["--exp-name", "'a\""], {"exp_name": "'a\""}),
        (["--exp-name", "'"], {"exp_name": "'"}),
        (["--save", "/a/b"], {"checkpoint_path": "/a/b"}),
        (["--data-arg", "a=b"], {"data_arg": "a=b"}),
        (["--tp-size", "2", "--tp-size", "4"], {"tp_size": "4"}),
    ],
)
def test_a_value_may_stand_apart_after_an_equals_sign_or_in_the_flags_own_word(
    argv: list[str], expected: dict[str, str]
) -> None:
    assert given(*argv) == expected


def test_quotes_that_no_shell_removed_do_not_reach_the_value() -> None:
    assert load(["--split '98,1.5,0.5'"], {}).config.split == (98, 1.5, 0.5)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--sequence-parallel"], {"sequence_parallel": "1"}),
        (["--sequence-parallel", "0"], {"sequence_parallel": "0"}),
        (["--sequence-parallel=false"], {"sequence_parallel": "false"}),
        (["--sequence-parallel", "auto"], {"sequence_parallel": "auto"}),
        (["--sequence-parallel true"], {"sequence_parallel": "true"}),
        (["--no-sequence-parallel"], {"sequence_parallel": "0"}),
        (["--manual-gc", "OFF"], {"manual_gc": "OFF"}),
        (["--no-manual-gc", "--tp-size", "2"], {"manual_gc": "0", "tp_size": "2"}),
        (["--no-mmap-bin-files"], {"no_mmap_bin_files": "1"}),
        (["--no-no-mmap-bin-files"], {"no_mmap_bin_files": "0"}),
        (["--no-bf16"], {"use_bf16": "0"}),
        (["--profile", "--manual-gc"], {"enable_profiling": "1", "manual_gc": "1"}),
        (["--manual-gc", "/ckpt"], {"manual_gc": "1", "checkpoint_path": "/ckpt"}),
        (["--manual-gc", "ckpt"], {"manual_gc": "1", "checkpoint_path": "ckpt"}),
        (["--manual-gc", "1", "ckpt"], {"manual_gc": "1", "checkpoint_path": "ckpt"}),
        (["ckpt", "--swiglu", "board"], {"checkpoint_path": "ckpt", "tensorboard_logs_path": "board"}),
    ],
)
def test_a_switch_takes_a_boolean_and_leaves_everything_else_to_the_positionals(
    argv: list[str], expected: dict[str, str]
) -> None:
    assert given(*argv) == expected


def test_the_four_positionals_of_the_script_in_its_order() -> None:
    assert given("ckpt", "--tp-size", "2", "board", "tok", "--sequence-parallel", "data") == {
        "checkpoint_path": "ckpt",
        "tensorboard_logs_path": "board",
        "tokenizer_arg": "tok",
        "data_arg": "data",
        "tp_size": "2",
        "sequence_parallel": "1",
    }


def test_an_empty_positional_sets_nothing_and_keeps_its_place() -> None:
    assert given("", "board", "", "data") == {"tensorboard_logs_path": "board", "data_arg": "data"}


def test_a_fifth_positional_is_refused_with_the_order_of_the_four() -> None:
    (line,) = problems("ckpt", "board", "tok", "data", "more")
    assert "'more'" in line
    assert "CHECKPOINT_PATH TENSORBOARD_LOGS_PATH TOKENIZER_ARG DATA_ARG" in line


MEGATRONS_NAMES = {
    "tp_size": ["--tensor-model-parallel-size"],
    "cp_size": ["--context-parallel-size"],
    "pp_size": ["--pipeline-model-parallel-size"],
    "vpp_size": ["--virtual-pipeline-model-parallel-size"],
    "num_nodes": ["--nnodes"],
    "gpus_per_node": ["--nproc-per-node"],
    "norm_epsilon": ["--layernorm-epsilon"],
    "use_bf16": ["--bf16"],
    "learning_rate": ["--lr"],
    "min_learning_rate": ["--min-lr"],
    "tokenizer_arg": ["--tokenizer-model"],
    "data_arg": ["--data-path"],
    "checkpoint_path": ["--save"],
    "load_path": ["--load"],
    "load_weights_only": ["--finetune"],
    "verify_on_load": ["--verify"],
    "tensorboard_logs_path": ["--tensorboard-dir"],
    "enable_profiling": ["--profile"],
}


@pytest.mark.parametrize(
    ("flag", "option"), [(flag, option) for option, names in MEGATRONS_NAMES.items() for flag in names]
)
def test_megatrons_name_sets_our_option(flag: str, option: str) -> None:
    assert given(flag, "1") == {option: "1"}


def test_every_alias_there_is_stands_in_the_table_above() -> None:
    aliases = {name: list(schema.aliases(name)) for name in schema.Config.model_fields if schema.aliases(name)}
    assert aliases == MEGATRONS_NAMES


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--mock-data"], {"data_arg": "MOCK"}),
        (["--mock-data", "1"], {"data_arg": "MOCK"}),
        (["--mock-data", "0"], {}),
        (["--fp16"], {"dtype": "fp16"}),
        (["--fp16", "data"], {"dtype": "fp16", "checkpoint_path": "data"}),
    ],
)
def test_megatrons_switches_that_say_the_value_of_an_option(argv: list[str], expected: dict[str, str]) -> None:
    assert given(*argv) == expected


@pytest.mark.parametrize(
    "argv",
    [
        ["--use-mcore-models"],
        ["--use-mcore-models", "1"],
        ["--swiglu=true"],
        ["--group-query-attention"],
        ["--untie-embeddings-and-output-weights"],
        ["--disable-bias-linear"],
        ["--position-embedding-type", "rope"],
        ["--position-embedding-type rope"],
    ],
)
def test_what_llama3_fixes_is_accepted_as_it_is(argv: list[str]) -> None:
    assert given(*argv) == {}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--swiglu", "0"], "--swiglu 0: Llama3 needs it on"),
        (["--use-mcore-models=false"], "--use-mcore-models false: Llama3 needs it on"),
        (["--no-group-query-attention"], "--no-group-query-attention: Llama3 needs --group-query-attention"),
        (["--position-embedding-type", "learned_absolute"], "--position-embedding-type learned_absolute: Llama3 has"),
        (["--position-embedding-type"], "--position-embedding-type: needs a value (rope)"),
    ],
)
def test_what_llama3_fixes_is_refused_when_contradicted(argv: list[str], said: str) -> None:
    (line,) = problems(*argv)
    assert line.startswith(said)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--tp-sise", "2"], "--tp-sise: there is no such option; did you mean --tp-size"),
        (["--learning-rte=1"], "--learning-rte: there is no such option; did you mean --learning-rate"),
        (["--tensor-parallel-size", "2"], "did you mean --tensor-model-parallel-size"),
        (["--no-learning-rate"], "--no-learning-rate: there is no such option"),
        (["--tp-size"], "--tp-size: needs a value (INT)"),
        (["--tp-size", "--pp-size", "2"], "--tp-size: needs a value (INT)"),
        (["--dtype"], "--dtype: needs a value (bf16|fp8|fp16|fp32)"),
        (["--config"], "--config: needs the path of a TOML file"),
        (["-tp-size"], "-tp-size: a flag begins with two dashes; did you mean --tp-size"),
        (["-x"], "-x: a flag begins with two dashes"),
        (["--no-manual-gc", "1"], "--no-manual-gc 1: takes no value; say --manual-gc 1"),
    ],
)
def test_a_flag_that_cannot_be_read(argv: list[str], said: str) -> None:
    (line,) = problems(*argv)
    assert said in line


def test_a_negative_number_is_a_value() -> None:
    assert given("--seed", "-1") == {"seed": "-1"}


def test_two_dashes_alone_say_nothing() -> None:
    assert given("--", "ckpt", "--", "board") == {"checkpoint_path": "ckpt", "tensorboard_logs_path": "board"}


def test_an_unknown_flag_does_not_turn_its_value_into_a_checkpoint_folder() -> None:
    for argv in (["--tp-sise", "2", "ckpt"], ["--manual-gcc", "/ckpt"]):
        line = flags.parse(argv)
        assert [(a.name, a.raw) for a in line.assignments] == [("checkpoint_path", argv[-1])]


def test_a_flag_that_is_like_no_other_gets_no_suggestion() -> None:
    assert problems("--zzz") == ["--zzz: there is no such option"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--lr", "1", "--learning-rate", "2"], "--lr 1 and --learning-rate 2 set the same option"),
        (["--checkpoint-path", "a", "--save", "b"], "--checkpoint-path a and --save b set the same option"),
        (["--save", "a", "b"], "--save a and argument CHECKPOINT_PATH b set the same option"),
        (["--fp16", "--dtype", "bf16"], "--fp16 fp16 and --dtype bf16 set the same option"),
        (["--manual-gc", "--no-manual-gc"], "--manual-gc 1 and --no-manual-gc 0 set the same option"),
    ],
)
def test_two_names_of_one_option_must_not_contradict_each_other(argv: list[str], said: str) -> None:
    assert problems(*argv) == [said]


def test_save_and_load_may_name_two_folders() -> None:
    assert given("--save", "a", "--load", "b") == {"checkpoint_path": "a", "load_path": "b"}


def test_two_names_may_say_the_same() -> None:
    assert given("--lr", "1", "--learning-rate", "1") == {"learning_rate": "1"}


def test_every_mistake_is_told() -> None:
    lines = problems("--tp-sise", "2", "--lr", "1", "--learning-rate", "2", "--swiglu", "0", "--dtype")
    assert len(lines) == 4


def test_config_files_are_kept_in_order() -> None:
    assert flags.parse(["--config", "a.toml", "--config=b.toml"]).files == ["a.toml", "b.toml"]


@pytest.mark.parametrize("name", schema.Config.model_fields)
def test_the_help_shows_every_option_with_kind_default_and_megatrons_names(name: str) -> None:
    text = flags.help_text("raytrain-llama3")
    (entry,) = [e for e in text.split("\n  --") if e.split()[0] == name.replace("_", "-")]
    assert f"default {flags.shown(schema.Config.model_fields[name].default)}" in " ".join(entry.split())
    assert len(entry.splitlines()[0].split()) == 2
    assert all(alias in entry for alias in schema.aliases(name))


@pytest.mark.parametrize(
    "line",
    [
        "--tp-size INT",
        "--num-nodes auto|INT",
        "--vpp-size INT",
        "--sequence-parallel auto|0|1",
        "--manual-gc 0|1",
        "--dtype bf16|fp8|fp16|fp32",
        "--learning-rate NUMBER",
        "--hidden-dropout NUMBER",
        "--split A,B,C",
        "--exp-name TEXT",
        "--wandb-project TEXT",
        "--checkpoint-path PATH",
    ],
)
def test_the_help_names_the_kind_of_value(line: str) -> None:
    assert f"\n  {line}\n" in flags.help_text("raytrain-llama3")


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "1"), (False, "0"), (None, "unset"), ((99.0, 1.5, 0.0), "99,1.5,0"), (0.1, "0.1"), ("auto", "auto")],
)
def test_a_value_is_shown_as_it_would_be_written(value: object, text: str) -> None:
    assert flags.shown(value) == text


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("rotary_base", "the script says 1000000"),
        ("exit_duration_in_mins", "The script's 235 would end a run unasked"),
        ("exp_name", "the script's names say fp8 while it trains bf16"),
        ("apply_layernorm_1p", "The script turns it on"),
        ("attention_backend", "The script says fused"),
        ("fp8_param_gather", "The script turns it on"),
    ],
)
def test_the_help_says_why_a_default_is_not_the_scripts(option: str, said: str) -> None:
    assert said in " ".join(str(schema.Config.model_fields[option].description).split())
