from __future__ import annotations

import ast

import pytest
from source import Module, modules

MODULE_LINES = 350
FUNCTION_LINES = 60


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_a_module_needs_no_scroll_bar(module: Module) -> None:
    assert len(module.text.splitlines()) < MODULE_LINES
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines < FUNCTION_LINES, f"{node.name} has {lines} lines"
