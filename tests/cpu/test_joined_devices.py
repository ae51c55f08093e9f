"""A cluster that was joined is asked what its GPUs are before any rank starts. Only `nvidia-smi` is made up here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes import Nodes
from sandbox import Sandbox


@pytest.fixture
def old_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """Two nodes; one has a GPU less able and with less memory than the other's."""
    nodes = Nodes()
    for number, row in enumerate(("0, GPU-a, NVIDIA H100, 81559, 9.0", "0, GPU-b, NVIDIA A30, 24576, 8.0")):
        program = tmp_path / str(number) / "nvidia-smi"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\necho '{row}'\n")
        program.chmod(0o755)
        with monkeypatch.context() as there:
            there.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
            nodes.add(gpus=1)
    yield nodes
    nodes.close()


def test_what_a_nodes_gpu_cannot_do_or_hold_is_refused_before_a_rank_starts(sandbox: Sandbox, old_gpus: Nodes) -> None:
    to = {"RAY_ADDRESS": old_gpus.address, "RAY_AUTH_MODE": "disabled"}
    fp8 = sandbox.run("--dtype", "fp8", "--train-iters", "1", **to)
    assert fp8.process.returncode == 2, fp8.output
    assert "dtype fp8 needs compute capability 8.9 or more; NVIDIA A30 has 8.0" in fp8.output
    bf16 = sandbox.run("--dtype", "bf16", "--train-iters", "1", **to)
    assert bf16.process.returncode == 2, bf16.output
    assert "NVIDIA A30 has 24 GiB: nothing fits 2 of them;" in bf16.output
    assert old_gpus.ranks(patience_s=0) == []
    assert sandbox.leftovers() == []
