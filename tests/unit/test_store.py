from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pickle
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from raytrain_llama3.checkpoint.folder import clear_partial, damaged_files, digest, iteration_path
from raytrain_llama3.checkpoint.lock import read_holder
from raytrain_llama3.checkpoint.store import CheckpointStore
from raytrain_llama3.errors import CheckpointError, NoSafeStateError
from raytrain_llama3.messages import FileFacts, ResumePoint, SaveRecord

DATA_NAMES = ("__0_0.distcp", "__0_1.distcp", "__1_0.distcp")


def save(root: Path, step: int) -> SaveRecord:
    """Write what a torch_dist save of two ranks leaves in a folder."""
    path = iteration_path(root, step)
    path.mkdir(parents=True)
    for name in DATA_NAMES:
        (path / name).write_bytes(name.encode() * 100)
    (path / ".metadata").write_bytes(pickle.dumps({f"weight{i}": name for i, name in enumerate(DATA_NAMES)}))
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    files = {file.name: FileFacts(file.stat().st_size, digest(file)) for file in path.iterdir()}
    sidecar = {"dtype": "bf16", "layout": {"tp": 2}, "step": "overwritten"}
    return SaveRecord(step, step * 8, str(path), 0.5, sidecar, files)


def publish(root: Path, *steps: int, keep: int | None = None, keep_every: int = 0) -> CheckpointStore:
    store = CheckpointStore(root, keep, keep_every)
    with store.lock():
        for step in steps:
            store.publish(save(root, step))
    return store


def refused(words: str) -> AbstractContextManager[object]:
    return pytest.raises(CheckpointError, match=words)


def test_the_folder_name_has_seven_digits_and_grows_beyond() -> None:
    assert iteration_path(Path("/c"), 100) == Path("/c/iter_0000100")
    assert iteration_path(Path("/c"), 12_345_678) == Path("/c/iter_12345678")


def test_a_published_checkpoint_is_the_resume_point(tmp_path: Path) -> None:
    store = publish(tmp_path, 10, 20)
    assert store.complete() == [10, 20]
    assert store.resume_point() == ResumePoint(str(tmp_path / "iter_0000020"), 20, 160)
    sidecar = store.sidecar(20)
    assert {k: sidecar[k] for k in ("format", "step", "samples", "dtype", "layout")} == {
        "format": 2,
        "step": 20,
        "samples": 160,
        "dtype": "bf16",
        "layout": {"tp": 2},
    }
    assert str(sidecar["created"]).endswith("+00:00")
    assert set(sidecar["files"]) == {*DATA_NAMES, ".metadata", "metadata.json"}
    assert json.loads((tmp_path / "latest.json").read_text()) == {"step": 20, "path": "iter_0000020"}


@pytest.mark.parametrize("made", [False, True])
def test_nothing_saved_means_no_resume_point(tmp_path: Path, made: bool) -> None:
    root = tmp_path / "checkpoints"
    if made:
        root.mkdir()
        (root / "notes.txt").write_text("x")
        (root / "iter_best").mkdir()
    assert CheckpointStore(root, None).resume_point() is None


@pytest.mark.parametrize(
    "harm",
    ["COMMITTED", "sidecar.json", "metadata.json", ".metadata", "__1_0.distcp"],
)
def test_a_newest_folder_that_lacks_a_file_is_passed_over(tmp_path: Path, harm: str) -> None:
    store = publish(tmp_path, 10, 20)
    (tmp_path / "iter_0000020" / harm).unlink()
    resume = store.resume_point()
    assert resume is not None
    assert resume.step == 10
    assert (store.complete(), store.wrecks()) == ([10], [20])


@pytest.mark.parametrize("content", ["", '{"step": 2', "[]", '{"step": 10, "samples": 80}', '{"step": 20}'])
def test_a_damaged_sidecar_makes_a_wreck(tmp_path: Path, content: str) -> None:
    store = publish(tmp_path, 10, 20)
    (tmp_path / "iter_0000020" / "sidecar.json").write_text(content)
    assert store.complete() == [10]


