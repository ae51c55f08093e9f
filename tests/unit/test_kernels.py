"""Triton decides when it is imported whether it compiles its kernels or interprets them: a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_the_kernels_give_what_torch_gives() -> None:
    there = Path(__file__).with_name("kernels.py")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--durations=0", str(there)]
    run = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
