"""Parts of a text corpus tokenized by Ray's workers."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence

from raytrain_llama3.config import env
from raytrain_llama3.config.schema import Config
from raytrain_llama3.data.encoders import Encoder, open_encoder
from raytrain_llama3.data.tokenize import Done, Job, Runner, run_job
from raytrain_llama3.launch import session
from raytrain_llama3.launch.signals import StopSignal

# Each worker has one core: a tokenizer of many threads would take the others'.
_ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@functools.cache
def _encoder_of_this_process(tokenizer: str) -> Encoder:
    """Opened once: a worker runs one part of the corpus after another."""
    return open_encoder(tokenizer)


def tokenize_part(job: Job) -> Done:
    """In a worker: write the shard of a job, and say what is in it."""
    return run_job(job, _encoder_of_this_process(job.tokenizer))


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
    """Each as it is done. By plain tasks: Ray Data would take longer to start than a small corpus takes to tokenize."""
    import ray

    task = ray.remote(num_cpus=1)(tokenize_part)
    waiting = iter(jobs)
    running = [task.remote(job) for job in itertools.islice(waiting, workers)]
    while running:
        (first,), running = ray.wait(running)
        running += [task.remote(job) for job in itertools.islice(waiting, 1)]
        yield ray.get(first)
