"""The whole command: what it writes, how it ends, and that it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import urllib.error
import urllib.request

import psutil
import pytest
from sandbox import DEMO, Sandbox, records
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ENDLESS = (*DEMO, "--train-iters", "100000", "--log-interval", "1", "--eval-interval", "0", "--save-interval", "0")


def test_train_save_resume_and_nothing_left_to_do(sandbox: Sandbox) -> None:
    flags = (*DEMO, "--log-interval", "5", "--eval-interval", "5")
    first = sandbox.run(*flags, "--train-iters", "10")
    assert first.process.returncode == 0, first.output
    assert sandbox.leftovers() == []
    checkpoints, tensorboard = sandbox.work / "checkpoints" / "demo", sandbox.work / "tensorboard_logs" / "demo"
    assert (checkpoints / "iter_0000010" / "COMMITTED").is_file()
    assert [r["step"] for r in records(tensorboard, "evaluation")] == [5, 10]
    for text in ("step  5/10", "validation loss", "exit code    0", str(checkpoints), str(tensorboard)):
        assert text in first.output
    assert len(list((sandbox.work / "logs" / "demo").glob("attempt_0/rank_[01].log"))) == 2

    second = sandbox.run(*flags, "--train-iters", "20")
    assert second.process.returncode == 0, second.output
    steps = records(tensorboard, "step")
    assert [s["step"] for s in steps] == list(range(1, 21))
    assert [s["samples"] for s in steps] == list(range(16, 321, 16))
    assert steps[19]["loss"] < steps[0]["loss"]
    board = EventAccumulator(str(tensorboard)).Reload()
    assert [event.step for event in board.Scalars("lm loss")] == [5, 10, 15, 20]

    third = sandbox.run(*flags, "--train-iters", "20")
    assert third.process.returncode == 0, third.output
    assert len(records(tensorboard, "step")) == 20
    assert sandbox.leftovers() == []


def test_the_dashboard_serves_while_it_trains(sandbox: Sandbox) -> None:
    command = sandbox.start(*ENDLESS, "--ray-dashboard", "1")
    url = command.wait_for(r"Ray dashboard: (http://\S+)").group(1)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        # It serves, and only to those who have the run's token.
        urllib.request.urlopen(f"{url}/api/version", timeout=10)
    command.signal(signal.SIGTERM)
    assert command.wait() == 143, command.output
    assert sandbox.leftovers() == []


def test_wrecks_alone_are_not_started_over(sandbox: Sandbox) -> None:
    (sandbox.work / "checkpoints" / "demo" / "iter_0000010").mkdir(parents=True)
    command = sandbox.run(*DEMO, "--train-iters", "10")
    assert command.process.returncode == 3
    assert "iter_0000010" in command.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_saves_and_ends_with_143(sandbox: Sandbox, number: signal.Signals) -> None:
    command = sandbox.start(*ENDLESS)
    command.wait_for(r"step +3/")
    # To the whole process group, as a terminal's Ctrl-C and `timeout` do.
    os.killpg(command.process.pid, number)
    assert command.wait() == 143, command.output
    assert number.name in command.output
    saved = command.wait_for(r"saved at step (\d+)").group(1)
    assert (sandbox.work / "checkpoints" / "demo" / f"iter_{int(saved):07d}" / "COMMITTED").is_file()
    assert sandbox.leftovers() == []


def test_a_second_signal_ends_at_once(sandbox: Sandbox) -> None:
    command = sandbox.start(*ENDLESS)
    command.wait_for(r"step +1/")
    for rank in _ranks(sandbox):
        # A stopped rank ends no step: only the second signal can end this run before grace_s.
        rank.suspend()
    command.signal(signal.SIGINT)
    command.wait_for("a second signal ends at once")
    command.signal(signal.SIGINT)
    assert command.wait() == 143, command.output
    assert sandbox.leftovers() == []


def test_a_signal_during_start_up_leaves_nothing(sandbox: Sandbox) -> None:
    command = sandbox.start(*ENDLESS)
    command.wait_for("starting 2 ranks")
    command.signal(signal.SIGTERM)
    assert command.wait() == 143, command.output
    assert sandbox.leftovers() == []


def test_time_is_up(sandbox: Sandbox) -> None:
    command = sandbox.run(*ENDLESS, "--exit-duration-in-mins", "0.05")
    assert command.process.returncode == 0, command.output
    assert "exit_duration_in_mins" in command.output
    assert "the target was step 100000" in command.output


def test_a_killed_rank_is_restarted_from_the_checkpoint(sandbox: Sandbox) -> None:
    command = sandbox.start(*DEMO, "--train-iters", "400", "--save-interval", "50", "--log-interval", "10")
    command.wait_for(r"saved in .* as iter_0000050")
    _ranks(sandbox)[1].kill()
    assert command.wait() == 0, command.output
    assert "process died" in command.output
    assert "restart 1 of 3" in command.output
    assert "attempts     2: 1 fault, 0 preemptions" in command.output
    steps = records(sandbox.work / "tensorboard_logs" / "demo", "step")
    attempts = {attempt: [s["step"] for s in steps if s["attempt"] == attempt] for attempt in (0, 1)}
    assert attempts[1] == list(range(attempts[1][0], 401))
    assert attempts[1][0] in (51, 101, 151, 201, 251, 301, 351)
    again = {s["step"]: s["loss"] for s in steps if s["attempt"] == 1}
    for step in (s for s in steps if s["attempt"] == 0 and s["step"] in again):
        assert step["loss"] == again[step["step"]], "a step trained again must see the same samples"
    assert sandbox.leftovers() == []


def test_a_first_save_that_is_cut_off_does_not_end_the_run(sandbox: Sandbox) -> None:
    command = sandbox.start(*DEMO, "--train-iters", "60", "--save-interval", "0", "--log-interval", "1")
    command.wait_for(r"step +5/")
    wreck = sandbox.work / "checkpoints" / "demo" / "iter_0000005"
    wreck.mkdir()
    (wreck / "__0_0.distcp").write_bytes(b"half")
    _ranks(sandbox)[0].kill()
    assert command.wait() == 0, command.output
    steps = records(sandbox.work / "tensorboard_logs" / "demo", "step")
    assert [s["step"] for s in steps if s["attempt"] == 1] == list(range(1, 61))
    assert not wreck.exists()


def _ranks(sandbox: Sandbox) -> list[psutil.Process]:
    return [p for p in sandbox._processes() if "TrainWorker" in " ".join(p.cmdline())]
