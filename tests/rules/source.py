"""The package's source, parsed once."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Module:
    """One file of the package: `name` is relative to it, `config/env.py`."""

    name: str
    text: str
    tree: ast.Module


@cache
def modules() -> tuple[Module, ...]:
    """Every file of the package."""
    package = REPOSITORY / "raytrain_llama3"
    found = [(str(path.relative_to(package)), path.read_text(encoding="utf-8")) for path in package.rglob("*.py")]
    return tuple(Module(name, text, ast.parse(text)) for name, text in sorted(found))
