"""Parts of a text corpus tokenized by this process and Ray's workers."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

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
    """Run jobs on `workers` processes: this one, and those of a Ray of our own, which ends with the block.

    Ray starts with the first jobs, beside them.
    """
    # Workers inherit it from this process. A runtime environment would say the same, and every worker would be started
    # anew for it, when those that Ray starts with itself are ready.
    env.apply(_ONE_THREAD, ())
    with StopSignal() as stop, contextlib.ExitStack() as until_end:

        def start_ray() -> None:
            config = Config(device="cpu", ray_dashboard=False)
            until_end.enter_context(session.start(config, "cpu", 0, stop, cores=workers - 1))

        yield lambda jobs: _run(jobs, workers, start_ray)


def _run(jobs: Sequence[Job], workers: int, start_ray: Callable[[], None]) -> Iterator[Done]:
    """Each as it is done. By plain tasks: Ray Data would take longer to start than a small corpus takes to tokenize."""
    waiting, ended = deque(jobs), SimpleQueue[Done | BaseException]()
    try:
        _work_off(waiting, tokenize_part, ended)
        if len(jobs) > 1 and workers > 1:
            start_ray()
            for _ in range(min(workers - 1, len(waiting))):
                _work_off(waiting, _by_ray, ended)
        for _ in jobs:
            done = ended.get()
            if isinstance(done, BaseException):
                raise done
            yield done
    finally:
        waiting.clear()


def _work_off(waiting: deque[Job], run: Callable[[Job], Done], ended: SimpleQueue[Done | BaseException]) -> None:
    """On a thread of its own, run one job after another, as long as there are any."""

    def work() -> None:
        while True:
            try:
                job = waiting.popleft()
            except IndexError:
                return
            try:
                ended.put(run(job))
            except BaseException as error:  # noqa: BLE001  (raised where the answers are taken)
                ended.put(error)

    threading.Thread(target=work, daemon=True).start()


def _by_ray(job: Job) -> Done:
    import ray

    done: Done = ray.get(ray.remote(num_cpus=1)(tokenize_part).remote(job))
    return done
