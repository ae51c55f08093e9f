from __future__ import annotations

import io
import json
import math
import resource
import signal
from pathlib import Path

import pytest

from raytrain_llama3.messages import EvalRecord, SaveRecord, StepRecord
from raytrain_llama3.metrics import Metrics, RunFacts, open_metrics
from raytrain_llama3.metrics.append import WholeAppends

FACTS = RunFacts(
    train_steps=30,
    global_batch_size=8,
    devices=2,
    flops_per_token=3.5e6,
    peak_flops=None,
    log_interval=10,
    log_throughput=True,
    device="cpu",
)


def refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def read(folder: Path) -> list[dict[str, object]]:
    text = (folder / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def opened(folder: Path) -> Metrics:
    return open_metrics(FACTS, folder, io.StringIO(), None, None, {})


def step(number: int, loss: float = 2.5, grad_norm: float = 0.5) -> StepRecord:
    return StepRecord(number, number * 8, 256, loss, 1e-3, grad_norm, 0.125, 1000.0 + number)


def test_every_kind_of_line(tmp_path: Path) -> None:
    with opened(tmp_path / "made") as metrics:
        metrics.start_attempt(2, 10)
        metrics.step(step(11))
        metrics.evaluation(EvalRecord(11, 2.0, 512, 0.5, 1012.0))
        metrics.saved(SaveRecord(11, 88, "/c/iter_0000011", 1.5, {"dtype": "bf16"}))
        metrics.event("a warning")
    start, first, evaluation, save, event = read(tmp_path / "made")
    assert (start["kind"], start["attempt"], start["step"]) == ("event", 2, 10)
    assert start["facts"]["flops_per_token"] == 3.5e6  # type: ignore[index]
    assert first == {
        "kind": "step",
        "time": 1011.0,
        "attempt": 2,
        "step": 11,
        "samples": 88,
        "tokens": 256,
        "loss": 2.5,
        "learning_rate": 1e-3,
        "grad_norm": 0.5,
        "step_s": 0.125,
        "peak_memory_bytes": 0,
        "skipped": False,
        "product_flops": 0.0,
        "power_w": 0.0,
    }
    assert evaluation == {
        "kind": "evaluation",
        "time": 1012.0,
        "attempt": 2,
        "step": 11,
        "loss": 2.0,
        "tokens": 512,
        "seconds": 0.5,
        "perplexity": math.exp(2.0),
    }
    assert isinstance(save.pop("time"), float)
    assert save == {
        "kind": "save",
        "attempt": 2,
        "step": 11,
        "samples": 88,
        "path": "/c/iter_0000011",
        "seconds": 1.5,
    }
    assert (event["kind"], event["text"]) == ("event", "a warning")


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    with opened(tmp_path) as metrics:
        metrics.step(step(1, loss=math.nan, grad_norm=math.inf))
        metrics.evaluation(EvalRecord(1, 1e9, 1, 0.1, 5.0))
    first, evaluation = read(tmp_path)
    assert (first["loss"], first["grad_norm"]) == (None, None)
    assert (evaluation["loss"], evaluation["perplexity"]) == (1e9, None)


def test_a_later_run_appends(tmp_path: Path) -> None:
    for first in (1, 3):
        with opened(tmp_path) as metrics:
            metrics.step(step(first))
            metrics.step(step(first + 1))
    assert [line["step"] for line in read(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("rest", ['{"kind": "step", "st', "x" * 5000])
def test_half_a_line_of_a_killed_driver_is_cut_off(tmp_path: Path, rest: str) -> None:
    with opened(tmp_path) as metrics:
        metrics.step(step(1))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(rest)
    with opened(tmp_path) as metrics:
        metrics.step(step(2))
    assert [line["step"] for line in read(tmp_path)] == [1, 2]


def test_a_line_is_there_at_once(tmp_path: Path) -> None:
    with opened(tmp_path) as metrics:
        metrics.step(step(1))
        assert len(read(tmp_path)) == 1


def test_a_record_that_does_not_fit_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "records"
    former, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    file = WholeAppends(path)
    try:
        file.write(b"one\n")
        resource.setrlimit(resource.RLIMIT_FSIZE, (6, former[1]))
        with pytest.raises(OSError, match="File too large"):
            file.write(b"two and more\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
        signal.signal(signal.SIGXFSZ, handler)
    file.write(b"three\n")
    file.close()
    assert path.read_bytes() == b"one\nthree\n"