@pytest.mark.parametrize(
    "hint", ["", '{"step": 30, "path": "iter_0000030"}', '{"step": 10, "path": "iter_0000010"}', "{"]
)
def test_the_hint_is_never_trusted(tmp_path: Path, hint: str) -> None:
    store = publish(tmp_path, 10, 20)
    (tmp_path / "latest.json").write_text(hint)
    resume = store.resume_point()
    assert resume is not None
    assert resume.step == 20


def test_only_wrecks_stop_the_run_and_are_named(tmp_path: Path) -> None:
    for step in range(10, 80, 10):
        save(tmp_path, step)
    with pytest.raises(NoSafeStateError) as caught:
        CheckpointStore(tmp_path, None).resume_point()
    text = str(caught.value)
    assert "none of the 7 checkpoints" in text
    assert "iter_0000070: no COMMITTED" in text
    assert "and 2 older ones" in text
    assert "checkpoint_path" in text
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("keep", "left"), [(None, [10, 20, 30, 40]), (0, [10, 20, 30, 40]), (1, [40]), (3, [20, 30, 40])]
)
def test_retention(tmp_path: Path, keep: int | None, left: list[int]) -> None:
    store = publish(tmp_path, 10, 20, 30, 40, keep=keep)
    assert store.complete() == left
    folders = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert folders == [iteration_path(tmp_path, step).name for step in left]


def test_every_so_many_steps_one_is_kept_for_ever(tmp_path: Path) -> None:
    assert publish(tmp_path, *range(10, 80, 10), keep=2, keep_every=30).complete() == [30, 60, 70]


def test_pruning_spares_what_it_did_not_write(tmp_path: Path) -> None:
    publish(tmp_path / "other", 10)
    publish(tmp_path / "ours", 20, 30)
    (tmp_path / "other" / "iter_0000010").rename(tmp_path / "ours" / "iter_0000010")
    (tmp_path / "ours" / "iter_0000030" / "notes.txt").write_text("the good one")
    assert publish(tmp_path / "ours", 40, 50, keep=1).complete() == [10, 30, 50]


# Wrecks and damage


def test_an_empty_shard_makes_a_wreck_and_a_flipped_byte_is_found_by_its_digest(tmp_path: Path) -> None:
    store = publish(tmp_path, 10, 20, 30)
    (tmp_path / "iter_0000030" / DATA_NAMES[1]).write_bytes(b"")
    flip_a_byte(tmp_path / "iter_0000020" / DATA_NAMES[2])
    assert store.states() == {10: None, 20: None, 30: f"{DATA_NAMES[1]} has 0 of 1200 bytes"}
    assert damaged_files(tmp_path / "iter_0000010") == []
    (line,) = damaged_files(tmp_path / "iter_0000020")
    assert line.startswith(f"{DATA_NAMES[2]} is not as it was written (SHA-256 ")
    unverified, verified = store.resume_point(), store.resume_point(verify=True)
    assert unverified is not None
    assert verified is not None
    assert (unverified.step, verified.step) == (20, 10)
    with store.lock():
        moved = store.set_aside_damaged(10)
    assert sorted(path.name for path in moved) == ["damaged_iter_0000020", "damaged_iter_0000030"]
    assert store.complete() == [10]


def test_only_damaged_ones_stop_a_run_that_verifies(tmp_path: Path) -> None:
    store = publish(tmp_path, 10)
    flip_a_byte(tmp_path / "iter_0000010" / ".metadata")
    assert store.resume_point() is not None
    with pytest.raises(NoSafeStateError, match=r"iter_0000010: \.metadata is not as it was written"):
        store.resume_point(verify=True)
    with pytest.raises(NoSafeStateError, match=r"\.metadata is not as it was written"):
        store.at(10, verify=True)
    with pytest.raises(NoSafeStateError, match="iter_0000020: no COMMITTED"):
        store.at(20)


