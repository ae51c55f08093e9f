"""Saves beside training: what is written, what is lost with a writer, and what a disk may refuse."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import assert_same_numbers, await_partial, writer_of
from curves import assert_alike, curve
from sandbox import DEMO, Sandbox

from raytrain_llama3.checkpoint.folder import damaged_files
from raytrain_llama3.checkpoint.store import CheckpointStore

TWO = (*DEMO, "--micro-batch-size", "4", "--hidden-size", "64", "--ffn-hidden-size", "128", "--kv-channels", "16")
TWO += ("--log-interval", "1", "--eval-interval", "0", "--max-checkpoints", "0")
ENDLESS = (*TWO, "--train-iters", "100000")


def reached(output: str) -> int:
    return max(int(line.split("/")[0].split()[1]) for line in output.splitlines() if line.startswith("step "))


def test_a_slow_write_holds_what_was_there_and_a_lost_writer_only_its_own_save(sandbox: Sandbox) -> None:
    whole = sandbox.run(*TWO, "--train-iters", "200", "--save-interval", "20", "--exp-name", "whole")
    assert whole.process.returncode == 0, whole.output
    command = sandbox.start(*ENDLESS, "--save-interval", "20", "--async-save", "1")
    folder = sandbox.work / "checkpoints" / "demo"

    # A slow write: the writer stands still while the weights change.
    command.wait_for(r"step +20/.*saved in .* \(training waited ")
    rank = sandbox.rank_process(0, 1)
    writer = writer_of(rank)
    writer.suspend()
    slow = int(await_partial(folder).name.removeprefix("iter_"))
    command.wait_for(rf"step +{slow + 10}/\d+ \| loss")
    assert not (folder / f"iter_{slow:07d}" / "COMMITTED").exists()
    writer.resume()
    command.wait_for(rf"step +{slow}/.*saved in")
    for step in range(20, slow + 1, 20):
        assert_same_numbers(folder / f"iter_{step:07d}", sandbox.work / "checkpoints" / "whole" / f"iter_{step:07d}")

    # A writer that dies in the middle.
    writer.suspend()
    lost = int(await_partial(folder).name.removeprefix("iter_"))
    writer.kill()
    said = command.wait_for(rf"step {lost} was not saved \(1 in a row, max_failed_saves 3\): .*")
    assert f"rank 1: the writer process {writer.pid} was killed by signal 9" in said[0]
    assert f"the newest checkpoint is still that of step {lost - 20}, and training goes on" in said[0]
    command.wait_for(rf"step +{lost + 20}/.*saved in")
    assert not (folder / f"iter_{lost:07d}").exists()
    again = writer_of(rank, but=writer.pid)

    # A stop waits for the save that is under way, and saves once more.
    again.suspend()
    under_way = int(await_partial(folder).name.removeprefix("iter_"))
    command.signal(signal.SIGTERM)
    command.wait_for("the ranks finish their step, save and stop")
    again.resume()
    assert command.wait() == 143, command.output
    stopped = command.wait_for(r"stopped after step (\d+), saved at step (\d+)")
    assert stopped[1] == stopped[2]
    store = CheckpointStore(folder, None)
    assert store.wrecks() == []
    assert {under_way, int(stopped[2])} <= set(store.complete())
    assert lost not in store.complete()
    assert all(damaged_files(folder / f"iter_{step:07d}") == [] for step in store.complete())
    assert_alike(curve(sandbox.work / "tensorboard_logs" / "demo"), curve(sandbox.work / "tensorboard_logs" / "whole"))
    assert sandbox.leftovers() == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 24 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], check=False)
    if mounted.returncode:
        pytest.skip("mounting a small filesystem needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=False)


@pytest.mark.parametrize("is_async", ["0", "1"])
def test_a_full_disk_keeps_what_is_there_and_is_borne_for_a_while(
    sandbox: Sandbox, small_disk: Path, is_async: str
) -> None:
    folder = small_disk / "c"
    flags = (*ENDLESS, "--save-interval", "10", "--async-save", is_async, "--max-failed-saves", "2")
    flags += ("--checkpoint-path", str(folder))
    command = sandbox.start(*flags)
    command.wait_for(r"step +10/.*saved")
    filler = small_disk / "filler"
    _fill(filler)
    said = command.wait_for(r"step (\d+) was not saved \(1 in a row, max_failed_saves 2\): .*")
    assert "No space left on device" in said[0] or "GiB are to be written" in said[0]
    assert "GiB are free there" in said[0]
    assert command.wait() == 3, command.output
    assert "3 saves in a row failed, more than max_failed_saves 2" in command.output
    store = CheckpointStore(folder, None)
    assert store.wrecks() == []
    kept = store.complete()
    assert kept[-1] < int(said[1])
    assert all(damaged_files(folder / f"iter_{step:07d}") == [] for step in kept)
    filler.unlink()
    target = str(kept[-1] + 10)
    resumed = sandbox.run(*TWO, "--save-interval", "10", "--checkpoint-path", str(folder), "--train-iters", target)
    assert resumed.process.returncode == 0, resumed.output
    assert f"resuming from {folder}/iter_{kept[-1]:07d}" in resumed.output
    assert sandbox.leftovers() == []


@pytest.mark.parametrize("is_async", ["0", "1"])
def test_ranks_that_go_on_saving_are_ended_before_their_parts_are_cleared(sandbox: Sandbox, is_async: str) -> None:
    folder = sandbox.work / "checkpoints" / "demo"
    is_over = threading.Event()

    def stand_in_the_way() -> None:
        """Have publishing refused, and only that: a folder lies where the sidecar is to be written."""
        seen = set[Path]()
        while not is_over.wait(0.001):
            for path in set(folder.glob("iter_*")) - seen:
                seen.add(path)
                with contextlib.suppress(OSError):
                    (path / ".sidecar.json.tmp").mkdir()

    # Always in the middle of a save, also when the driver has had enough of it.
    command = sandbox.start(*ENDLESS, "--save-interval", "1", "--async-save", is_async, "--max-failed-saves", "2")
    thread = threading.Thread(target=stand_in_the_way)
    thread.start()
    try:
        assert command.wait() == 3, command.output
    finally:
        is_over.set()
        thread.join()
    assert "cannot be published: [Errno 21] Is a directory" in command.output
    assert "3 saves in a row failed, more than max_failed_saves 2" in command.output
    assert list(folder.glob("iter_*")) == []
    assert sandbox.leftovers() == []


def _fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


def test_a_folder_that_cannot_be_written_is_named_before_ray_starts(sandbox: Sandbox, small_disk: Path) -> None:
    (small_disk / "c").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    command = sandbox.run(*ENDLESS, "--checkpoint-path", str(small_disk / "c"))
    assert command.process.returncode == 3, command.output
    assert f"{small_disk / 'c'}: cannot be used as the checkpoint folder" in command.output
    assert "Read-only file system" in command.output
