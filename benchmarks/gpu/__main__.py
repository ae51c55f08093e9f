"""Llama3-8B's step on this GPU: our command, beside what the chip's own kernels allow and beside two peers.

Each side is a process of its own, one after another, every precision's sides together. Run it as
`python benchmarks/gpu [--precisions bf16,fp8] [--layers 32] [--micro-batches 8] [--steps 5] [--json FILE]`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import shape

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
GOALS = {"bf16": (1.02, 1.07), "fp8": (1.05, 1.13)}
"""Of the plain loop's speed, at least; of the floor of one micro-batch as the chip sustains it, at most."""
UPDATE_GOAL = 1.15
"""Of its bytes at the rate of a copy, at most."""
VARIANTS: dict[str, dict[str, dict[str, object]]] = {
    "bf16": {"ours, under Ray": {}},
    "fp8": {"ours, under Ray": {}, "ours, with --fp8-attention": {"fp8-attention": 1}},
}
BATCH = 128
"""Samples of the step that speeds are told for: one micro-batch and one update measured, the step put together."""
_WARM_UP = 2
_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Side:
    """Seconds of one micro-batch, forward and backward, and of one update of the weights (0: it has none)."""

    micro_batch_s: float
    update_s: float
    peak_gib: float

    @property
    def tokens_per_s(self) -> float:
        """Of a step of `BATCH` samples."""
        return BATCH * shape.SEQ / (BATCH * self.micro_batch_s + self.update_s)


ENVIRONMENT = {
    "NVTE_NORM_FWD_USE_CUDNN": "1",
    "NVTE_NORM_BWD_USE_CUDNN": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}
"""What someone who knows these libraries starts them with."""


def environment() -> dict[str, str]:
    """This shell's, with the package where it is not installed."""
    paths = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": paths}