@pytest.mark.parametrize("files", ["{}", '{"a": 1}', '{"a": {"bytes": 1}}', "null"])
def test_a_sidecar_that_lists_no_files_makes_a_wreck(tmp_path: Path, files: str) -> None:
    store = publish(tmp_path, 10)
    path = tmp_path / "iter_0000010" / "sidecar.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"files": json.loads(files)}))
    assert store.states() == {10: "sidecar.json is missing or damaged"}
    assert damaged_files(path.parent) == ["sidecar.json is missing or damaged, or has no digests"]


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_wreck_takes_no_place_of_those_that_are_kept(tmp_path: Path) -> None:
    publish(tmp_path, 10, 20)
    save(tmp_path, 30)
    assert publish(tmp_path, 40, keep=2).complete() == [20, 40]
    assert (tmp_path / "iter_0000030").is_dir()


def test_the_one_just_published_is_never_pruned(tmp_path: Path) -> None:
    publish(tmp_path, 50, 60)
    assert publish(tmp_path, 40, keep=1).complete() == [40, 60]


def test_a_removal_that_was_interrupted_is_finished_and_never_a_wreck(tmp_path: Path) -> None:
    store = publish(tmp_path, 10, 20)
    (tmp_path / "iter_0000010").rename(tmp_path / ".pruned_iter_0000010")
    assert (store.complete(), store.wrecks()) == ([20], [])
    publish(tmp_path, 30, keep=2)
    assert not (tmp_path / ".pruned_iter_0000010").exists()


@pytest.mark.parametrize("harm", ["metadata.json", ".metadata", "__1_0.distcp"])
def test_files_that_are_missing_forbid_publishing(tmp_path: Path, harm: str) -> None:
    store = CheckpointStore(tmp_path, None)
    record = save(tmp_path, 10)
    (tmp_path / "iter_0000010" / harm).unlink()
    with store.lock(), pytest.raises(CheckpointError, match=rf"{harm}.*every node"):
        store.publish(record)
    assert (store.complete(), store.wrecks()) == ([], [10])


def test_a_crash_before_the_marker_leaves_a_wreck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = publish(tmp_path, 10, keep=1)
    replace = Path.replace

    def full_at_the_marker(path: Path, target: Path) -> Path:
        if target.name == "COMMITTED":
            # By now the sidecar stands, nothing was pruned and the hint still names the former checkpoint.
            assert (target.parent / "sidecar.json").is_file()
            assert (tmp_path / "iter_0000010" / "COMMITTED").is_file()
            assert json.loads((tmp_path / "latest.json").read_text())["step"] == 10
            raise OSError(errno.ENOSPC, "No space left on device")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", full_at_the_marker)
    with store.lock(), pytest.raises(CheckpointError, match=r"iter_0000020.*No space left.*GiB are free"):
        store.publish(save(tmp_path, 20))
    assert (store.complete(), store.wrecks()) == ([10], [20])
    with store.lock():
        store.discard(20)
    assert store.wrecks() == []


