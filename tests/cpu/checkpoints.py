"""What tests of checkpoints look at: complete ones, their numbers, and the processes that write them."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import torch

from raytrain_llama3.checkpoint.reading import FolderSource, Reader


def numbers(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    reader = Reader(FolderSource(path))
    keys = sorted(key for key in reader.keys if reader.dtype(key) is not None)
    shapes = {key: reader.shape(key) for key in keys}
    return {key: reader.tensor(key, (0,) * len(shape), shape) for key, shape in shapes.items()}


def assert_same_numbers(a: Path, b: Path) -> None:
    """Weights, masters and both moments, bit for bit."""
    one, other = numbers(a), numbers(b)
    assert one.keys() == other.keys()
    assert {key.split(".")[2] for key in one if key.startswith("optimizer.")} == {"param", "exp_avg", "exp_avg_sq"}
    assert [key for key in one if not torch.equal(one[key], other[key])] == []


def writer_of(rank: psutil.Process, but: int = 0, patience_s: float = 60.0) -> psutil.Process:
    """The process that writes for a rank, other than process `but`."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        for child in rank.children():
            if any("checkpoint.writer" in word for word in child.cmdline()) and child.pid != but:
                return child
        time.sleep(0.02)
    raise AssertionError(f"process {rank.pid} has no writer")


def await_partial(folder: Path, still_s: float = 4.0, patience_s: float = 120.0) -> Path:
    """A save that stands still: one that is only waiting to be published is so for less than `still_s`."""
    deadline, since = time.monotonic() + patience_s, dict[Path, float]()
    while time.monotonic() < deadline:
        partial = {path for path in folder.glob("iter_*") if not (path / "COMMITTED").is_file()}
        since = {path: since.get(path, time.monotonic()) for path in partial}
        for path, began in since.items():
            if time.monotonic() - began > still_s:
                return path
        time.sleep(0.05)
    raise AssertionError(f"no save is under way in {folder}")
