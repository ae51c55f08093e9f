"""Starts `in_process.py`, or another program that takes runs as it does, and reads what it found."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("in_process.py")
_TIMEOUT_S = 500


def train(folder: Path, runs: Sequence[Mapping[str, object]], program: Path = PROGRAM) -> list[dict[str, Any]]:
    """What `program` finds of `runs`, each given as flags without their dashes."""
    folder.mkdir(parents=True, exist_ok=True)
    asked, results = folder / "runs.json", folder / "results.json"
    asked.write_text(json.dumps([_argv(flags, folder / str(i)) for i, flags in enumerate(runs)]))
    done = subprocess.run(
        [sys.executable, str(program), str(asked), str(results)],
        capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
    )  # fmt: skip
    log = results.with_suffix(".log")
    assert done.returncode == 0, done.stderr + (log.read_text()[-3000:] if log.exists() else "")
    found: list[dict[str, Any]] = json.loads(results.read_text())
    return found


def _argv(flags: Mapping[str, object], folder: Path) -> list[str]:
    places = {
        "checkpoint-path": folder / "checkpoints",
        "tensorboard-logs-path": folder / "board",
        "logs-path": folder / "logs",
        "data-cache-path": folder.parent / "data",
    }
    return [f"--{name}={value}" for name, value in (places | dict(flags)).items()]
