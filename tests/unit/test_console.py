from __future__ import annotations

import io
import json
import math
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from raytrain_llama3.errors import ConfigError
from raytrain_llama3.messages import EvalRecord, Failure, FailureKind, SaveRecord, StepRecord
from raytrain_llama3.metrics import RunFacts, Summary, open_metrics
from raytrain_llama3.metrics.console import count, duration, loss, seconds, short, summary_lines

FACTS = RunFacts(
    train_steps=300,
    global_batch_size=8,
    devices=2,
    flops_per_token=3.5e6,
    peak_flops=None,
    log_interval=10,
    log_throughput=True,
    device="cpu",
)
ON_H200 = replace(FACTS, devices=8, flops_per_token=5e10, peak_flops=989e12, device="cuda", log_interval=1)


def step(number: int, **values: object) -> StepRecord:
    record = StepRecord(
        step=number,
        samples=number * 8,
        tokens=2275,
        loss=2.4213,
        learning_rate=2.1e-3,
        grad_norm=0.84,
        step_s=0.125,
        finished_at=1000.0 + number,
    )
    return replace(record, **values)  # type: ignore[arg-type]


def lines(folder: Path, facts: RunFacts, *records: StepRecord | EvalRecord | SaveRecord | str) -> list[str]:
    out = io.StringIO()
    with open_metrics(facts, folder, out, None, None, {}) as metrics:
        metrics.start_attempt(0, 0)
        for record in records:
            match record:
                case StepRecord():
                    metrics.step(record)
                case EvalRecord():
                    metrics.evaluation(record)
                case SaveRecord():
                    metrics.saved(record)
                case str():
                    metrics.event(record)
    return out.getvalue().splitlines()


def test_one_line_for_each_interval(tmp_path: Path) -> None:
    assert lines(tmp_path, FACTS, *(step(i) for i in range(1, 21))) == [
        "step  10/300 | loss 2.4213 | lr 2.1e-03 | grad 0.84 | 18.2k tok/s | 9.10k tok/s/device | "
        "0.03 TFLOP/s/device | 0.125 s/step | ETA 37 s | attempt 0",
        "step  20/300 | loss 2.4213 | lr 2.1e-03 | grad 0.84 | 18.2k tok/s | 9.10k tok/s/device | "
        "0.03 TFLOP/s/device | 0.125 s/step | ETA 35 s | attempt 0",
    ]


def test_memory_and_mfu_are_shown_where_they_are_known(tmp_path: Path) -> None:
    record = step(7, tokens=65536, step_s=1.0, loss=11.7621, peak_memory_bytes=int(61.25 * 2**30))
    assert lines(tmp_path, ON_H200, record) == [
        "step   7/300 | loss 11.762 | lr 2.1e-03 | grad 0.84 | 65.5k tok/s | 8.19k tok/s/device | "
        " 410 TFLOP/s/device | 41.4% MFU | 1.000 s/step |  61.2 GiB | ETA 4 min 53 s | attempt 0"
    ]


def test_log_throughput_off_hides_tflops_and_mfu(tmp_path: Path) -> None:
    (line,) = lines(tmp_path, replace(ON_H200, log_throughput=False), step(7))
    assert "FLOP" not in line
    assert "MFU" not in line
    assert "tok/s/device" in line


def test_skipped_and_non_finite_steps_show(tmp_path: Path) -> None:
    (line,) = lines(tmp_path, FACTS, *(step(i, loss=math.nan, grad_norm=math.inf, skipped=True) for i in range(1, 11)))
    assert "loss    nan | lr 2.1e-03 | grad  inf" in line
    assert "skipped 10 of 10 | attempt 0" in line


def test_evaluations_saves_and_events(tmp_path: Path) -> None:
    found = lines(
        tmp_path,
        FACTS,
        EvalRecord(100, 2.3321, 16384, 0.42, 5.0),
        SaveRecord(100, 800, "/runs/a/iter_0000100", 1.26, {}),
        "rank-1@node-0 died; attempt 1 begins",
    )
    assert found == [
        "step 100/300 | validation loss 2.3321 | perplexity 10.30 | 16.4k tokens in 0.4 s",
        "step 100/300 | saved in 1.3 s as iter_0000100",
        "rank-1@node-0 died; attempt 1 begins",
    ]


