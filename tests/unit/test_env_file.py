"""`--env-file` means what `source` means, and the templates say what they promise, both ways."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from command import REPOSITORY
from planning import GIB

from raytrain_llama3.config import env_file
from raytrain_llama3.config.load import load
from raytrain_llama3.config.plan import DeviceSupply
from raytrain_llama3.config.rules import plan_run
from raytrain_llama3.errors import ConfigError

TEMPLATES = sorted((REPOSITORY / "configs").glob("*.env"))
TRICKY = """
# a comment
export TP_SIZE=2 # and another
export DTYPE="bf16"   # quoted
EXP_NAME='it''s #1'
export WANDB_RUN_NAME=$EXP_NAME LOG_LEVEL="${NOT_SET:-DEBUG}"
   export CP_SIZE=${TP_SIZE}
export EMPTY=
PLAIN=a#b
"""


def sourced(path: Path) -> dict[str, str]:
    """What a shell has after reading the file, and had not before."""
    script = f"set -a; . {path}; env -0"
    done = subprocess.run(["env", "-i", "bash", "-c", script], capture_output=True, text=True, check=True, timeout=30)
    found = dict(entry.split("=", 1) for entry in done.stdout.split("\0") if entry)
    return {name: value for name, value in found.items() if name not in ("PWD", "SHLVL", "_", "OLDPWD")}


def read(path: Path) -> dict[str, str]:
    problems: list[str] = []
    found = env_file.read([str(path)], {}, problems)
    assert problems == []
    return found


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_a_template_reads_as_a_shell_reads_it(path: Path) -> None:
    assert read(path) == sourced(path)
    assert load(["--env-file", str(path)], {}).config == load([], sourced(path)).config


def test_quotes_comments_and_references_are_a_shells(tmp_path: Path) -> None:
    path = tmp_path / "tricky.env"
    path.write_text(TRICKY)
    assert read(path) == sourced(path)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("TP_SIZE=$(nproc)", "runs a command"),
        ("TP_SIZE=`nproc`", "runs a command"),
        ("echo hello", "is not NAME=value"),
        ("DTYPE='bf16", "has a quote that does not end"),
    ],
)
def test_what_only_a_shell_can_do_is_refused_with_file_and_line(line: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.env"
    path.write_text(f"export PP_SIZE=2\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        load(["--env-file", str(path)], {})
    (problem,) = caught.value.problems
    assert problem.startswith(f"{path}:2: {told}")
    assert problem.endswith(line)


def test_a_flag_wins_over_the_environment_and_that_over_the_file_which_is_told(tmp_path: Path) -> None:
    path = tmp_path / "run.env"
    path.write_text("TP_SIZE=2\nPP_SIZE=2\nCP_SIZE=2\nWANDB_API_KEY=from-the-file\nNCCL_DEBUG=INFO\n")
    environ = {"PP_SIZE": "4", "CP_SIZE": "4", "WANDB_API_KEY": "from-the-environment"}
    loaded = load(["--env-file", str(path), "--cp-size", "8"], environ)
    assert (loaded.config.tp_size, loaded.config.pp_size, loaded.config.cp_size) == (2, 4, 8)
    (line,) = [line for line in loaded.warnings if "--env-file" in line]
    assert line.startswith("PP_SIZE, CP_SIZE, WANDB_API_KEY: set in the environment already")
    assert "from-the" not in line
    assert loaded.environ["NCCL_DEBUG"] == "INFO"


def eight(name: str, memory: int, capability: float, nodes: int = 1) -> DeviceSupply:
    return DeviceSupply("cuda", (8,) * nodes, name, memory * GIB, capability)


A100, H100 = eight("NVIDIA A100-SXM4-80GB", 80, 8.0), eight("NVIDIA H100 80GB HBM3", 80, 9.0)
FITTING = {
    "config_aistudio_single_node.env": (A100, {"tp": 1, "dp": 8, "global_batch_size": 128}),
    "config_aistudio_multi_node.env": (
        eight("NVIDIA A100-SXM4-80GB", 80, 8.0, nodes=2),
        {"tp": 2, "cp": 2, "pp": 2, "dp": 2, "global_batch_size": 512},
    ),
    "config_single_gpu.env": (
        DeviceSupply("cuda", (1,), "NVIDIA H200", 140 * GIB, 9.0),
        {"world_size": 1, "global_batch_size": 8},
    ),
    "config_8gpu_standard.env": (A100, {"world_size": 8, "dp": 8, "global_batch_size": 128}),
    "config_quick_test.env": (A100, {"global_batch_size": 32}),
    "config_a100.env": (A100, {"dp": 8, "global_batch_size": 128}),
    "config_h100_fp8.env": (H100, {"dp": 8, "global_batch_size": 128}),
    "config_fp16.env": (eight("Tesla V100-SXM2-32GB", 32, 7.0), {"tp": 8, "global_batch_size": 128}),
    "config_memory_saving.env": (
        eight("NVIDIA A100-SXM4-40GB", 40, 8.0),
        {"tp": 4, "cp": 2, "dp": 1, "global_batch_size": 64},
    ),
}


def test_every_template_is_among_these() -> None:
    assert {path.name for path in TEMPLATES} == set(FITTING)


@pytest.mark.parametrize("name", FITTING)
def test_a_template_makes_a_run_on_the_machine_that_it_is_for(name: str) -> None:
    supply, layout = FITTING[name]
    plan = plan_run(load(["--env-file", str(REPOSITORY / "configs" / name)], {}), supply, 64)
    assert {key: getattr(plan.layout, key) for key in layout} == layout
    dtype = {"config_h100_fp8.env": "fp8", "config_fp16.env": "fp16"}.get(name, "bf16")
    assert plan.config.dtype == dtype
    if name == "config_memory_saving.env":
        assert plan.config.seq_length == 4096
    if name == "config_a100.env":
        assert plan.worker_environment["NCCL_IB_TIMEOUT"] == "19"
