"""A small Llama3 learns Python from Python's own library, on this machine's CPU, in about two minutes.

    make demo

It trains with `configs/demo.toml` through the same Ray actors, Megatron-core model, distributed optimizer, Arrow
shards and `torch_dist` checkpoints as Llama3-8B on GPUs, then shows what came out and draws the loss.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = Path("demo")
BARS = "▁▂▃▄▅▆▇█"
UNIFORM = 5.55  # ln 257: what a model that knows nothing loses on a byte


def main() -> int:
    """Train, then show; returns the exit code of training."""
    folder = OUTPUT / time.strftime("run-%Y%m%d-%H%M%S")
    command = [sys.executable, "-m", "raytrain_llama3", "--config", str(ROOT / "configs" / "demo.toml")]
    command += [
        "--checkpoint-path",
        str(folder / "checkpoints"),
        "--tensorboard-logs-path",
        str(folder / "tensorboard"),
    ]
    command += ["--logs-path", str(folder / "logs"), "--data-cache-path", str(OUTPUT / "data"), *sys.argv[1:]]
    print("$", " ".join(command), flush=True)
    code = subprocess.run(command, check=False).returncode
    if code:
        return code
    records = [json.loads(line) for line in (folder / "tensorboard" / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in records if r["kind"] == "step"]
    evaluations = [r for r in records if r["kind"] == "evaluation"]
    picture = draw(steps, evaluations, folder / "loss.png")
    print("\n" + table(steps, evaluations, folder, picture))
    return 0


def table(steps: list[dict[str, Any]], evaluations: list[dict[str, Any]], folder: Path, picture: Path) -> str:
    """What came out, in a few lines."""
    checkpoint = max((folder / "checkpoints").glob("iter_*"))
    speed = sum(s["tokens"] for s in steps) / sum(s["step_s"] for s in steps)
    rows = [
        ("first loss", f"{steps[0]['loss']:.2f} nats a byte (knowing nothing: {UNIFORM})"),
        ("last loss", f"{steps[-1]['loss']:.2f} nats a byte"),
        ("", sparkline([s["loss"] for s in steps])),
        ("validation", f"{evaluations[-1]['loss']:.2f} nats a byte, on files that it has not seen"),
        ("speed", f"{speed:,.0f} tokens/s on two processes"),
        ("checkpoint", str(checkpoint)),
        ("TensorBoard", f"tensorboard --logdir {folder / 'tensorboard'}"),
        ("loss curve", str(picture)),
    ]
    return "\n".join(f"{name:<12} {text}" for name, text in rows)


def sparkline(values: list[float], width: int = 60) -> str:
    """The values as bars, each the mean of its share of them."""
    low, high = min(values), max(values)
    shares = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)]
    means = [sum(share) / len(share) for share in shares if share]
    return "".join(BARS[int((m - low) / (high - low or 1) * (len(BARS) - 1))] for m in means)


def draw(steps: list[dict[str, Any]], evaluations: list[dict[str, Any]], path: Path) -> Path:
    """The loss over steps, as a PNG at `path`."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), dpi=120)
    axes.axhline(UNIFORM, color="0.7", linestyle=":", label="knowing nothing")
    axes.plot([s["step"] for s in steps], [s["loss"] for s in steps], linewidth=1, label="training")
    axes.plot([e["step"] for e in evaluations], [e["loss"] for e in evaluations], "o-", label="validation")
    axes.set(xlabel="step", ylabel="loss, nats a byte", title="A small Llama3 learns Python")
    axes.legend()
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    return path


if __name__ == "__main__":
    sys.exit(main())
