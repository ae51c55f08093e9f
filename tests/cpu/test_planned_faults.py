"""Faults that were planned, in real training with four ranks: what is lost, told and kept."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from curves import assert_alike, assert_trained_again_alike, curve
from sandbox import FOUR, Command, Sandbox, events

STEPS = 40
ENDLESS = (*FOUR, "--train-iters", "100000")
EVERY_5 = ("--save-interval", "5", "--max-checkpoints", "0")

FAULTS = {
    "kill": (2, "process died"),
    "exception": (0, "exception"),
    "exit": (1, "process died"),
    "stop": (3, "hang"),
    "segfault": (1, "process crashed"),
    "kill_saving": (2, "process died"),
    "bit_flip": (3, "weights differ between replicas"),
}
"""In the order in which they strike: the rank, and as what it is told. Fault i strikes attempt i at step 5 i + 3."""
PLAN = ",".join(f"{i}:{rank}:{5 * i + 3}:{kind}" for i, (kind, (rank, _)) in enumerate(FAULTS.items()))
TOLD = {
    "kill": "ended without a word",
    "exception": "RuntimeError: rehearsed: an exception in rank 0 at step 8",
    "exit": "ended without a word",
    "stop": "rank 3 stood still for",
    "segfault": "crashed: Segmentation fault",
    "kill_saving": "ended without a word",
    "bit_flip": "rank 3 holds other weights at step",
}
HANG_TIMEOUT_S = 6


@dataclass(frozen=True)
class Run:
    """A run that is over, what it wrote, and what it left."""

    command: Command
    work: Path
    leftovers: list[str]

    @property
    def board(self) -> Path:
        return board(self.work)

    def fault(self, kind: str) -> dict[str, Any]:
        return events(self.board, "fault")[list(FAULTS).index(kind)]


def board(work: Path) -> Path:
    return work / "tensorboard_logs" / "demo"


def complete(work: Path) -> list[int]:
    """Steps of the checkpoints that are complete; a folder that is not is an error."""
    folders = sorted((work / "checkpoints" / "demo").glob("iter_*"))
    assert all((folder / "COMMITTED").is_file() for folder in folders)
    return [int(folder.name.removeprefix("iter_")) for folder in folders]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run that nothing befell."""
    work = tmp_path_factory.mktemp("reference")
    sandbox = Sandbox(work)
    try:
        command = sandbox.run(*FOUR, "--train-iters", str(STEPS), "--save-interval", "0", "--save-at-end", "0")
        assert command.process.returncode == 0, command.output
    finally:
        sandbox.close()
    return curve(board(work))


