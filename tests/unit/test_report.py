from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from raytrain_llama3.launch.crew import Member
from raytrain_llama3.launch.process import RankProcess
from raytrain_llama3.launch.report import Recovery, describe, write_stacks
from raytrain_llama3.launch.session import Node
from raytrain_llama3.messages import Failure, FailureKind, ProcessFacts, RankSpec
from raytrain_llama3.metrics import RunFacts, open_metrics

FAILURE = Failure(
    rank=2,
    node_ip="10.0.0.7",
    kind=FailureKind.DIED,
    error="process 33 ended without a word",
    step=7,
    attempt=0,
    detect_s=0.25,
    log_path="/logs/attempt_0/rank_2.log",
)


def full(failure: Failure, others: tuple[int, ...] = (), tail: tuple[str, ...] = ()) -> Failure:
    return replace(failure, others=others, log_tail=tail)


FIRST = "rank 2 on 10.0.0.7 failed at step 7 (process died): process 33 ended without a word"


@pytest.mark.parametrize(
    ("failure", "lines"),
    [
        (FAILURE, [FIRST]),
        (full(FAILURE, others=(1,)), [FIRST, "ranks 1 fell with it"]),
        (full(FAILURE, others=(0, 1, 3)), [FIRST, "ranks 0, 1, 3 fell with it"]),
        (
            full(FAILURE, tail=("step 7", "")),
            [FIRST, "the last lines of /logs/attempt_0/rank_2.log:", "  | step 7", "  | "],
        ),
        (
            full(FAILURE, others=(0, 3), tail=("a",)),
            [FIRST, "ranks 0, 3 fell with it", "the last lines of /logs/attempt_0/rank_2.log:", "  | a"],
        ),
    ],
)
def test_a_fault_in_words(failure: Failure, lines: list[str]) -> None:
    assert describe(failure) == lines


def test_stacks_are_in_one_file_in_the_order_of_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "attempt_3"
    stacks = {10: "thread MainThread\n  in ten", 2: "process 5 does not answer", 9: "in nine"}
    path = write_stacks(folder, stacks)
    assert path == folder / "stacks.txt"
    text = path.read_text()
    heads = [line for line in text.splitlines() if line.startswith("=====")]
    assert heads == ["===== rank 2", "===== rank 9", "===== rank 10"]
    assert text.split("===== rank ")[3] == "10\nthread MainThread\n  in ten\n"
    # A later hang of the same attempt says what holds then.
    write_stacks(folder, {0: "in zero"})
    assert path.read_text().split() == ["=====", "rank", "0", "in", "zero"]


FACTS = RunFacts(
    train_steps=30,
    global_batch_size=8,
    devices=3,
    flops_per_token=3.5e6,
    peak_flops=None,
    log_interval=10,
    log_throughput=True,
    device="cpu",
)


def member(rank: int, origin: str, import_s: float | None = 20.0) -> Member:
    facts = None if import_s is None else ProcessFacts(100 + rank, "host", {}, import_s, 1000.0)
    spec = RankSpec(rank, 3, 0, rank, 3, rank, "id", "10.0.0.7", attempt=1)
    process = RankProcess(None, Node("id", "10.0.0.7", {}, {}), Path("log"), None, facts, origin)
    return Member(spec, process)


def told(
    folder: Path,
    members: Sequence[Member],
    seconds: Mapping[str, float],
    training: Mapping[str, float],
    step: int = 7,
    resume_step: int = 4,
) -> dict[str, object]:
    """The line of `events.jsonl` about this recovery."""
    with open_metrics(FACTS, folder, io.StringIO(), None, None, {}) as metrics:
        metrics.start_attempt(1, resume_step)
        Recovery(FAILURE, step, dict(seconds)).tell(metrics, members, training, resume_step)
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    (line,) = (line for line in lines if line["kind"] == "recovery")
    return line


DRIVER = {"clear": 0.5, "place": 0.125, "start": 2.0}
RANK = {"process_group": 0.75, "model": 1.0, "load": 0.5, "first_step": 0.25}


def test_phases_come_in_order_from_the_fault_to_the_first_step(tmp_path: Path) -> None:
    line = told(tmp_path, [member(0, "kept")], DRIVER, RANK)
    phases = line["phases"]
    assert isinstance(phases, dict)
    assert list(phases.items()) == [
        ("detect", 0.25), ("clear", 0.5), ("place", 0.125), ("start", 2.0), ("import", 0.0),
        ("process_group", 0.75), ("model", 1.0), ("load", 0.5), ("first_step", 0.25),
    ]  # fmt: skip
    assert line["total_s"] == 0.25 + sum(DRIVER.values()) + sum(RANK.values())


@pytest.mark.parametrize(
    "later",
    [
        # The rank's own start is not the driver's; the others come after the first step.
        {"start": 0.01},
        {"start": 0.01, "train": 3.0, "evaluate": 2.0, "save": 1.5},
        {"import": 21.0},
    ],
)
def test_what_is_not_on_the_way_to_the_first_step_is_left_out(tmp_path: Path, later: dict[str, float]) -> None:
    line = told(tmp_path, [member(0, "kept")], DRIVER, RANK | later)
    assert line["total_s"] == 0.25 + sum(DRIVER.values()) + sum(RANK.values())


@pytest.mark.parametrize(
    ("members", "waited_s", "start_s", "import_s"),
    [
        # Only a process that this attempt had to start is waited for, the slowest of them.
        ([member(0, "kept", 30.0), member(1, "standby", 25.0)], 2.0, 2.0, 0.0),
        ([member(0, "kept", 30.0), member(1, "new", 20.0)], 24.0, 4.0, 20.0),
        ([member(0, "new", 18.0), member(1, "new", 20.0)], 24.0, 4.0, 20.0),
        ([member(0, "new", None)], 24.0, 24.0, 0.0),
        # Clocks differ: nothing takes less than no time.
        ([member(0, "new", 20.0)], 19.5, 0.0, 20.0),
    ],
)
def test_imports_are_part_of_the_wait_for_processes(
    tmp_path: Path, members: list[Member], waited_s: float, start_s: float, import_s: float
) -> None:
    phases = told(tmp_path, members, DRIVER | {"start": waited_s}, RANK)["phases"]
    assert isinstance(phases, dict)
    assert (phases["start"], phases["import"]) == (start_s, import_s)


@pytest.mark.parametrize(("step", "resume_step", "lost"), [(7, 4, 3), (7, 7, 0), (7, 0, 7), (4, 6, 0)])
def test_lost_steps_are_those_after_the_checkpoint(tmp_path: Path, step: int, resume_step: int, lost: int) -> None:
    line = told(tmp_path, [member(0, "kept")], DRIVER, RANK, step, resume_step)
    assert (line["lost_steps"], line["resume_step"]) == (lost, resume_step)


@pytest.mark.parametrize(
    ("origins", "processes"),
    [
        (["kept", "standby", "new"], {"kept": 1, "standby": 1, "new": 1}),
        (["kept", "kept", "standby"], {"kept": 2, "standby": 1, "new": 0}),
        (["new"], {"kept": 0, "standby": 0, "new": 1}),
    ],
)
def test_it_is_told_where_processes_came_from(tmp_path: Path, origins: list[str], processes: dict[str, int]) -> None:
    line = told(tmp_path, [member(rank, origin) for rank, origin in enumerate(origins)], DRIVER, RANK)
    assert line["processes"] == processes
