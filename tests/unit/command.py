"""The command line as people meet it: a process of its own."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from raytrain_llama3.config.schema import Config

REPOSITORY = Path(__file__).parents[2]
_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class Ended:
    """A finished command. `imported` holds the names of all modules that it imported."""

    code: int
    out: str
    errors: list[str]
    imported: frozenset[str]
    cpu_s: float


def run(*argv: str, cwd: Path = REPOSITORY, environ: Mapping[str, str] | None = None) -> Ended:
    """`python -m raytrain_llama3 ARGV…` with no option set by this process's environment."""
    options = {name.upper() for name in Config.model_fields}
    clean = {name: value for name, value in os.environ.items() if name not in options}
    before = _children_cpu_s()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "raytrain_llama3", *argv],
        cwd=cwd,
        env=clean | {"PYTHONPATH": str(REPOSITORY)} | dict(environ or {}),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    told = done.stderr.splitlines()
    imports = [line for line in told if line.startswith("import time:")]
    return Ended(
        done.returncode,
        done.stdout,
        [line for line in told if not line.startswith("import time:")],
        frozenset(line.rsplit("|", 1)[-1].strip() for line in imports),
        _children_cpu_s() - before,
    )


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