def measured(script: str, *flags: str) -> dict[str, Any]:
    """The JSON line that a script of this folder prints."""
    done = subprocess.run(
        [sys.executable, str(HERE / script), *flags], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
        env=environment() | ENVIRONMENT,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{script} {' '.join(flags)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def plain(precision: str, given: argparse.Namespace) -> Side:
    """Megatron-core alone."""
    counts = ["--layers", str(given.layers), "--micro-batches", str(given.micro_batches), "--steps", str(given.steps)]
    found = measured("plain.py", "--precision", precision, *counts)
    passes = statistics.median(found["passes_s"][_WARM_UP:]) / given.micro_batches
    return Side(passes, statistics.median(found["updates_s"][_WARM_UP:]), found["peak_gib"])


def compiled(given: argparse.Namespace) -> Side:
    """PyTorch alone."""
    found = measured("torch_llama.py", "--layers", str(given.layers), "--micro-batches", str(given.micro_batches))
    return Side(statistics.median(found["passes_s"]) / given.micro_batches, 0.0, found["peak_gib"])


def ours(precision: str, given: argparse.Namespace, flags: Mapping[str, object]) -> tuple[Side, dict[str, Any]]:
    """Our command, from a shell, with Ray. It tells whole steps: those of two sizes tell passes and update apart."""
    many = one_run(precision, given.micro_batches, given.steps, given, flags)
    one = one_run(precision, 1, given.steps + given.micro_batches, given, flags)
    micro_batch_s = (many["median_s"] - one["median_s"]) / (given.micro_batches - 1)
    update_s = many["median_s"] - given.micro_batches * micro_batch_s
    return Side(micro_batch_s, update_s, many["peak_gib"]), {"many": many, "one": one}


def one_run(
    precision: str, micro_batches: int, steps: int, given: argparse.Namespace, flags: Mapping[str, object]
) -> dict[str, Any]:
    """What our command told of `steps` steps of `micro_batches`."""
    folder = Path(tempfile.mkdtemp(prefix="rg-"))
    all_flags = {
        "config": REPOSITORY / "configs" / "llama3_8b.toml",
        "dtype": precision,
        "num-layers": given.layers,
        "global-batch-size": micro_batches,
        "train-iters": steps,
        "gpus-per-node": 1,
        "optimizer-moments-dtype": "bf16",
        "eval-interval": 0,
        "save-interval": 0,
        "save-at-end": 0,
        "standby-processes": 0,
        "exp-dir": folder,
        "exp-name": "run",
    } | dict(flags) | dict(item.split("=", 1) for item in given.flag)  # fmt: skip
    argv = [sys.executable, "-m", "raytrain_llama3", *(f"--{name}={value}" for name, value in all_flags.items())]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, cwd=folder,
            env=environment(),
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"our command ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        lines = (folder / "run" / "tensorboard" / "metrics.jsonl").read_text().splitlines()
        steps = [line for line in map(json.loads, lines) if line["kind"] == "step"][_WARM_UP:]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "step_s": [step["step_s"] for step in steps],
        "median_s": statistics.median(step["step_s"] for step in steps),
        "peak_gib": max(step["peak_memory_bytes"] for step in steps) / 2**30,
        "console": done.stdout.splitlines()[-14:],
    }


@dataclass(frozen=True, slots=True)
class Floor:
    """What one micro-batch cannot go below, in short bursts and as the chip sustains it, and an update's bytes."""

    burst_s: float
    sustained_s: float
    update_s: float


def row(name: str, side: Side, floor: Floor, peer: Side) -> str:
    """A line of the table."""
    return (
        f"{name:34s} {1000 * side.micro_batch_s:8.1f} {side.micro_batch_s / floor.burst_s:8.3f} "
        f"{side.micro_batch_s / floor.sustained_s:11.3f} {1000 * side.update_s:8.1f} "
        f"{side.tokens_per_s:9.0f} {side.tokens_per_s / peer.tokens_per_s:8.3f} {side.peak_gib:7.1f}"
    )


def verdict(name: str, precision: str, side: Side, floor: Floor, peer: Side) -> str:
    """How `side` stands to the goals."""
    least, most = GOALS[precision]
    ratio, above = side.tokens_per_s / peer.tokens_per_s, side.micro_batch_s / floor.sustained_s
    update = side.update_s / floor.update_s
    return (
        f"{name}: / plain {ratio:.3f} (goal {least}: {met(ratio >= least)}); / sustained floor {above:.3f} "
        f"(goal {most}: {met(above <= most)}); update / its bytes {update:.2f} (goal {UPDATE_GOAL}: "
        f"{met(update <= UPDATE_GOAL)})"
    )


def report(precision: str, given: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    """The table of one precision, and everything that it was made of."""
    ceiling = measured("ceilings.py", "--precision", precision, "--layers", str(given.layers))
    moved = 2 * shape.parameters(given.layers) * 10
    floor = Floor(ceiling["floor_ms"] / 1000, ceiling["sustained_ms"] / 1000, moved / ceiling["copy_bytes_per_s"])
    peer = plain(precision, given)
    mine, told = dict[str, Side](), dict[str, Any]()
    for name, flags in VARIANTS[precision].items():
        mine[name], told[name] = ours(precision, given, flags)
    sides = mine | {"plain Megatron-core, before": peer}
    if not given.once:
        # The clock falls as the chip warms: the peer once more, on the other side of ours.
        sides["plain Megatron-core, after"] = again = plain(precision, given)
        peer = Side((peer.micro_batch_s + again.micro_batch_s) / 2, (peer.update_s + again.update_s) / 2, peer.peak_gib)
    if precision == "bf16" and given.torch:
        sides["plain PyTorch, compiled, no update"] = compiled(given)
    parts = ", ".join(f"{name[:-3].replace('_', ' ')} {ms:.1f}" for name, ms in ceiling.items() if name.endswith("_ms"))
    lines = [
        f"{precision}: {given.layers} layers, steps of {given.micro_batches} micro-batches of {shape.SEQ} tokens",
        f"{'':34s} {'micro ms':>8s} {'/ burst':>8s} {'/ sustained':>11s} {'update':>8s} {'tokens/s':>9s} "
        f"{'/ plain':>8s} {'GiB':>7s}",
        *(row(name, side, floor, peer) for name, side in sides.items()),
        f"floor, ms: {parts}; an update's bytes at the rate of a copy {1000 * floor.update_s:.1f}",
        *(verdict(name, precision, side, floor, peer) for name, side in mine.items()),
    ]
    record = {name: asdict(side) | {"tokens_per_s": side.tokens_per_s} for name, side in sides.items()}
    return lines, {"ceiling": ceiling, "ours_told": told, **record}


def met(is_met: bool) -> str:
    """For a goal."""
    return "met" if is_met else "missed"


def main(argv: Sequence[str]) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--precisions", default="bf16,fp8", help="with commas between")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--micro-batches", type=int, default=8, help="of a measured step, more than 1")
    parser.add_argument("--steps", type=int, default=5, help=f"the first {_WARM_UP} do not count")
    parser.add_argument("--once", action="store_true", help="the plain loop before ours alone")
    parser.add_argument("--torch", action="store_true", help="also plain PyTorch")
    parser.add_argument("--flag", action="append", default=[], help="name=value for our command, may be repeated")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    given = parser.parse_args(argv)
    written = {}
    for precision in given.precisions.split(","):
        lines, written[precision] = report(precision, given)
        print("\n".join(lines) + "\n", flush=True)
        if given.json:
            given.json.write_text(json.dumps(written, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
