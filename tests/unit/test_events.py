from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from raytrain_llama3.messages import EvalRecord, Failure, FailureKind, SaveRecord, StepRecord
from raytrain_llama3.metrics import Metrics, RunFacts, open_metrics

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
FAILURE = Failure(
    rank=3,
    node_ip="10.0.0.7",
    kind=FailureKind.CRASHED,
    error="SIGSEGV",
    step=4,
    attempt=0,
    node_id="ab12",
    at=990.0,
    detect_s=0.125,
    log_path="/logs/rank_3.log",
    log_tail=("a line", "Fatal: ä"),
    others=(0, 1),
)


def refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def read(folder: Path) -> list[dict[str, object]]:
    text = (folder / "events.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def opened(folder: Path, clock: Callable[[], float]) -> Metrics:
    return open_metrics(FACTS, folder, io.StringIO(), None, None, {}, clock)


def step(number: int) -> StepRecord:
    return StepRecord(number, number * 8, 256, 2.5, 1e-3, 0.5, 0.5, 1000.0 + number)


def test_the_story_of_a_run(tmp_path: Path) -> None:
    now = [50.0]
    with opened(tmp_path, lambda: now[0]) as metrics:
        metrics.start_attempt(0, 0)
        for number in range(1, 5):
            metrics.step(step(number))
        metrics.evaluation(EvalRecord(2, 2.0, 512, 0.5, 1012.0))
        metrics.saved(SaveRecord(2, 16, "/c/iter_0000002", 1.5, {"dtype": "bf16"}))
        metrics.event("words")
        metrics.fault(FAILURE, "restart 1 of 3")
        metrics.start_attempt(1, 2)
        now[0] = 58.0
        metrics.step(step(3))
        metrics.recovered({"detect": 0.125, "first_step": 0.5}, 2, 2, {"kept": 1, "standby": 1})
        now[0] = 60.0
        summary = metrics.ended(138)
    found = read(tmp_path)
    assert all(isinstance(line.pop("time"), float) for line in found)
    start, checkpoint, fault, restart, recovery, end = found
    assert start == {"kind": "attempt", "attempt": 0, "resume_step": 0}
    assert checkpoint == {
        "kind": "checkpoint",
        "attempt": 0,
        "step": 2,
        "samples": 16,
        "path": "/c/iter_0000002",
        "seconds": 1.5,
    }
    assert fault == {
        "kind": "fault",
        "attempt": 0,
        "decision": "restart 1 of 3",
        "failure": {
            "rank": 3,
            "node_ip": "10.0.0.7",
            "kind": "process crashed",
            "error": "SIGSEGV",
            "step": 4,
            "attempt": 0,
            "node_id": "ab12",
            "exit_code": None,
            "at": 990.0,
            "detect_s": 0.125,
            "log_path": "/logs/rank_3.log",
            "log_tail": ["a line", "Fatal: ä"],
            "others": [0, 1],
        },
    }
    assert restart == {"kind": "attempt", "attempt": 1, "resume_step": 2}
    assert recovery == {
        "kind": "recovery",
        "attempt": 1,
        "phases": {"detect": 0.125, "first_step": 0.5},
        "total_s": 0.625,
        "lost_steps": 2,
        "resume_step": 2,
        "processes": {"kept": 1, "standby": 1},
        # Steps 1 to 3, half a second each, in 8 s.
        "goodput": 1.5 / 8,
    }
    assert list(recovery["phases"]) == ["detect", "first_step"]  # type: ignore[call-overload]
    assert end == {
        "kind": "end",
        "attempt": 1,
        "exit_code": 138,
        "attempts": 2,
        "faults": 1,
        "preemptions": 0,
        "lost_steps": 2,
        "counted_s": 1.5,
        "elapsed_s": 10.0,
        "goodput": 0.15,
    }
    assert (summary.attempts, summary.faults, summary.preemptions, summary.lost_steps) == (2, 1, 0, 2)
    assert summary.goodput == 0.15


def test_a_fault_before_the_first_step_of_a_run(tmp_path: Path) -> None:
    now = [0.0]
    with opened(tmp_path, lambda: now[0]) as metrics:
        metrics.start_attempt(0, 0)
        metrics.fault(FAILURE, "restart 1 of 3")
        metrics.start_attempt(1, 0)
        now[0] = 4.0
        metrics.step(step(1))
        metrics.recovered({"detect": 0.1}, 0, 0, {"new": 2})
    recovery = read(tmp_path)[-1]
    assert (recovery["kind"], recovery["lost_steps"], recovery["goodput"]) == ("recovery", 0, 0.125)


def test_a_later_run_appends_after_half_a_line_of_a_killed_one(tmp_path: Path) -> None:
    with opened(tmp_path, lambda: 0.0) as metrics:
        metrics.start_attempt(0, 0)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"kind": "fau')
    with opened(tmp_path, lambda: 0.0) as metrics:
        metrics.start_attempt(0, 20)
    assert [line["resume_step"] for line in read(tmp_path)] == [0, 20]


@pytest.mark.parametrize("kind", ["attempt", "fault", "recovery", "checkpoint", "end"])
def test_a_line_is_there_at_once(tmp_path: Path, kind: str) -> None:
    with opened(tmp_path, lambda: 0.0) as metrics:
        metrics.start_attempt(0, 0)
        match kind:
            case "fault":
                metrics.fault(FAILURE, "stop")
            case "recovery":
                metrics.recovered({"detect": 0.1}, 0, 0, {})
            case "checkpoint":
                metrics.saved(SaveRecord(2, 16, "/c/iter_0000002", 1.5, {}))
            case "end":
                metrics.ended(0)
        assert read(tmp_path)[-1]["kind"] == kind