def test_the_end_of_a_run_is_told_even_between_intervals(tmp_path: Path) -> None:
    stopped = lines(tmp_path / "a", FACTS, *(step(i) for i in range(1, 14)))
    assert [line.split(" | ")[0] for line in stopped] == ["step  10/300", "step  13/300"]
    finished = lines(tmp_path / "b", replace(FACTS, train_steps=13), *(step(i) for i in range(1, 14)))
    assert [line.split(" | ")[0] for line in finished] == ["step 10/13", "step 13/13"]


def test_a_restart_forgets_the_steps_that_come_again(tmp_path: Path) -> None:
    out = io.StringIO()
    with open_metrics(FACTS, tmp_path, out, None, None, {}) as metrics:
        metrics.start_attempt(0, 0)
        for i in range(1, 19):
            metrics.step(step(i, loss=1.0 if i <= 15 else 99.0))
        metrics.start_attempt(1, 15)
        for i in range(16, 21):
            metrics.step(step(i, loss=3.0))
    assert out.getvalue().splitlines()[1] == "attempt 1 goes on after step 15"
    # Steps 11 to 15 of the first attempt, 16 to 20 of the second.
    assert out.getvalue().splitlines()[2].startswith("step  20/300 | loss 2.0000")
    assert out.getvalue().splitlines()[2].endswith("attempt 1")


def test_an_attempt_with_fewer_devices_has_its_own_rates(tmp_path: Path) -> None:
    out = io.StringIO()
    with open_metrics(FACTS, tmp_path, out, None, None, {}) as metrics:
        for attempt, devices in enumerate((8, 4)):
            metrics.start_attempt(attempt, 0, devices)
            for i in range(1, 11):
                metrics.step(step(i, tokens=8000, step_s=1.0))
    rates = [line.split(" | ")[5] for line in out.getvalue().splitlines() if " | " in line]
    assert rates == ["1.00k tok/s/device", "2.00k tok/s/device"]


def test_every_line_of_a_run_has_the_same_columns(tmp_path: Path) -> None:
    records = [
        step(1, tokens=995, loss=11.76, grad_norm=12.34, step_s=1.0),
        step(50, tokens=64_000, loss=9.9999, grad_norm=9.996, step_s=9.9996),
        step(300, tokens=3_000_000, loss=0.98765, grad_norm=0.02, step_s=12.3),
    ]
    found = lines(tmp_path, replace(ON_H200, flops_per_token=3e9), *records)
    columns = [[i for i, c in enumerate(line) if c == "|"] for line in found]
    assert columns[0][:-1] == columns[1][:-1] == columns[2][:-1]


def test_the_summary_is_of_this_process(tmp_path: Path) -> None:
    now = [100.0]
    with open_metrics(FACTS, tmp_path, io.StringIO(), None, None, {}, lambda: now[0]) as metrics:
        assert metrics.summary == Summary(None, None, None, 0, 0.0, 0.0, 0, 0, 0, 0, 0.0)
        metrics.start_attempt(0, 15)
        metrics.step(step(16, loss=4.0))
        metrics.evaluation(EvalRecord(16, 3.5, 10, 0.1, 5.0))
        metrics.step(step(17, loss=3.0))
    now[0] += 0.5
    assert metrics.summary == Summary(4.0, 3.0, 3.5, 4550, 0.25, 18200.0, 1, 0, 0, 0, 0.5)


SUMMARY = Summary(4.0, 3.0, 3.5, 4550, 0.25, 18200.0, 1, 0, 0, 0, 0.873)


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({}, []),
        ({"attempts": 2, "faults": 1}, ["attempts     2: 1 fault, 0 preemptions, 0 lost steps"]),
        (
            {"attempts": 4, "faults": 2, "preemptions": 1, "lost_steps": 1},
            ["attempts     4: 2 faults, 1 preemption, 1 lost step"],
        ),
    ],
)
def test_the_closing_table_tells_attempts_where_there_were_several(changes: dict[str, int], rows: list[str]) -> None:
    assert summary_lines(replace(SUMMARY, **changes)) == [  # type: ignore[arg-type]
        "loss         4.0000 at first, 3.0000 at last",
        "validation   3.5000",
        "speed        18,200 tokens/s over 4,550 tokens",
        *rows,
        "goodput      87.3 % of the time went into steps that count",
    ]


def test_a_run_that_ended_before_its_first_step_has_its_accounts_too() -> None:
    empty = Summary(None, None, None, 0, 0.0, 0.0, 3, 3, 0, 0, 0.0)
    assert summary_lines(empty) == [
        "attempts     3: 3 faults, 0 preemptions, 0 lost steps",
        "goodput      0.0 % of the time went into steps that count",
    ]


PHASES = {"detect": 0.1, "clear": 0.3, "place": 0.0, "start": 0.2, "load": 0.9, "first_step": 0.6}


