from __future__ import annotations

import math
from dataclasses import replace

import pytest

from raytrain_llama3.messages import EvalRecord, StepRecord
from raytrain_llama3.metrics.record import RunFacts, perplexity, summarise, throughput

FACTS = RunFacts(
    train_steps=100,
    global_batch_size=8,
    devices=4,
    flops_per_token=2e9,
    peak_flops=1e13,
    log_interval=2,
    log_throughput=True,
    device="cuda",
)


def step(number: int, **values: object) -> StepRecord:
    record = StepRecord(
        step=number,
        samples=number * 8,
        tokens=1000,
        loss=float(number),
        learning_rate=number / 1000,
        grad_norm=number / 10,
        step_s=0.25,
        finished_at=1000.0 + number,
        peak_memory_bytes=number << 30,
    )
    return replace(record, **values)  # type: ignore[arg-type]


def test_an_interval_is_told_at_its_last_step() -> None:
    metrics = summarise(FACTS, 3, [step(9, step_s=0.75), step(10)])
    assert (metrics.step, metrics.train_steps, metrics.samples, metrics.tokens) == (10, 100, 80, 2000)
    assert (metrics.loss, metrics.learning_rate, metrics.grad_norm) == (9.5, 0.01, 1.0)
    assert (metrics.batch_size, metrics.attempt, metrics.steps, metrics.skipped_steps) == (8, 3, 2, 0)
    assert (metrics.step_s, metrics.eta_s) == (0.5, 45.0)
    assert (metrics.peak_memory_bytes, metrics.finished_at) == (10 << 30, 1010.0)
    # 2000 tokens in 1 s over 4 devices, 2e9 FLOP each, of 1e13 FLOP/s.
    assert metrics.throughput.tokens_per_s == 2000
    assert metrics.throughput.tokens_per_s_per_device == 500
    assert metrics.throughput.tflops_per_device == pytest.approx(1.0)
    assert metrics.throughput.mfu == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("change", "tflops", "mfu"),
    [
        ({}, 1.0, 0.1),
        ({"peak_flops": None}, 1.0, None),
        ({"log_throughput": False}, None, None),
        ({"devices": 1}, 4.0, 0.4),
    ],
)
def test_rates_follow_what_is_known(change: dict[str, object], tflops: float | None, mfu: float | None) -> None:
    rates = throughput(replace(FACTS, **change), 2000, 1.0)  # type: ignore[arg-type]
    assert rates.tflops_per_device == (None if tflops is None else pytest.approx(tflops))
    assert rates.mfu == (None if mfu is None else pytest.approx(mfu))


def test_no_time_is_no_rate() -> None:
    assert throughput(FACTS, 2000, 0.0).tokens_per_s == 0.0


def test_skipped_steps_are_counted_and_left_out_of_loss_and_norm() -> None:
    metrics = summarise(FACTS, 0, [step(1), step(2, loss=math.nan, grad_norm=math.inf, skipped=True)])
    assert (metrics.step, metrics.loss, metrics.grad_norm, metrics.skipped_steps) == (2, 1.0, 0.1, 1)
    assert metrics.tokens == 2000


def test_an_interval_of_skipped_steps_shows_what_went_wrong() -> None:
    metrics = summarise(FACTS, 0, [step(1, loss=math.nan, skipped=True), step(2, loss=math.nan, skipped=True)])
    assert math.isnan(metrics.loss)
    assert metrics.skipped_steps == 2


def test_the_last_step_has_nothing_left_to_wait_for() -> None:
    assert summarise(FACTS, 0, [step(100)]).eta_s == 0.0


@pytest.mark.parametrize(("loss", "expected"), [(0.0, 1.0), (2.0, math.e**2), (1e6, math.inf)])
def test_perplexity(loss: float, expected: float) -> None:
    assert perplexity(EvalRecord(1, loss, 10, 1.0, 0.0)) == pytest.approx(expected)
