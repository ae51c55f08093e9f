"""Tokens a second from warm and cold files, memory, the rank's wait, and tokenizing, each beside its peers.

    pip install datasets mosaicml-streaming
    python benchmarks/data.py

See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import data_files

FEEDER_BATCHES = "1000"
"""Batches of 8 samples that are taken as fast as they come: as many from 1 GB as from 10."""
HERE = Path(__file__).resolve().parent
WRITERS = {
    "ours": data_files.write_ours,
    "datasets": data_files.write_hugging_face,
    "streaming": data_files.write_mosaic,
    "GPTDataset": data_files.write_megatron,
}
MODULES = {"datasets": "datasets", "streaming": "streaming", "GPTDataset": "megatron.core"}
MAP = """
import sys
from datasets import load_dataset
from tokenizers import Tokenizer
def encode(batch):
    return {"input_ids": [e.ids for e in tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)]}
if __name__ == "__main__":
    path, cache, count = sys.argv[1:]
    rows = load_dataset("json", data_files=path, cache_dir=cache, split="train")
    tokenizer = Tokenizer.from_file(path.replace("text.jsonl", "tokenizer.json"))
    rows.map(encode, batched=True, num_proc=int(count), remove_columns=["text"])
"""


def main() -> int:
    """Run it and print the tables."""
    given = _arguments()
    folder = Path(tempfile.mkdtemp(prefix="data-bench-", dir=given.folder))
    results: dict[str, Any] = {}
    try:
        for part in given.parts:
            results[part] = PARTS[part](folder, given)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where to put the files (a temporary folder)")
    parser.add_argument("--size", type=float, default=1.0, help="GB of token ids (1)")
    parser.add_argument("--large", type=float, default=10.0, help="GB for the second measurement of memory (10)")
    parser.add_argument("--rounds", type=int, default=3, help="times that every side is run (3)")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of one measurement (5)")
    parser.add_argument("--text", type=float, default=200.0, help="MB of text to tokenize (200)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="that tokenize (all cores)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="which to measure (all)")
    parser.add_argument("--json", type=Path, help="keep every figure here")
    return parser.parse_args()


def _speed(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    sides = [s for s in WRITERS if s not in MODULES or importlib.util.find_spec(MODULES[s].split(".")[0])]
    for side in sides:
        WRITERS[side](folder / side, int(given.size * 5e8))
    found: dict[str, Any] = {side: {"warm": [], "cold": []} for side in sides}
    for _ in range(given.rounds):
        for side in sides:
            data_files.forget(folder / side)
            found[side]["cold"].append(_side(side, folder, given.seconds))
            _warm(folder / side)
            found[side]["warm"].append(_side(side, folder, given.seconds))
    peers = [s for s in sides if s != "ours"]
    print(f"\nShuffled samples of {data_files.SEQ} tokens, {given.size:g} GB; medians of {given.rounds} rounds")
    print(f"{'':<12}{'warm, tokens/s a core':>24}{'cold, tokens/s':>18}{'anonymous memory':>20}")
    for side in sides:
        warm, cold = (_median(found[side][kind], key) for kind, key in (("warm", "cpu_s"), ("cold", "seconds")))
        memory = statistics.median(r["peak_bytes"] for r in found[side]["warm"])
        print(f"{side:<12}{warm / 1e6:>22.1f} M{cold / 1e6:>16.1f} M{memory / 2**20:>16.0f} MiB")
    if peers:
        best = max(_median(found[s]["warm"], "cpu_s") for s in peers)
        print(f"ours / fastest peer, warm: {_median(found['ours']['warm'], 'cpu_s') / best:.2f} (goal: at least 1)")
    return found


def _feeder(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    if not (folder / "ours").exists():
        data_files.write_ours(folder / "ours", int(given.size * 5e8))
    _warm(folder / "ours")
    small = _run("data_feeder.py", str(folder / "ours"), FEEDER_BATCHES, "100")
    data_files.write_ours(folder / "large", int(given.large * 5e8))
    large = _run("data_feeder.py", str(folder / "large"), FEEDER_BATCHES, "100")
    print("\nOne feeder to one rank through the object store")
    for size, told in ((given.size, small), (given.large, large)):
        memory = told["peak_bytes"] + told["stored_bytes"]
        print(
            f"{size:>5g} GB: {told['tokens'] / told['seconds'] / 1e6:.1f} M tokens/s, "
            f"{told['tokens'] / told['cpu_s'] / 1e6:.1f} M a core of the feeder; {memory / 2**20:.0f} MiB anonymous "
            f"and stored; wait {100 * told['wait_share']:.3f} % of steps of 100 ms, longest "
            f"{told['longest_wait_s']:.4f} s"
        )
    ratio = (large["peak_bytes"] + large["stored_bytes"]) / (small["peak_bytes"] + small["stored_bytes"])
    print(f"memory, {given.large:g} GB / {given.size:g} GB: {ratio:.2f} (goal: within 10 %)")
    return {"small": small, "large": large}


def _tokenize(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    text, count = folder / "text.jsonl", str(given.processes)
    data_files.write_text(text, int(given.text * 1e6))
    script = folder / "map.py"
    script.write_text(MAP)
    ours = [sys.executable, "-m", "raytrain_llama3", "data", "tokenize", "--input", str(text), "--tokenizer"]
    ours += [str(folder / "tokenizer.json"), "--workers", count, "--overwrite", "--output", str(folder / "tokenized")]
    theirs = [sys.executable, str(script), str(text)]
    ratios, seconds = [], dict[str, list[float]](ours=[], datasets=[])
    for i in range(given.rounds):
        seconds["ours"].append(_timed(ours))
        if importlib.util.find_spec("datasets"):
            seconds["datasets"].append(_timed([*theirs, str(folder / f"cache-{i}"), count]))
            ratios.append(seconds["datasets"][-1] / seconds["ours"][-1])
    print(f"\nTokenizing {given.text:g} MB with {count} processes, whole commands")
    for name, values in seconds.items():
        if values:
            print(f"{name:<12}{statistics.median(values):>8.1f} s")
    if ratios:
        print(f"datasets.map's seconds / ours: {statistics.median(ratios):.2f} (goal: at least 1)")
    return seconds


def _side(side: str, folder: Path, seconds: float) -> dict[str, Any]:
    return _run("data_sides.py", side, str(folder / side), str(seconds))


def _run(script: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    told: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return told


def _timed(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, env=_environment(), capture_output=True, check=True)
    return time.perf_counter() - began


def _environment() -> dict[str, str]:
    paths = [str(HERE.parent), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled", "PYTHONPATH": os.pathsep.join(paths)}


def _warm(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(1 << 24):
                    pass


def _median(rounds: list[dict[str, Any]], per: str) -> float:
    return statistics.median(r["tokens"] / r[per] for r in rounds)


PARTS = {"speed": _speed, "feeder": _feeder, "tokenize": _tokenize}

if __name__ == "__main__":
    sys.exit(main())