@pytest.mark.parametrize(
    ("phases", "lost_steps", "processes", "line"),
    [
        (
            PHASES,
            12,
            {"kept": 3, "standby": 1, "new": 0},
            "recovered in 2.1 s: detect 0.1, clear 0.3, place 0.0, start 0.2, load 0.9, first step 0.6; 12 steps are "
            "trained again; 3 processes kept, 1 from standby",
        ),
        (
            {"detect": 19.96, "wait": 40.0},
            1,
            {"kept": 0, "new": 1},
            "recovered in 60.0 s: detect 20.0, wait 40.0; 1 step is trained again; 1 process new",
        ),
        ({"detect": 1.0}, 0, {}, "recovered in 1.0 s: detect 1.0; no step is trained again"),
    ],
)
def test_one_line_for_each_recovery(
    tmp_path: Path, phases: dict[str, float], lost_steps: int, processes: dict[str, int], line: str
) -> None:
    out = io.StringIO()
    with open_metrics(FACTS, tmp_path, out, None, None, {}) as metrics:
        metrics.fault(Failure(1, "10.0.0.7", FailureKind.DIED, "process died", 5, 0), "restart 1 of 3")
        metrics.recovered(phases, lost_steps, 3, processes)
        metrics.ended(0)
    # The fault and the end are told by those who know more of them.
    assert out.getvalue().splitlines() == [line]


@contextmanager
def no_room() -> Iterator[None]:
    """No file of this process may grow beyond 1 KiB; the test runner's own output may be one."""
    former, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_costs_one_warning_for_each_file(tmp_path: Path) -> None:
    with no_room():
        found = lines(tmp_path, FACTS, *(step(i) for i in range(1, 41)))
    names = [line.split(" cannot be written (")[0] for line in found if "[Errno" in line]
    assert sorted(names) == ["warning: TensorBoard", "warning: metrics.jsonl"]
    assert sum(line.startswith("step ") for line in found) == 4
    written = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in written] == ["event", *["step"] * (len(written) - 1)]
    assert len(written) > 1


def test_a_folder_that_cannot_be_made_costs_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = lines(tmp_path / "file" / "logs", replace(FACTS, log_interval=1), step(1))
    assert [line.startswith("warning: no metrics in") for line in found] == [True, True, True, False]


def test_a_closed_terminal_does_not_end_training(tmp_path: Path) -> None:
    # A stream that can only be read refuses every line with an OSError, as a terminal that has gone does.
    with Path("/dev/null").open() as out, open_metrics(FACTS, tmp_path, out, None, None, {}) as metrics:
        metrics.event("nobody reads this")
        metrics.step(step(1))
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert kinds == ["event", "step"]


def test_a_wandb_that_is_not_installed_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError) as caught:
        open_metrics(FACTS, tmp_path, io.StringIO(), "llama", None, {})
    (problem,) = caught.value.problems
    assert "wandb_project 'llama'" in problem
    assert "pip install 'raytrain-llama3[wandb]'" in problem
    assert list(tmp_path.iterdir()) == []


def test_importing_metrics_loads_nothing_slow() -> None:
    code = (
        "import sys, raytrain_llama3.metrics, raytrain_llama3.checkpoint.store\n"
        "print([m for m in ('torch', 'ray', 'numpy', 'tensorboard', 'wandb') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("form", "value", "text"),
    [
        (loss, 0.98765, "0.9877"),
        (loss, 9.99996, "10.000"),
        (loss, 11.7621, "11.762"),
        (loss, 123.456, "123.46"),
        (short, 0.0, "0.00"),
        (short, 0.004, "4.0e-03"),
        (short, 0.0312, "0.03"),
        (short, 84.12, "84.1"),
        (short, 841.2, " 841"),
        (seconds, 0.125, "0.125"),
        (seconds, 12.5, "12.50"),
        (count, 9.5, "  9.5"),
        (count, 950.0, "  950"),
        (count, 999.7, "1.00k"),
        (count, 18_200, "18.2k"),
        (count, 999_700, "1.00M"),
        (count, 5e12, "5000G"),
        (duration, 0.0, "0 s"),
        (duration, 21.2, "22 s"),
        (duration, 59.5, "1 min 00 s"),
        (duration, 7500, "2 h 05 min"),
        (duration, 90_000, "1 d 01 h"),
    ],
)
def test_forms_of_numbers(form: object, value: float, text: str) -> None:
    assert form(value) == text  # type: ignore[operator]
