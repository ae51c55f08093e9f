from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from source import REPOSITORY, modules

from raytrain_llama3.config import schema

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9_-]*")
OTHERS = {
    "ray": {"--address", "--block", "--dashboard-host", "--head", "--no-wait", "--num-cpus", "--port", "--working-dir"},
    "benchmarks": {"--faults", "--gb", "--kills", "--kinds", "--null", "--pairs", "--rounds", "--seed", "--steps"},
    "torchrun": {"--max-restarts", "--monitor-interval"},
    "docker": {"--gpus", "--ipc", "--network", "--rm", "--shm-size", "--ulimit"},
    "ray start": {"--autoscaling-config", "--disable-usage-stats", "--max-worker-port", "--min-worker-port"},
    "pip": {"--no-build-isolation", "--no-cache-dir", "--no-deps", "--quiet"},
    "apt, venv": {"--no-install-recommends", "--system-site-packages"},
    "tensorboard": {"--logdir"},
    "uv": {"--extra", "--locked", "--python"},
}
"""Flags of other programs that documents may name, by program."""


def documents() -> list[Path]:
    folders = (REPOSITORY / folder for folder in ("docs", "examples", "configs", "cluster"))
    found = [path for folder in folders if folder.is_dir() for path in folder.rglob("*") if path.is_file()]
    return [*REPOSITORY.glob("*.md"), *found]


def known_flags() -> set[str]:
    """Every flag of our commands, read where each is written: the schema, and the parsers of `cli` and `commands`."""
    names = {"--config", "--env-file", *schema.FIXED, *schema.IMPLIES}
    for name in schema.Config.model_fields:
        flags = {schema.flag_of(name), "--" + name, *schema.aliases(name)}
        names |= flags | ({"--no-" + flag[2:] for flag in flags} if schema.is_switch(name) else set())
    commands = [module for module in modules() if module.name == "cli.py" or module.name.startswith("commands/")]
    constants = (node.value for cli in commands for node in ast.walk(cli.tree) if isinstance(node, ast.Constant))
    return names | {text for text in constants if isinstance(text, str) and FLAG.fullmatch(text)}


def unknown_flags(text: str) -> set[str]:
    return set(FLAG.findall(text)) - known_flags() - set().union(*OTHERS.values())


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_every_flag_that_a_document_names_exists(path: Path) -> None:
    assert unknown_flags(path.read_text(encoding="utf-8")) == set()


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ("python -m raytrain_llama3 --tp-size 2 --lr=1e-4 `--no-manual-gc` --tp_size 2 --swiglu", set()),
        ("raytrain-llama3 data tokenize --input x --output y; raytrain-llama3 --help", set()),
        ("ray job submit --address http://127.0.0.1:8265 --working-dir . -- python -m raytrain_llama3", set()),
        ("`--tp-sise`, --no-learning-rate and --use_rope", {"--tp-sise", "--no-learning-rate", "--use_rope"}),
        ("a dash -- between words, ---, and a-word--with-two", set()),
    ],
)
def test_a_flag_that_is_not_there_is_seen(text: str, unknown: set[str]) -> None:
    assert unknown_flags(text) == unknown


def test_readme_and_presets_are_among_the_documents() -> None:
    assert {"README.md", "demo.toml"} <= {path.name for path in documents()}
