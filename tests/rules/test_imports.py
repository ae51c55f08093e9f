from __future__ import annotations

import ast
import json
import os
import subprocess
import sys

import pytest
from source import REPOSITORY, Module, modules

PURE = {"frozenset", "re.compile", "Field", "BeforeValidator", "torch.device"}
"""What a module may call while it is imported, outside classes: each only makes a value."""


def dotted(name: str) -> str:
    return "raytrain_llama3." + name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


RANKS_SIDE = {
    f"checkpoint/{name}.py"
    for name in (
        *("destinations", "distcp", "hostbuffer", "huggingface", "kept", "masters", "pieces", "reading", "saves"),
        *("shards", "staging", "torch_dist", "writer"),
    )
}
"""Modules of `checkpoint` that only ranks, their writers, and commands about a checkpoint's content import."""

DRIVERS_SIDE = [
    dotted(module.name)
    for module in modules()
    if module.name != "__init__.py"
    and (module.name in ("train/worker.py", "train/reporter.py") or not module.name.startswith("train/"))
    and module.name not in RANKS_SIDE
]


def python(code: str, **environ: str) -> str:
    """Output of `code` in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_driver_needs_neither_torch_nor_megatron_nor_a_gpu() -> None:
    """All of it imported, `train.worker` included, whose class it hands to Ray."""
    assert {"raytrain_llama3.cli", "raytrain_llama3.launch.supervisor", "raytrain_llama3.train.worker"} <= set(
        DRIVERS_SIDE
    )
    code = f"""
import importlib, json, os, sys, threading
def state():
    return dict(os.environ), sys.path[:], threading.active_count()
before = state()
for name in {DRIVERS_SIDE!r}:
    importlib.import_module(name)
heavy = [n for n in ("torch", "megatron", "ray", "tensorboard", "transformer_engine") if n in sys.modules]
print(json.dumps([heavy, before == state()]))
"""
    heavy, unchanged = json.loads(python(code, CUDA_VISIBLE_DEVICES=""))
    assert heavy == []
    assert unchanged


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_importing_a_module_defines_names_and_does_nothing_else(module: Module) -> None:
    for statement in module.tree.body:
        match statement:
            case ast.Import() | ast.ImportFrom() | ast.FunctionDef() | ast.ClassDef():
                pass
            case ast.Expr(ast.Constant(str())):
                pass
            case ast.Assign() | ast.AnnAssign():
                calls = {ast.unparse(node.func) for node in ast.walk(statement) if isinstance(node, ast.Call)}
                assert calls <= PURE, f"line {statement.lineno}"
            case ast.If(test):
                assert ast.unparse(test) in ("TYPE_CHECKING", "__name__ == '__main__'"), f"line {statement.lineno}"
            case _:
                pytest.fail(f"line {statement.lineno}: {ast.unparse(statement)[:80]}")


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_os_environ_is_config_envs_alone(module: Module) -> None:
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    uses = [
        node.lineno
        for node in ast.walk(module.tree)
        if (isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os")
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and names & {n.name for n in node.names})
    ]
    assert bool(uses) == (module.name == "config/env.py"), f"lines {uses}"
