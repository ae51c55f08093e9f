"""Parts of a text corpus tokenized by processes of Ray Data."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from raytrain_llama3.config import env
from raytrain_llama3.config.schema import Config
from raytrain_llama3.data.encoders import open_encoder
from raytrain_llama3.data.tokenize import Done, Job, Runner, packed_job, run_job, unpacked_job
from raytrain_llama3.launch import session
from raytrain_llama3.launch.signals import StopSignal

# Each worker has one core: a tokenizer of many threads would take the others'.
_ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

# A worker runs one part of the corpus after another with the tokenizer that it opened for the first.
_encoder_of_this_process = functools.lru_cache(maxsize=1)(open_encoder)


def tokenize_part(row: dict[str, Any]) -> dict[str, Any]:
    """In a worker: write the shard of the job in `row`, and say what is in it."""
    job = unpacked_job(row["job"])
    done = run_job(job, _encoder_of_this_process(job.tokenizer))
    told = {"part": done.part, "documents": done.documents, "tokens": done.tokens, "error": done.error}
    return told | {"left_out": "\n".join(done.left_out)}


@contextlib.contextmanager
def ray_runner(workers: int) -> Iterator[Runner]:
    """Run jobs on `workers` processes of a Ray of our own, which ends with the block."""
    config = Config(device="cpu", ray_dashboard=False)
    # Workers inherit it from this process. A runtime environment would say the same, and every worker would be started
    # anew for it, when those that Ray starts with itself are ready.
    env.apply(_ONE_THREAD, ())
    with StopSignal() as stop, session.start(config, "cpu", workers, stop):
        yield lambda jobs: _run(jobs, workers)


def _run(jobs: Sequence[Job], workers: int) -> Iterator[Done]:
    import ray

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    rows = ray.data.from_items([{"job": packed_job(job)} for job in jobs], override_num_blocks=len(jobs))
    done = rows.map(tokenize_part, compute=ray.data.TaskPoolStrategy(workers), num_cpus=1)
    for row in done.iter_rows():
        left_out = tuple(row["left_out"].splitlines())
        yield Done(row["part"], row["documents"], row["tokens"], left_out, row["error"])