def test_every_file_is_flushed_before_the_marker_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[tuple[int, bool]] = []
    fsync = os.fsync
    marker = tmp_path / "iter_0000010" / "COMMITTED"

    def watch(descriptor: int) -> None:
        flushed.append((os.fstat(descriptor).st_ino, marker.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watch)
    publish(tmp_path, 10)
    folder = tmp_path / "iter_0000010"
    before = {inode for inode, committed in flushed if not committed}
    for path in (tmp_path, folder, *folder.iterdir()):
        assert path.stat().st_ino in before, path
    assert (folder.stat().st_ino, True) in flushed


def test_publishing_needs_the_lock(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, None)
    record = save(tmp_path, 10)
    with pytest.raises(CheckpointError, match="lock"):
        store.publish(record)
    with pytest.raises(CheckpointError, match="lock"):
        store.discard(10)
    assert store.complete() == []


def test_a_second_store_in_the_same_process_is_refused(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, None).lock():
        with refused(f"process {os.getpid()} on {socket.gethostname()}, since 20"), CheckpointStore(tmp_path, 1).lock():
            pass
        assert read_holder(tmp_path).token == 1
    with CheckpointStore(tmp_path, None).lock():
        assert read_holder(tmp_path).token == 2


HOLD = """
import sys, pathlib
from raytrain_llama3.checkpoint.store import CheckpointStore
with CheckpointStore(pathlib.Path(sys.argv[1]), None).lock():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_living_process_keeps_the_folder_and_a_killed_one_loses_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with refused(f"process {other.pid} on .*Stop that run"), CheckpointStore(tmp_path, None).lock():
            pass
        other.kill()
        other.wait()
        assert publish(tmp_path, 10).complete() == [10]


@pytest.mark.parametrize("theirs", ['{"token": 99, "host": "b", "pid": 7, "time": 0}', "{}", "", None])
def test_a_stale_token_cannot_publish(tmp_path: Path, theirs: str | None) -> None:
    store = publish(tmp_path, 10)
    with store.lock():
        record = save(tmp_path, 20)
        if theirs is None:
            (tmp_path / ".lock").unlink()
        else:
            (tmp_path / ".lock").write_text(theirs)
        with pytest.raises(CheckpointError, match="another run took over"):
            store.publish(record)
        with pytest.raises(CheckpointError, match="another run took over"):
            store.discard(20)
    assert store.complete() == [10]


def test_a_run_that_is_replaced_while_its_files_reach_the_disk_does_not_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, None)
    fsync = os.fsync

    def taken_over(descriptor: int) -> None:
        if os.path.sameopenfile(descriptor, data_file):
            (tmp_path / ".lock").write_text('{"token": 2, "host": "b", "pid": 7, "time": 0}')
        fsync(descriptor)

    record = save(tmp_path, 10)
    with (tmp_path / "iter_0000010" / "__1_0.distcp").open() as file, store.lock():
        data_file = file.fileno()
        monkeypatch.setattr(os, "fsync", taken_over)
        with pytest.raises(CheckpointError, match="process 7 on b, since 1970-01-01"):
            store.publish(record)
    assert store.complete() == []


def test_the_token_rises_past_a_lock_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text('{"token": 5, "ho')
    with CheckpointStore(tmp_path, None).lock():
        assert read_holder(tmp_path).token > 1_700_000_000


def test_a_mount_without_flock_is_guarded_by_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", absent)
    first, second = CheckpointStore(tmp_path, None), CheckpointStore(tmp_path, None)
    with first.lock(), second.lock():
        second.publish(save(tmp_path, 10))
        with pytest.raises(CheckpointError, match="another run took over"):
            first.publish(save(tmp_path, 20))
    assert second.complete() == [10]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused("file/checkpoints"), CheckpointStore(tmp_path / "file" / "checkpoints", None).lock():
        pass


def test_clearing_takes_wrecks_and_spares_the_committed(tmp_path: Path) -> None:
    publish(tmp_path, 10)
    save(tmp_path, 20)
    clear_partial(tmp_path / "iter_0000020")
    clear_partial(tmp_path / "iter_0000030")
    assert not (tmp_path / "iter_0000020").exists()
    with pytest.raises(CheckpointError, match="iter_0000010"):
        clear_partial(tmp_path / "iter_0000010")
    assert (tmp_path / "iter_0000010" / "COMMITTED").is_file()


def test_clearing_outlasts_a_writer_that_is_about_to_end(tmp_path: Path) -> None:
    save(tmp_path, 20)
    path, ends_at = tmp_path / "iter_0000020", time.monotonic() + 0.3

    def write_on() -> None:
        number = 0
        while time.monotonic() < ends_at:
            with contextlib.suppress(OSError):
                (path / f"__0_{(number := number + 1)}.distcp").write_bytes(b"")

    with ThreadPoolExecutor(1) as writer:
        writing = writer.submit(write_on)
        while time.monotonic() < ends_at:
            path.mkdir(exist_ok=True)
            clear_partial(path)
        writing.result()
    assert not path.exists()


def test_a_missing_sidecar_names_what_there_is_instead(tmp_path: Path) -> None:
    store = publish(tmp_path, 10)
    with pytest.raises(CheckpointError, match=r"iter_0000099/sidecar.json.*\[10\]"):
        store.sidecar(99)
