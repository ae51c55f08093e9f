"""Parts of a text corpus tokenized by processes of Ray Data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from raytrain_llama3.config.schema import Config
from raytrain_llama3.data.encoders import Encoder, open_encoder
from raytrain_llama3.data.tokenize import Done, Job, Runner, packed_job, run_job, unpacked_job
from raytrain_llama3.launch import session
from raytrain_llama3.launch.signals import StopSignal


class PartTokenizer:
    """A worker: one tokenizer, and one part of the corpus after another."""

    def __init__(self) -> None:
        self._encoders: dict[str, Encoder] = {}

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Write the shard of the job in `row`, and say what is in it."""
        job = unpacked_job(row["job"])
        if job.tokenizer not in self._encoders:
            self._encoders[job.tokenizer] = open_encoder(job.tokenizer)
        done = run_job(job, self._encoders[job.tokenizer])
        told = {"part": done.part, "documents": done.documents, "tokens": done.tokens, "error": done.error}
        return told | {"left_out": "\n".join(done.left_out)}


@contextlib.contextmanager
def ray_runner(workers: int) -> Iterator[Runner]:
    """Run jobs on `workers` processes of a Ray of our own, which ends with the block."""
    config = Config(device="cpu", ray_dashboard=False)
    with StopSignal() as stop, session.start(config, "cpu", workers, stop):
        yield lambda jobs: _run(jobs, workers)


def _run(jobs: Sequence[Job], workers: int) -> Iterator[Done]:
    import ray

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    # Each worker has one core: a tokenizer of many threads would take the others'.
    environment = {"env_vars": {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}}
    rows = ray.data.from_items([{"job": packed_job(job)} for job in jobs], override_num_blocks=len(jobs))
    tokenizer: Any = PartTokenizer
    done = rows.map(tokenizer, concurrency=min(workers, len(jobs)), num_cpus=1, runtime_env=environment)
    for row in done.iter_rows():
        left_out = tuple(row["left_out"].splitlines())
        yield Done(row["part"], row["documents"], row["tokens"], left_out, row["error"])
