from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as ServerAccumulator

from raytrain_llama3.messages import EvalRecord, SaveRecord, StepRecord
from raytrain_llama3.metrics import Metrics, RunFacts, open_metrics

FACTS = RunFacts(
    train_steps=30,
    global_batch_size=8,
    devices=2,
    flops_per_token=1e9,
    peak_flops=1e14,
    log_interval=1,
    log_throughput=True,
    device="cuda",
)


def opened(folder: Path, facts: RunFacts = FACTS) -> Metrics:
    return open_metrics(facts, folder, io.StringIO(), None, None, {})


def step(number: int, loss: float = 2.5) -> StepRecord:
    return StepRecord(number, number * 8, 256, loss, 1e-3, 0.5, 0.125, 1000.0 + number, 1 << 30)


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def read_as_server(folder: Path, tag: str) -> list[int]:
    """Steps as TensorBoard's own web server sees them."""
    return [event.step for event in ServerAccumulator(str(folder)).Reload().Tensors(tag)]


def test_scalars_have_megatrons_names(tmp_path: Path) -> None:
    with opened(tmp_path) as metrics:
        metrics.start_attempt(1, 4)
        metrics.step(step(5))
        metrics.evaluation(EvalRecord(5, 2.0, 512, 0.5, 1006.0))
        metrics.saved(SaveRecord(5, 40, "/c/iter_0000005", 1.5, {}))
    assert read(tmp_path) == {
        "lm loss": [(5, 2.5)],
        "learning-rate": [(5, pytest.approx(1e-3))],
        "grad-norm": [(5, 0.5)],
        "batch-size": [(5, 8.0)],
        "samples": [(5, 40.0)],
        "iteration-time": [(5, 0.125)],
        "throughput": [(5, pytest.approx(1.024))],
        "mfu": [(5, pytest.approx(0.01024))],
        "tokens-per-second": [(5, 2048.0)],
        "tokens-per-second-per-device": [(5, 1024.0)],
        "mem-max-allocated-bytes": [(5, float(1 << 30))],
        "skipped-steps": [(5, 0.0)],
        "attempt": [(5, 1.0)],
        "lm loss validation": [(5, 2.0)],
        "lm loss validation ppl": [(5, pytest.approx(math.exp(2.0)))],
        "save-checkpoint-time": [(5, 1.5)],
    }


def test_what_is_not_known_has_no_tag(tmp_path: Path) -> None:
    with opened(tmp_path, replace(FACTS, log_throughput=False)) as metrics:
        metrics.step(replace(step(1), peak_memory_bytes=0))
    assert not {"throughput", "mfu", "mem-max-allocated-bytes"} & read(tmp_path).keys()


def first_run(metrics: Metrics) -> None:
    metrics.start_attempt(0, 0)
    for i in range(1, 9):
        metrics.step(step(i, loss=1.0))
    metrics.evaluation(EvalRecord(5, 1.0, 512, 0.5, 1006.0))
    metrics.evaluation(EvalRecord(8, 1.0, 512, 0.5, 1006.0))


def second_run(metrics: Metrics, attempt: int) -> None:
    metrics.start_attempt(attempt, 5)
    for i in range(6, 11):
        metrics.step(step(i, loss=2.0))


EXPECTED = [(i, 1.0) for i in range(1, 6)] + [(i, 2.0) for i in range(6, 11)]


def test_a_restart_shows_no_step_twice(tmp_path: Path) -> None:
    with opened(tmp_path) as metrics:
        first_run(metrics)
        second_run(metrics, 1)
    assert read(tmp_path)["lm loss"] == EXPECTED
    assert read(tmp_path)["lm loss validation"] == [(5, 1.0)]
    assert read_as_server(tmp_path, "lm loss") == list(range(1, 11))


def test_a_resumed_run_shows_no_step_twice(tmp_path: Path) -> None:
    with opened(tmp_path) as metrics:
        first_run(metrics)
    with opened(tmp_path) as metrics:
        second_run(metrics, 0)
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 2
    assert read(tmp_path)["lm loss"] == EXPECTED
    assert read_as_server(tmp_path, "lm loss") == list(range(1, 11))


def test_recoveries_have_scalars_that_later_attempts_leave_alone(tmp_path: Path) -> None:
    now = [0.0]
    with open_metrics(FACTS, tmp_path, io.StringIO(), None, None, {}, lambda: now[0]) as metrics:
        first_run(metrics)
        for attempt, now[0] in ((1, 10.0), (2, 20.0)):
            metrics.start_attempt(attempt, 5)
            metrics.step(step(6))
            metrics.recovered({"detect": 0.5, "first_step": attempt}, 3, 5, {"kept": 2})
    found = read(tmp_path)
    assert found["recovery/detect"] == [(5, 0.5), (5, 0.5)]
    assert found["recovery/first_step"] == [(5, 1.0), (5, 2.0)]
    assert found["recovery/total"] == [(5, 1.5), (5, 2.5)]
    assert found["lost-steps"] == [(5, 3.0), (5, 3.0)]
    # Six steps of 0.125 s.
    assert found["goodput"] == [(5, pytest.approx(0.075)), (5, pytest.approx(0.0375))]


def test_a_point_is_there_at_once(tmp_path: Path) -> None:
    with opened(tmp_path) as metrics:
        metrics.step(step(1))
        assert read(tmp_path)["lm loss"] == [(1, 2.5)]
