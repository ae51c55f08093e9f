"""The actor's shell around training: what the driver may ask of a rank's process.

A plain class, importable without torch: `launch.gang` turns it into a Ray actor whose `prepare`, `open_store` and
`run` share one thread, while `poll`, `request_stop` and `stacks` answer on others. Benchmarks call it without Ray.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import platform
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from raytrain_llama3.config import env
from raytrain_llama3.config.plan import LOG_HEADER, RunPlan
from raytrain_llama3.data.feed import Link, RankFeed, local_link, needs_tokens
from raytrain_llama3.data.trace import SampleTrace
from raytrain_llama3.host import end_pids, log_tail
from raytrain_llama3.messages import Phase, ProcessFacts, RankResult, RankSpec, Rendezvous, ResumePoint, WorkerReport
from raytrain_llama3.train.faults import PlainWords
from raytrain_llama3.train.links import Links
from raytrain_llama3.train.reporter import Reporter
from raytrain_llama3.train.stop import StopRequest

if TYPE_CHECKING:
    from torch.distributed import TCPStore


_STDERR = 2
_TENSORBOARD = "torch.utils.tensorboard"


class TrainWorker:
    """One rank's process, for one attempt after another."""

    def __init__(self) -> None:
        self._reporter = Reporter()
        self._stop = StopRequest()
        self._store: TCPStore | None = None
        self._facts: ProcessFacts | None = None
        self._links = Links()

    def prepare(self, environment: dict[str, str], remove: tuple[str, ...], log_path: str) -> ProcessFacts:
        """Set the environment, send output to `log_path`, then import torch and Megatron-core (seconds)."""
        self._reporter.enter(Phase.IMPORT)
        # Before torch is imported: it and what it loads read the environment once.
        env.apply(environment, remove)
        _redirect_output(Path(log_path))
        # Ray's own names the thread that crashed and no other.
        faulthandler.enable(file=_STDERR, all_threads=True)
        started = time.monotonic()
        with PlainWords(), _quick_imports():
            from raytrain_llama3.train import loop, process  # noqa: F401  (imported for their weight)

            self._facts = _facts(time.monotonic() - started)
        # What was imported stays: the collector need not look through it again (half a second each time).
        gc.freeze()
        self._reporter.enter(Phase.START)
        return self._facts

    def open_store(self, host: str, port: int, timeout_minutes: float = 60.0) -> int:
        """Rank 0 only: open the attempt's `TCPStore` and return its port (bound first, told afterwards)."""
        with PlainWords():
            from raytrain_llama3.train.process import host_store

            self._store = host_store(host, port, timeout_minutes)
        return int(self._store.port)

    def run(
        self,
        plan: RunPlan,
        spec: RankSpec,
        rendezvous: Rendezvous,
        resume: ResumePoint | None,
        link: Link | None = None,
    ) -> RankResult:
        """Train as `spec` until the end. Raises `RankError`, whatever the cause.

        `link` is where batches come from; without one the rank reads the data itself.
        """
        with PlainWords(plan):
            return self._run(plan, spec, rendezvous, resume, link)

    def _run(
        self,
        plan: RunPlan,
        spec: RankSpec,
        rendezvous: Rendezvous,
        resume: ResumePoint | None,
        link: Link | None,
    ) -> RankResult:
        """In a frame of its own, which can be cleared once it is left."""
        from raytrain_llama3.train.loop import train
        from raytrain_llama3.train.process import open_process

        if self._facts is None:
            raise RuntimeError("prepare() comes before run()")
        _redirect_output(plan.paths.rank_log(spec.attempt, spec.rank))
        sys.stderr.write(f"{LOG_HEADER} {spec.attempt}, {spec.name}, process {os.getpid()}, {time.ctime()}\n")
        logging.getLogger().setLevel(plan.config.log_level)
        self._reporter.begin(spec.rank)
        self._links.before_opening()
        self._stop.clear()
        self._reporter.enter(Phase.PROCESS_GROUP)
        planned = tuple(f for f in plan.config.rehearse_faults if (f.attempt, f.rank) == (spec.attempt, spec.rank))
        with open_process(plan, spec, rendezvous, self._facts, self._store) as process:
            log = plan.paths.rank_log(spec.attempt, spec.rank)
            tap = SampleTrace(log.with_suffix(".samples.jsonl")) if plan.config.trace_samples else None
            link = link or local_link(plan)
            has_need = needs_tokens(plan, process.pp_rank)
            feed = RankFeed(link, plan.layout, process.dp_rank, has_need, self._reporter, tap)
            return train(plan, process, resume, self._reporter, self._stop, self._facts.versions, feed, planned)

    def poll(self) -> WorkerReport:
        """Where this rank is and what happened since the last poll."""
        return self._reporter.poll()

    def request_stop(self, save: bool = True) -> None:
        """End at the next step boundary: all ranks agree there, save if no rank was asked not to, and `run` returns."""
        self._stop.ask(save=save)

    def let_go(self) -> None:
        """Break the connections to the other ranks, so that a collective that waits for a lost one ends."""
        self._stop.abandon()
        self._links.sever()

    def reset(self) -> bool:
        """After an attempt: close its groups; whether this process is sure to be as good as a new one."""
        from raytrain_llama3.train.process import close_groups

        gc.enable()
        # A save or a load that was cut off may have threads at work yet.
        unsure = self._reporter.phase in (Phase.SAVE, Phase.LOAD)
        self._store = None
        return close_groups() and not unsure

    def see_gone(self, pids: Sequence[int], patience_s: float) -> list[int]:
        """See that processes of this host are gone, killing what is left after `patience_s`; those that remain."""
        return end_pids(pids, patience_s)

    def log_tail(self, path: str) -> list[str]:
        """The last lines of a log on this host."""
        return list(log_tail(Path(path)))

    def stacks(self) -> str:
        """The Python stack of every thread of this process."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        parts = []
        for ident, frame in sys._current_frames().items():
            parts.append(f"thread {names.get(ident, ident)}\n" + "".join(traceback.format_stack(frame)))
        return "\n".join(parts)


@contextlib.contextmanager
def _quick_imports() -> Iterator[None]:
    """Leave out what is a fifth of importing Megatron-core and of no use here.

    The collector would look again and again through what is there to stay, and `megatron.core.timers` wants TensorBoard
    for the name of a type; without it, it does without.
    """
    gc.disable()
    has_hidden = sys.modules.setdefault(_TENSORBOARD, None) is None  # type: ignore[arg-type]
    try:
        yield
    finally:
        if has_hidden:
            del sys.modules[_TENSORBOARD]
        gc.enable()


def _redirect_output(path: Path) -> None:
    """Send this process's file descriptors 1 and 2 to `path`, native libraries' output included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


def _facts(import_s: float) -> ProcessFacts:
    import megatron.core
    import torch

    from raytrain_llama3 import __version__

    versions: dict[str, str] = {
        "raytrain_llama3": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "megatron-core": str(megatron.core.__version__),
    }
    engine: Any = sys.modules.get("transformer_engine")
    if engine is not None:
        versions["transformer-engine"] = str(engine.__version__)
    return ProcessFacts(
        pid=os.getpid(),
        hostname=socket.gethostname(),
        versions=versions,
        import_s=import_s,
        started_at=psutil.Process().create_time(),
    )