@pytest.fixture(scope="module")
def survivor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run that suffers one fault of each kind, and goes on from a checkpoint every five steps."""
    work = tmp_path_factory.mktemp("survivor")
    sandbox = Sandbox(work)
    flags = ("--train-iters", str(STEPS), *EVERY_5, "--standby-processes", "1", "--replica-check-interval", "1")
    flags += ("--hang-timeout-s", str(HANG_TIMEOUT_S))
    try:
        command = sandbox.run(*FOUR, *flags, "--rehearse-faults", PLAN)
        yield Run(command, work, sandbox.leftovers())
    finally:
        sandbox.close()


# Each kind of fault, survived


def test_the_run_reaches_its_target_and_leaves_nothing(survivor: Run) -> None:
    assert survivor.command.process.returncode == 0, survivor.command.output
    assert f"target reached: step {STEPS}, {16 * STEPS} samples" in survivor.command.output
    assert f"attempts     {len(FAULTS) + 1}: {len(FAULTS)} faults, 0 preemptions" in survivor.command.output
    assert survivor.leftovers == []
    assert complete(survivor.work) == list(range(5, STEPS + 1, 5))


def test_losses_are_those_of_an_undisturbed_run_bit_for_bit(survivor: Run, reference: list[float]) -> None:
    losses = curve(survivor.board)
    assert len(losses) == STEPS
    assert_alike(losses, reference)
    assert_trained_again_alike(survivor.board)


@pytest.mark.parametrize("kind", FAULTS)
def test_the_rank_that_failed_is_named_with_node_cause_and_log(survivor: Run, kind: str) -> None:
    fault, (rank, told) = survivor.fault(kind), FAULTS[kind]
    failure = fault["failure"]
    assert (failure["rank"], failure["kind"]) == (rank, told)
    assert TOLD[kind] in failure["error"]
    assert failure["node_id"]
    assert fault["attempt"] == list(FAULTS).index(kind)
    assert fault["decision"].startswith("restart ")
    line = f"rank {rank} on {failure['node_ip']} failed at step {failure['step']} ({told}): {failure['error']}"
    assert line in survivor.command.lines
    others = failure["others"]
    # On a busy machine one may not have fallen yet when the fault is told.
    assert others
    assert set(others) <= set(range(4)) - {rank}
    after = survivor.command.lines[survivor.command.lines.index(line) + 1 :]
    assert after[0] == f"ranks {', '.join(map(str, others))} fell with it"
    assert after[1] == f"the last lines of {failure['log_path']}:"
    assert failure["log_tail"]
    assert after[2 : 2 + len(failure["log_tail"])] == [f"  | {text}" for text in failure["log_tail"]]
    assert Path(failure["log_path"]).name == f"rank_{rank}.log"


def test_each_recovery_is_accounted_for_by_phase(survivor: Run) -> None:
    recoveries = events(survivor.board, "recovery")
    assert [recovery["attempt"] for recovery in recoveries] == list(range(1, len(FAULTS) + 1))
    for recovery, fault in zip(recoveries, events(survivor.board, "fault"), strict=True):
        assert list(recovery["phases"])[:5] == ["detect", "clear", "place", "start", "import"]
        if recovery["resume_step"]:
            assert {"load", "first_step"} <= recovery["phases"].keys()
        assert recovery["resume_step"] + recovery["lost_steps"] == fault["failure"]["step"]
        assert sum(recovery["processes"].values()) == 4
        # What the phases leave out would be a recovery that looks faster than it was.
        assert recovery["total_s"] > 0.8 * (recovery["time"] - fault["time"])
    (end,) = events(survivor.board, "end")
    assert (end["exit_code"], end["attempts"], end["faults"]) == (0, len(FAULTS) + 1, len(FAULTS))
    assert end["lost_steps"] == sum(recovery["lost_steps"] for recovery in recoveries) > 0
    assert 0 < end["goodput"] < 1


def test_a_hang_is_seen_in_time_and_leaves_the_stacks_of_all_ranks(survivor: Run) -> None:
    failure = survivor.fault("stop")["failure"]
    assert HANG_TIMEOUT_S <= failure["detect_s"] <= HANG_TIMEOUT_S + 2 + 3, "with 3 s for a busy machine"
    assert f"raise hang_timeout_s (now {HANG_TIMEOUT_S})" in failure["error"]
    found = re.search(r"the stacks of all ranks: (\S+)", failure["error"])
    assert found is not None
    stacks = Path(found[1]).read_text().split("===== rank ")[1:]
    assert [text[0] for text in stacks] == ["0", "1", "2", "3"]
    assert "does not answer" in stacks[3]
    assert all("train/loop.py" in text for text in stacks[:3])


def test_a_save_that_was_cut_off_is_never_resumed_from(survivor: Run) -> None:
    number = list(FAULTS).index("kill_saving")
    before = 5 * number
    # It waits for the first save after step `before` + 3, which is that of step `before` + 5.
    assert events(survivor.board, "recovery")[number]["resume_step"] == before
    saves = [(save["attempt"], save["step"]) for save in events(survivor.board, "checkpoint")]
    assert (number, before + 5) not in saves
    assert (number + 1, before + 5) in saves


def test_a_process_that_is_sure_to_be_clean_is_kept(survivor: Run) -> None:
    by_kind = dict(zip(FAULTS, events(survivor.board, "recovery"), strict=True))
    kept = [by_kind[kind]["processes"]["kept"] for kind in ("kill", "exit", "segfault", "exception", "stop")]
    # All three survivors of each, but for one that on a busy machine takes too long to let go.
    assert max(kept) == 3
    assert sum(kept) >= 10
    assert by_kind["kill_saving"]["processes"]["kept"] == 0, "threads of the save may be at work yet"


# Faults that end a run


def test_numbers_that_stay_nan_end_the_run_and_the_good_checkpoint_is_kept(
    sandbox: Sandbox, reference: list[float]
) -> None:
    flags = (*FOUR, *EVERY_5, "--train-iters", "15")
    command = sandbox.run(*flags, "--rehearse-faults", "0:1:9:nan")
    assert command.process.returncode == 4, command.output
    assert "not finite for 3 steps in a row" in command.output
    assert "restart" not in command.output
    assert complete(sandbox.work) == [5]
    # Started again, without what made it fail.
    command = sandbox.run(*flags)
    assert command.process.returncode == 0, command.output
    assert_alike(curve(board(sandbox.work)), reference)
    assert complete(sandbox.work) == [5, 10, 15]
    assert sandbox.leftovers() == []


@pytest.mark.parametrize(("save_interval", "code"), [(2, 4), (0, 3)])
def test_the_same_fault_at_the_same_step_twice_ends_the_run(sandbox: Sandbox, save_interval: int, code: int) -> None:
    plan = "0:1:4:exception,1:1:4:exception"
    command = sandbox.run(*ENDLESS, "--save-interval", str(save_interval), "--rehearse-faults", plan)
    assert command.process.returncode == code, command.output
    assert "error: the same fault came back at step 3 (exception): RuntimeError: rehearsed" in command.output
    first, second = events(board(sandbox.work), "fault")
    assert first["decision"] == "restart 1 of 3"
    assert second["decision"].startswith("stop: the same fault came back")
    assert complete(sandbox.work) == ([2] if save_interval else [])
    assert sandbox.leftovers() == []


def test_a_budget_that_is_spent_ends_the_run_so_that_a_platform_may_try_again(sandbox: Sandbox) -> None:
    flags = ("--max-restarts", "1", "--save-interval", "0", "--rehearse-faults", "0:1:3:exit,1:2:4:exit")
    command = sandbox.run(*ENDLESS, *flags)
    assert command.process.returncode == 138, command.output
    assert "error: max_restarts 1 used up" in command.output
    assert [fault["failure"]["rank"] for fault in events(board(sandbox.work), "fault")] == [1, 2]
    assert sandbox.leftovers() == []


# Processes that stand by, and ranks that fall behind


def test_a_standby_takes_a_lost_ranks_place_at_once(sandbox: Sandbox, reference: list[float]) -> None:
    flags = ("--save-interval", "20", "--max-checkpoints", "2", "--standby-processes", "1")
    command = sandbox.start(*ENDLESS, *flags, "--rehearse-faults", "0:1:2:slow")
    slow = command.wait_for(r"rank (\d) on (\S+) falls behind: its own work takes .* the median rank's")
    assert slow[1] == "1"
    command.wait_for("standby ready: 1 processes wait for a fault")
    command.wait_between_saves(20)
    victim = sandbox.rank_process(0, 2)
    victim.kill()
    command.wait_for("recovered in .* 3 processes kept, 1 from standby")
    (fault,), (recovery,) = events(board(sandbox.work), "fault"), events(board(sandbox.work), "recovery")
    assert fault["failure"]["rank"] == 2
    assert f"process {victim.pid} " in fault["failure"]["error"]
    assert recovery["processes"] == {"kept": 3, "standby": 1, "new": 0}
    assert recovery["phases"]["import"] == 0
    successor = sandbox.rank_process(1, 2)
    assert successor.pid != victim.pid
    assert successor.create_time() < fault["failure"]["at"]
    command.signal(signal.SIGTERM)
    assert command.wait() == 143, command.output
    saved = command.wait_for(r"stopped after step (\d+), saved at step (\d+)")
    assert saved[1] == saved[2]
    assert complete(sandbox.work)[-1] == int(saved[2])
    assert sandbox.leftovers() == []
    assert_alike(curve(board(sandbox.work)), reference)
    assert_trained_again_alike(board(sandbox.work))


# SIGTERM at every moment


def test_sigterm_before_there_are_ranks(sandbox: Sandbox) -> None:
    command = sandbox.start(*ENDLESS)
    command.wait_for("rank logs")
    command.signal(signal.SIGTERM)
    assert command.wait() == 143, command.output
    assert complete(sandbox.work) == []
    assert sandbox.leftovers() == []


@pytest.mark.parametrize("moment", ["first steps", "evaluation", "saving"])
def test_sigterm_while_ranks_train_evaluate_or_save(sandbox: Sandbox, moment: str) -> None:
    flags = {
        "first steps": ("--save-interval", "0"),
        "evaluation": ("--save-interval", "0", "--eval-interval", "3", "--eval-iters", "100000"),
        # Almost all of its time goes into saving.
        "saving": ("--save-interval", "1", "--max-checkpoints", "0"),
    }
    command = sandbox.start(*ENDLESS, *flags[moment])
    if moment == "saving":
        command.wait_for(r"step +4/.*saved")
        _wait_for_an_unpublished_save(sandbox.work)
    else:
        command.wait_for(r"step +1/" if moment == "first steps" else r"step +3/")
    command.signal(signal.SIGTERM)
    assert command.wait() == 143, command.output
    stopped = command.wait_for(r"stopped after step (\d+), saved at step (\d+)")
    assert stopped[1] == stopped[2]
    saved = complete(sandbox.work)
    assert saved == (list(range(1, int(stopped[2]) + 1)) if moment == "saving" else [int(stopped[2])])
    if moment == "evaluation":
        assert saved == [3]
        assert "validation loss" not in command.output, "it was cut short"
    assert sandbox.leftovers() == []


def _wait_for_an_unpublished_save(work: Path) -> None:
    deadline = time.monotonic() + 60
    while all((folder / "COMMITTED").is_file() for folder in (work / "checkpoints" / "demo").glob("iter_*")):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_save_that_would_not_fit_into_the_grace_time_is_not_begun(sandbox: Sandbox) -> None:
    command = sandbox.start(*ENDLESS, "--save-interval", "20", "--grace-s", "5")
    command.wait_for(r"step +21/")
    command.signal(signal.SIGTERM)
    assert command.wait() == 143, command.output
    assert "do not save and stop, in 5 s at most" in command.output
    assert "raise grace_s to save when stopped" in command.output
    stopped = command.wait_for(r"stopped after step (\d+), saved at step (\d+)")
    assert int(stopped[1]) > int(stopped[2]) == 20
    assert complete(sandbox.work) == [20]
    assert sandbox.leftovers() == []


# Two drivers


def test_of_two_drivers_on_one_folder_never_both_publish(sandbox: Sandbox) -> None:
    first = sandbox.start(*ENDLESS, "--save-interval", "10", "--max-checkpoints", "0")
    first.wait_for(r"step +10/.*saved")
    second = sandbox.run(*ENDLESS)
    assert second.process.returncode == 3, second.output
    assert f"another run holds this checkpoint folder: process {first.process.pid} on " in second.output
    reached = max(int(step) for step in re.findall(r"step +(\d+)/", first.output))
    first.wait_for(rf"step +{reached + 20}/")

    # As a driver on another host would, on a filesystem whose locks do not reach that far.
    lock = sandbox.work / "checkpoints" / "demo" / ".lock"
    holder = json.loads(lock.read_text())
    lock.write_text(json.dumps(holder | {"token": holder["token"] + 1, "host": "elsewhere", "pid": 77}))
    before = complete_now(sandbox.work)
    assert first.wait() == 3, first.output
    assert "another run took over (process 77 on elsewhere" in first.output
    assert len(complete_now(sandbox.work)) <= len(before) + 1, "one may have been on its way"
    assert json.loads(lock.read_text())["pid"] == 77
    assert sandbox.leftovers() == []


def complete_now(work: Path) -> list[Path]:
    return list((work / "checkpoints" / "demo").glob("iter_*/COMMITTED"))
