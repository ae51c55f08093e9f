"""On a GPU too a run cut in two is the same run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FLAGS = [
    "--num-layers",
    "2",
    "--hidden-size",
    "512",
    "--ffn-hidden-size",
    "1024",
    "--num-attention-heads",
    "8",
    "--num-query-groups",
    "4",
    "--kv-channels",
    "64",
    "--seq-length",
    "512",
    "--vocab-size",
    "1024",
    "--global-batch-size",
    "4",
    "--lr-warmup-samples",
    "4",
    "--lr-decay-samples",
    "400",
    "--eval-interval",
    "0",
    "--learning-rate",
    "1e-3",
    "--ray-dashboard",
    "0",
]


def start(folder: Path, *flags: str) -> subprocess.Popen[str]:
    places = ["--checkpoint-path", str(folder / "checkpoints"), "--tensorboard-logs-path", str(folder / "board")]
    command = [sys.executable, "-m", "raytrain_llama3", *FLAGS, *places, "--logs-path", str(folder / "logs"), *flags]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def finished(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=250)
    return output


def steps(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "board" / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "step"]


@pytest.mark.parametrize("precision", [("bf16", "bf16"), ("bf16", "fp32"), ("fp8", "bf16")], ids="-".join)
def test_six_steps_and_six_more_are_twelve(tmp_path: Path, precision: tuple[str, str]) -> None:
    dtype, moments = precision
    flags = ("--dtype", dtype, "--optimizer-moments-dtype", moments)
    whole = start(tmp_path / "whole", *flags, "--train-iters", "12")
    output = finished(whole)
    assert whole.returncode == 0, output
    for target in ("6", "12"):
        half = start(tmp_path / "halves", *flags, "--train-iters", target)
        output = finished(half)
        assert half.returncode == 0, output
    expected, got = ([s["loss"] for s in steps(tmp_path / name)] for name in ("whole", "halves"))
    assert len(got) == 12
    assert got[-1] < got[0]
    assert got == pytest.approx(expected, abs=1e-4)


def test_a_signal_to_the_process_group_saves(tmp_path: Path) -> None:
    process = start(tmp_path, "--train-iters", "100000", "--save-interval", "0")
    assert process.stdout is not None
    for line in process.stdout:
        if re.match(r"step +5/", line):
            break
    os.killpg(process.pid, signal.SIGTERM)
    output = finished(process)
    assert process.returncode == 143, output
    assert list((tmp_path / "checkpoints").glob("iter_*/COMMITTED"))
