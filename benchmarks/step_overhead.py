"""Seconds a training step under Ray over seconds a step under torchrun: the same code, in turn on one machine.

Both trainings live at once and only one runs: every process of the other one's tree is stopped (SIGSTOP). Run it as
`python benchmarks/step_overhead.py [--pairs 40 | --steps 1000] [--slice-s 3] [--threads 2] [--json FILE]`.
With `--memory-checkpoints N` the two are ours with a memory checkpoint every N steps, and ours without. With
`--gpu bf16` (or fp8) both train eight layers of Llama3-8B on one GPU, a step being eight micro-batches.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import faults
import psutil
import records
from processes import BenchmarkError, Tree, end_on_sigterm, environment
from step_overhead_report import KEPT, RAY, TORCHRUN, Filling, Pair, Result, interval, table

GOAL = 1.02
GPU_GOAL = 1.005
LONG_GOAL = 1.01
"""With `--steps`: what a long run without a fault may lose to watching for one."""
_START_TIMEOUT_S = 300.0
_WARM_UP_STEPS = 3
# A side's last steps reach its file with the next poll, every 0.5 s.
_LAST_WORDS_S = 2.0

COMMON = {
    "gpus-per-node": 1,
    "data-arg": "MOCK",
    "train-iters": 1_000_000,
    "eval-interval": 0,
    "save-interval": 0,
    "use-exp-structure": 1,
    "exp-dir": ".",
    "exp-name": "run",
}
MODEL = COMMON | {
    "device": "cpu",
    "dtype": "fp32",
    "num-layers": 4,
    "hidden-size": 256,
    "ffn-hidden-size": 704,
    "num-attention-heads": 8,
    "num-query-groups": 4,
    "kv-channels": 32,
    "seq-length": 256,
    "vocab-size": 512,
}
GPU_MODEL = COMMON | {
    "config": Path(__file__).resolve().parents[1] / "configs" / "llama3_8b.toml",
    # Two of them have room on one GPU of 80 GB or more.
    "num-layers": 8,
    "global-batch-size": 8,
    "optimizer-moments-dtype": "bf16",
}


@dataclass(slots=True)
class Side:
    """One of the two trainings, and the slices of time in which it ran (Unix seconds)."""

    name: str
    tree: Tree
    file: Path
    standby: faults.Standby | None = None
    slices: list[tuple[float, float]] = field(default_factory=list)

    def steps(self) -> list[records.Step]:
        """What it has trained so far."""
        return records.steps(records.read(self.file))

    def run_for(self, seconds: float) -> tuple[float, float]:
        """Let it run for a while, and no longer."""
        self.tree.signal(signal.SIGCONT)
        began = time.time()
        time.sleep(seconds)
        ended = time.time()
        self.tree.signal(signal.SIGSTOP)
        return began, ended


@contextlib.contextmanager
def started(name: str, folder: Path, given: argparse.Namespace) -> Iterator[Side]:
    """A training that has done its first steps, has its standby ready and stands still; it is gone after the block."""
    # A step takes about as long with few threads as with many: above the 0.2 s that the goal speaks of.
    sizes = {"micro-batch-size": 3 * given.threads, "global-batch-size": 3 * given.threads}
    model = GPU_MODEL | {"dtype": given.gpu} if given.gpu else MODEL | sizes
    flags = [item for option, value in model.items() for item in (f"--{option}", str(value))]
    is_ours = name in (RAY, KEPT)
    if name == KEPT:
        flags += ["--memory-checkpoint-interval", str(given.memory_checkpoints)]
    if is_ours:
        command = [sys.executable, "-m", "raytrain_llama3", *flags, "--standby-processes", "1"]
        file = folder / "run" / "tensorboard" / "metrics.jsonl"
    else:
        script, file = str(Path(__file__).with_name("torchrun_train.py")), folder / "records.jsonl"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", script]
        command += ["--records", str(file), *flags]
    variables = environment(folder.parent, folder.parent / "bytecode", given.threads)
    side = Side(name, Tree(name, command, variables, folder), file)
    try:
        side.tree.wait_for(lambda: len(side.steps()) >= _WARM_UP_STEPS, "steps", _START_TIMEOUT_S)
        if is_ours:
            side.standby = faults.Standby(side.tree, given.standby_wait_s)
            side.standby.wait()
        side.tree.signal(signal.SIGSTOP)
        yield side
    finally:
        side.tree.end(patience_s=60)


def alternate(ray: Side, torchrun: Side, is_enough: Callable[[int], bool], slice_s: float) -> None:
    """Run the two in turn until so many pairs are enough, the first of a pair being now one and now the other."""
    for number in itertools.count():
        if is_enough(number):
            break
        for side in (torchrun, ray) if number % 2 else (ray, torchrun):
            side.slices.append(side.run_for(slice_s))
    for side in (ray, torchrun):
        side.run_for(_LAST_WORDS_S)


def fill_standby(ray: Side, torchrun: Side, times: int) -> list[Filling]:
    """Kill the standby process `times` times, and see what it costs until another has taken its place."""
    found = list[Filling]()
    for _ in range(times):
        one = [replace(side, slices=[]) for side in (ray, torchrun)]
        processes = faults.standbys(ray.tree.processes())
        if ray.standby is None or not ray.standby.is_told or not processes:
            break
        ray.tree.signal(signal.SIGCONT)
        ray.standby.fault()
        began = time.time()
        processes[0].kill()
        ray.standby.wait()
        one[0].slices.append((began, time.time()))
        ray.run_for(_LAST_WORDS_S)
        seconds = one[0].slices[0][1] - began
        one[1].slices.append(torchrun.run_for(seconds))
        torchrun.run_for(_LAST_WORDS_S)
        found += [Filling(seconds, pair) for pair in paired(one[0], one[1], settle_s=0)]
    return found


def whole_steps(side: Side, settle_s: float) -> list[list[float]]:
    """Seconds of each step, from one end to the next, that lies whole within a slice, `settle_s` after its start."""
    ends = [step.finished_at for step in side.steps()]
    return [
        [after - before for before, after in itertools.pairwise(ends) if began + settle_s <= before and after <= ended]
        for began, ended in side.slices
    ]


def paired(ray: Side, torchrun: Side, settle_s: float) -> list[Pair]:
    """The pairs in which both sides did whole steps."""
    both = zip(whole_steps(ray, settle_s), whole_steps(torchrun, settle_s), strict=True)
    return [
        Pair(statistics.mean(mine), statistics.mean(theirs), len(mine), len(theirs))
        for mine, theirs in both
        if mine and theirs
    ]


def check_same(ray: Side, torchrun: Side) -> None:
    """Raise `BenchmarkError` unless both did the same training at the same priority."""
    losses = [[step.loss for step in side.steps()] for side in (ray, torchrun)]
    for number, (mine, theirs) in enumerate(zip(*losses, strict=False), 1):
        if not math.isclose(mine, theirs, rel_tol=1e-3):
            raise BenchmarkError(f"not the same training: loss {mine} and {theirs} at step {number}")
    priorities = {process.nice() for side in (ray, torchrun) for process in side.tree.processes()}
    if priorities != {psutil.Process().nice()}:
        raise BenchmarkError(f"the processes run at different priorities: {sorted(priorities)}")


def measure(folder: Path, given: argparse.Namespace) -> Result:
    """Start both anew so many times, let them run in turn, and compare.

    More than once, as where a process's memory comes to lie makes it a little faster or slower for as long as it lives.
    Raises `BenchmarkError` when either does not last.
    """
    parts = [measure_once(folder / str(number), given) for number in range(given.starts)]
    return replace(
        parts[0],
        pairs=[pair for part in parts for pair in part.pairs],
        fillings=parts[-1].fillings,
        has_standby=all(part.has_standby for part in parts),
    )


def measure_once(folder: Path, given: argparse.Namespace) -> Result:
    """One start of both, with its share of the pairs or steps."""
    first, second = ("torchrun again" if given.null else RAY), TORCHRUN
    if given.memory_checkpoints:
        first, second = KEPT, RAY
    with contextlib.ExitStack() as stack:
        torchrun = stack.enter_context(started(second, folder / "b", given))
        ray = stack.enter_context(started(first, folder / "a", given))

        def is_enough(pairs: int) -> bool:
            if given.steps is None:
                return bool(pairs >= given.pairs / given.starts)
            return bool(sum(map(len, whole_steps(ray, given.settle_s))) >= given.steps / given.starts)

        print("both train; now in turn", flush=True)
        alternate(ray, torchrun, is_enough, given.slice_s)
        pairs = paired(ray, torchrun, given.settle_s)
        if len(pairs) < max(2, 0.9 * len(ray.slices)):
            told = ", ".join(f"{side.name} did {len(side.steps())} steps" for side in (ray, torchrun))
            raise BenchmarkError(
                f"only {len(pairs)} of {len(ray.slices)} pairs hold whole steps ({told}): lengthen --slice-s"
            )
        fillings = fill_standby(ray, torchrun, given.fillings) if second == TORCHRUN else []
        check_same(ray, torchrun)
        goal = GPU_GOAL if given.gpu else GOAL if given.steps is None else LONG_GOAL
        return Result((first, second), goal, pairs, fillings, ray.standby is not None and ray.standby.is_told)


def main() -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=40, help="slices of each side (default 40)")
    parser.add_argument("--steps", type=int, help="as many slices as hold so many whole steps of ours, instead")
    parser.add_argument("--slice-s", type=float, default=3.0, help="seconds a slice (default 3)")
    parser.add_argument("--settle-s", type=float, default=0.3, help="start of a slice left out (default 0.3)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="OMP_NUM_THREADS (default: all cores)")
    parser.add_argument("--starts", type=int, default=1, help="times that both are started anew (default 1)")
    parser.add_argument("--standby-wait-s", type=float, default=60.0, help="for a standby to be filled (default 60)")
    parser.add_argument("--fillings", type=int, default=3, help="times a standby is killed and filled (default 3)")
    parser.add_argument("--gpu", choices=("bf16", "fp8"), help="on one GPU instead of the CPU")
    parser.add_argument("--null", action="store_true", help="torchrun on both sides: must come out as 1")
    parser.add_argument("--memory-checkpoints", type=int, metavar="N", help="what one every N steps costs, instead")
    parser.add_argument("--json", type=Path, help="write every pair and the ratio to this file")
    given = parser.parse_args()
    end_on_sigterm()
    # Short: Ray puts sockets below it, whose paths the kernel limits to 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="rb-"))
    try:
        found = measure(folder, given)
    except BenchmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(table(found, given))
    if given.json:
        ratio, low, high = interval(found.pairs)
        result = {"threads": given.threads, "cores": os.cpu_count(), "ratio": ratio, "confidence_95": [low, high]}
        given.json.write_text(json.dumps(result | asdict(found), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
