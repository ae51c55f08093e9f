"""What a checkpoint costs training, beside torch.distributed.checkpoint's saves of the same state on the same disk.

One rank, a real model and optimizer in bf16 with fp32 masters. Each side is a process of its own, one after the other:
ours and torch's, each synchronous and asynchronous. A plain copy, `dd` with fsync and plain reading are done in turn
with ours, in the same process. Run it as
`python benchmarks/checkpoint.py [--gb 1 3] [--rounds 3] [--folder F] [--json FILE]`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from processes import BenchmarkError, end_on_sigterm, environment

SIDES = ("ours", "torch")
_BYTES_A_WEIGHT = 14
_HIDDEN, _FFN, _VOCAB = 1024, 2816, 8192
_PIECE = 1 << 22
_CACHES = Path("/proc/sys/vm/drop_caches")


def model_flags(gigabytes: float) -> list[str]:
    """Flags of a model whose weights, masters and moments are about so many gigabytes."""
    layer = _HIDDEN * (2 * _HIDDEN + 2 * 256) + 3 * _HIDDEN * _FFN
    layers = max(1, round((gigabytes * 1e9 / _BYTES_A_WEIGHT - 2 * _VOCAB * _HIDDEN) / layer))
    shape = {"num-layers": layers, "hidden-size": _HIDDEN, "ffn-hidden-size": _FFN, "vocab-size": _VOCAB}
    shape |= {"num-attention-heads": 16, "num-query-groups": 4, "kv-channels": 64, "seq-length": 16}
    rest = {"device": "cpu", "dtype": "bf16", "micro-batch-size": 1, "global-batch-size": 1, "lr-warmup-samples": 0}
    return [item for name, value in (shape | rest).items() for item in (f"--{name}", str(value))]


def measure(side: str, gigabytes: float, rounds: int, folder: Path) -> dict[str, Any]:
    """In a process of its own: everything about one side; seconds in lists, one number a round."""
    with _trained(gigabytes, folder) as (chunks, optimizer, process):
        return (_ours if side == "ours" else _torch)(chunks, optimizer, process, rounds, folder)


@contextlib.contextmanager
def _trained(gigabytes: float, folder: Path) -> Iterator[tuple[Any, Any, Any]]:
    """A model that has done one step, so that its optimizer has moments."""
    from peer import planned

    from raytrain_llama3.data.feed import RankFeed, local_link
    from raytrain_llama3.messages import ProcessFacts, RankSpec, Rendezvous
    from raytrain_llama3.train.model import build_model
    from raytrain_llama3.train.optimizer import build_optimizer
    from raytrain_llama3.train.process import host_store, open_process
    from raytrain_llama3.train.step import Stepper
    from raytrain_llama3.train.stop import Votes

    plan = planned([*model_flags(gigabytes), "--exp-dir", str(folder), "--use-exp-structure", "1"])
    store = host_store("127.0.0.1", 0, 1)
    me, facts = RankSpec(0, 1, 0, 0, 1, 0, "node", "127.0.0.1", 0), ProcessFacts(0, "here", {}, 0.0, 0.0)
    with open_process(plan, me, Rendezvous("127.0.0.1", store.port, "b"), facts, store) as process:
        chunks = build_model(plan, process)
        optimizer = build_optimizer(plan, chunks)
        batches = RankFeed(local_link(plan), plan.layout, 0).micro_batches("train", 0)
        Stepper(plan, process, chunks, optimizer).train(batches, Votes())
        yield chunks, optimizer, process


def _ours(chunks: Any, optimizer: Any, process: Any, rounds: int, folder: Path) -> dict[str, Any]:
    import torch

    from raytrain_llama3.checkpoint import torch_dist
    from raytrain_llama3.checkpoint.destinations import Direct, ThroughWriter
    from raytrain_llama3.checkpoint.reading import FolderSource
    from raytrain_llama3.checkpoint.saves import Company, Saves
    from raytrain_llama3.checkpoint.staging import nbytes_of

    found: dict[str, Any] = {}
    state = torch_dist.OwnState(0, chunks, optimizer)
    by_name = {
        name: Saves(Company(0, 1, _prefixed(process.store, name), lambda: False), destination, lambda _record: None, 0)
        for name, destination in (("sync", Direct()), ("async", ThroughWriter(on_gpu=False)))
    }
    plain: list[torch.Tensor] = []
    # The first round starts the writer and touches its memory. In turn, as a disk is not equally fast all the time.
    for number in range(rounds + 1):
        for name, saves in by_name.items():
            path = folder / f"{name}_{number}"
            began = time.perf_counter()
            files = state.files(torch_dist.Progress(1, 1))
            planned_at = time.perf_counter()
            saves.begin(path, 1, 1, files, {})
            free_at = time.perf_counter()
            saves.settle()
            if saves.saved_step is None:
                raise BenchmarkError(saves.last_failure)
            _note(found, name, number, gather=planned_at - began, copy=free_at - planned_at, wait=free_at - began,
                  total=time.perf_counter() - began)  # fmt: skip
            found["bytes"] = nbytes_of(files)
            if (name, number) != ("async", rounds):
                shutil.rmtree(path)
            _note(found, "dd", number, total=_timed(lambda: _dd(folder / "dd", found["bytes"])))
        plain = plain or [torch.empty_like(numbers) for numbers in _numbers(files)]
        _note(found, "plain copy", number, total=_timed(partial(_copy, files, plain)))
    for saves in by_name.values():
        saves.close()
    last = folder / f"async_{rounds}"
    for number in range(rounds + 1):
        _forget_files()
        _note(found, "load", number, total=_timed(lambda: torch_dist.load(FolderSource(last), chunks, optimizer)))
        _forget_files()
        _note(found, "read", number, total=_timed(lambda: _read(last)))
    shutil.rmtree(last)
    return found


def _torch(chunks: Any, optimizer: Any, process: Any, rounds: int, folder: Path) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    from raytrain_llama3.checkpoint.pieces import describe, model_pieces, optimizer_pieces

    model = describe(chunks)
    pieces = [*model_pieces(model), *optimizer_pieces(model, optimizer)]
    state = {f"{i}.{piece.box.key}": piece.read() for i, piece in enumerate(pieces)}
    found: dict[str, Any] = {"bytes": sum(tensor.nbytes for tensor in state.values())}
    for number in range(rounds + 1):
        path = folder / f"torch_{number}"
        began = time.perf_counter()
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, thread_count=2))
        _note(found, "sync", number, wait=time.perf_counter() - began, total=time.perf_counter() - began)
        shutil.rmtree(path)
        began = time.perf_counter()
        future: Any = dcp.async_save(state, storage_writer=dcp.FileSystemWriter(path, thread_count=2))
        wait = time.perf_counter() - began
        future.result()
        _note(found, "async", number, wait=wait, total=time.perf_counter() - began)
        shutil.rmtree(path)
    return found


def _numbers(files: Any) -> Iterator[Any]:
    return (piece.read() for pieces, _ in files.values() for piece in pieces)


def _copy(files: Any, into: list[Any]) -> None:
    """As a program would that wants the same bytes elsewhere in its own memory."""
    for room, numbers in zip(into, _numbers(files), strict=True):
        room.copy_(numbers)


def _prefixed(store: Any, name: str) -> Any:
    import torch.distributed as dist

    return dist.PrefixStore(name, store)


def _note(found: dict[str, Any], name: str, number: int, **seconds: float) -> None:
    if number:
        for what, value in seconds.items():
            found.setdefault(name, {}).setdefault(what, []).append(value)


def _timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def _dd(path: Path, size: int) -> None:
    command = ["dd", "if=/dev/zero", f"of={path}", f"bs={_PIECE}", f"count={size // _PIECE}", "conv=fsync"]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    path.unlink()


def _read(folder: Path) -> None:
    room = bytearray(_PIECE)
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.readinto(room):
                pass


def _forget_files() -> None:
    """Have the next read come from the disk, where this may be asked for."""
    with contextlib.suppress(OSError):
        _CACHES.write_text("3")


def table(results: dict[str, dict[str, Any]]) -> str:
    """Medians in seconds, and the ratios that the goals are about: of each round, their median and extremes."""
    lines = []
    for size, sides in results.items():
        ours, torch = sides["ours"], sides["torch"]

        def median(side: dict[str, Any], name: str, what: str = "total") -> float:
            return statistics.median(side[name][what])

        def ratio(over: list[float], under: list[float]) -> str:
            by_round = sorted(o / u for o, u in zip(over, under, strict=True))
            return f"{statistics.median(by_round):.2f} ({by_round[0]:.2f} to {by_round[-1]:.2f})"

        lines.append(f"{size} GB asked for: {ours['bytes'] / 1e9:.2f} GB of state, seconds (medians)")
        for name in ("sync", "async"):
            row = (median(ours, name, what) for what in ("gather", "copy", "wait", "total"))
            lines.append("  ours  {:5}  gather {:.3f}  copy {:.3f}  wait {:.3f}  total {:.3f}".format(name, *row))
            row = (median(torch, name, what) for what in ("wait", "total"))
            lines.append("  torch {:5}                             wait {:.3f}  total {:.3f}".format(name, *row))
        row = (median(ours, name) for name in ("plain copy", "dd", "read", "load"))
        lines.append("  plain copy {:.3f}  dd with fsync {:.3f}  read {:.3f}  load {:.3f}".format(*row))
        wait, dds = ours["async"]["wait"], ours["dd"]["total"]
        lines += [
            f"  async wait / plain copy       {ratio(wait, ours['plain copy']['total'])}  (goal at most 1.2)",
            f"  async wait / torch async_save {median(ours, 'async', 'wait') / median(torch, 'async', 'wait'):.2f}"
            "  (goal at most 1; other process)",
            f"  write rate / dd, sync         {ratio(dds[::2], ours['sync']['total'])}  (goal at least 0.9)",
            f"  write rate / dd, async        {ratio(dds[1::2], ours['async']['total'])}",
            f"  load rate / plain read        {ratio(ours['read']['total'], ours['load']['total'])}"
            "  (goal at least 0.9)",
        ]
    return "\n".join(lines)


def main() -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gb", type=float, nargs="+", default=[1, 3], help="sizes of state (default 1 and 3)")
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds, after one that is not (default 3)")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        print(json.dumps(measure(given.side, given.gb[0], given.rounds, given.folder)))
        return 0
    end_on_sigterm()
    folder = Path(tempfile.mkdtemp(prefix="rb-", dir=given.folder))
    results: dict[str, dict[str, Any]] = {}
    try:
        for size in given.gb:
            for side in SIDES:
                command = [sys.executable, __file__, "--side", side, "--gb", str(size), "--rounds", str(given.rounds)]
                done = subprocess.run(
                    [*command, "--folder", str(folder)],
                    env=environment(folder, folder / "bytecode", None) | {"TORCHDYNAMO_DISABLE": "1"},
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                )
                results.setdefault(f"{size:g}", {})[side] = json.loads(done.stdout.splitlines()[-1])
                print(f"{size:g} GB, {side}: done", file=sys.stderr, flush=True)
    except subprocess.CalledProcessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(table(results))
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
