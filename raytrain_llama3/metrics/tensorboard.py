"""Scalars for TensorBoard, under the names that Megatron-LM gives them where it has one."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raytrain_llama3.messages import EvalRecord, StepRecord
from raytrain_llama3.metrics.append import WholeAppends
from raytrain_llama3.metrics.record import (
    AttemptStart,
    Ended,
    Event,
    Fault,
    Item,
    Recovered,
    Saved,
    StepMetrics,
    perplexity,
)


def scalars(metrics: StepMetrics) -> dict[str, float]:
    """Tag and value of everything that is known about an interval.

    There is no `lm loss vs samples`: a restart makes TensorBoard drop points by their position on the axis, whatever
    it counts. `samples` over steps says the same.
    """
    rates = metrics.throughput
    values = {
        "lm loss": metrics.loss,
        "learning-rate": metrics.learning_rate,
        "grad-norm": metrics.grad_norm,
        "batch-size": metrics.batch_size,
        "samples": metrics.samples,
        "iteration-time": metrics.step_s,
        "throughput": rates.tflops_per_device,
        "mfu": rates.mfu,
        "share-of-product-rate": rates.of_products,
        "power-watts": metrics.power_w or None,
        "tokens-per-second": rates.tokens_per_s,
        "tokens-per-second-per-device": rates.tokens_per_s_per_device,
        "mem-max-allocated-bytes": metrics.peak_memory_bytes or None,
        "skipped-steps": metrics.skipped_steps,
        "attempt": metrics.attempt,
    }
    return {tag: value for tag, value in values.items() if value is not None}


def evaluation_scalars(record: EvalRecord) -> dict[str, float]:
    """Tag and value of an evaluation."""
    return {"lm loss validation": record.loss, "lm loss validation ppl": perplexity(record)}


def recovery_scalars(item: Recovered) -> dict[str, float]:
    """Tag and value of a recovery: seconds by phase and in all, steps lost, and the goodput so far."""
    phases = {f"recovery/{name}": seconds for name, seconds in item.phase_seconds.items()}
    return {**phases, "recovery/total": item.total_s, "lost-steps": item.lost_steps, "goodput": item.goodput}


class TensorBoardSink:
    """Writes one event file into `folder`, each record on its way to the disk at once.

    tensorboard's own `RecordWriter` encodes the records; its `EventFileWriter` above that would import TensorFlow
    where that is installed, and meet a full disk in a thread of its own.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event_pb2, self._summary_pb2 = event_pb2, summary_pb2
        # TensorBoard reads a folder's files in the order of their names: nanoseconds keep two starts apart.
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{seconds:010d}.{nanoseconds:09d}.{socket.gethostname()}.{os.getpid()}"
        self._file = WholeAppends(folder / name)
        self._records = RecordWriter(self._file)
        self._append(time.time(), file_version="brain.Event:2")

    def write(self, item: Item) -> None:
        """Append the scalars of `item`; single steps, events, faults and the end have none."""
        match item:
            case AttemptStart():
                # TensorBoard drops what earlier sessions wrote at this step or later: it is about to come again.
                start = self._event_pb2.SessionLog(status=self._event_pb2.SessionLog.START)
                self._append(item.at, step=item.resume_step + 1, session_log=start)
            case StepMetrics():
                self._scalars(item.finished_at, item.step, scalars(item))
            case EvalRecord():
                self._scalars(item.finished_at, item.step, evaluation_scalars(item))
            case Saved(record, at):
                self._scalars(at, record.step, {"save-checkpoint-time": record.seconds})
            case Recovered():
                # Not at a later step: the next attempt from the same checkpoint would have TensorBoard drop it.
                self._scalars(item.at, item.resume_step, recovery_scalars(item))
            case StepRecord() | Event() | Fault() | Ended():
                pass

    def close(self) -> None:
        """Close the event file."""
        self._file.close()

    def _scalars(self, at: float, step: int, values: Mapping[str, float]) -> None:
        make = self._summary_pb2.Summary
        entries = [make.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._append(at, step=step, summary=make(value=entries))

    def _append(self, at: float, **fields: Any) -> None:
        self._records.write(self._event_pb2.Event(wall_time=at, **fields).SerializeToString())
