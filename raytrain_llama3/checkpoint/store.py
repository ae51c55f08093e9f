"""Which checkpoints are complete, which is the newest, and who may publish one.

A checkpoint is a folder `iter_0000100` with Megatron's files, a sidecar and a commit marker. The marker is written
last, after everything else is on the disk: a folder without it is the wreck of a save that did not finish.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from raytrain_llama3.checkpoint.durable import read_json, sync, sync_tree, write_json
from raytrain_llama3.checkpoint.lock import Holder, check_held, hold
from raytrain_llama3.errors import CheckpointError, NoSafeStateError
from raytrain_llama3.messages import ResumePoint, SaveRecord

MARKER_NAME = "COMMITTED"
SIDECAR_NAME = "sidecar.json"
LATEST_NAME = "latest.json"
SIDECAR_FORMAT = 1

_FOLDER = re.compile(r"iter_(\d{7}|[1-9]\d{7,})")
# Both are written last by a torch_dist save: torch's index of the data files, then Megatron's own.
_METADATA_NAMES = (".metadata", "metadata.json")
_DATA_FILE = re.compile(rb"__\d+_\d+\.distcp")
_LEAVING = ".pruned_"
_DAMAGED = "damaged_"
_WRECKS_SHOWN = 5


def iteration_path(root: Path, step: int) -> Path:
    """The folder of the checkpoint after `step` steps."""
    return root / f"iter_{step:07d}"


def clear_partial(path: Path) -> None:
    """Remove what an interrupted save left in `path`, if anything.

    Raises `CheckpointError` when `path` carries a commit marker, or cannot be removed.
    """
    if (path / MARKER_NAME).exists():
        raise CheckpointError(
            f"{path}: holds a committed checkpoint, which a save would overwrite. Move it away, or give this run "
            f"another folder (checkpoint_path)"
        )
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be cleared of an interrupted save: {error}") from error


_CONTINUITY = {
    "seed": "samples come in another order: some twice, some never",
    "seq_length": "samples are cut anew: some tokens come twice, some never",
    "tokenizer": "token ids may mean something else",
    "learning_rate": "the learning rate jumps: lr_decay_samples, lr_warmup_samples or a rate was changed",
}
"""What must be equal for a resumed run to be the same run, and what it means if not."""


def read_sidecar(path: Path) -> dict[str, object]:
    """What was written beside the weights in `path`; empty where it cannot be read."""
    return read_json(path / SIDECAR_NAME) or {}


def differences(saved: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """A line for each thing that was one way when `saved` was written and is another `now`."""
    return [
        f"{name} was {saved[name]}, is {now[name]}: {meaning}"
        for name, meaning in _CONTINUITY.items()
        if name in saved and name in now and not _equal(saved[name], now[name])
    ]


def _equal(a: object, b: object) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-6)
    return a == b


class CheckpointStore:
    """The checkpoints of one run below `root`. `keep` is how many stay (None or 0: all of them).

    Reading needs no lock; publishing and removing do.
    """

    def __init__(self, root: Path, keep: int | None) -> None:
        self._root = root
        self._keep = keep or 0
        self._holder: Holder | None = None

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder for this run, making it if it is missing.

        Raises `CheckpointError` naming host, process and time of the holder when another run has it.
        """
        with hold(self._root) as holder:
            self._holder = holder
            try:
                yield
            finally:
                self._holder = None

    def publish(self, record: SaveRecord) -> None:
        """Make the files of `record` a checkpoint: durable, then committed, then the older ones pruned.

        Raises `CheckpointError` when the folder is not ours, a file is missing, or the disk refuses; the folder
        then stays without a marker and is no checkpoint.
        """
        self._check_held()
        path = iteration_path(self._root, record.step)
        try:
            fault = _missing_files(path)
            if fault is not None:
                raise CheckpointError(
                    f"{path}: not a checkpoint that can be published: {fault} (saved as {record.path}). The checkpoint "
                    f"folder must be one that every node and the driver share"
                )
            self._commit(path, record)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be published: {error}; {self._free_space()}") from error
        self._prune(record.step)

    def resume_point(self) -> ResumePoint | None:
        """The newest complete checkpoint; None when nothing was ever saved here.

        Raises `NoSafeStateError` when there are folders, but none is complete.
        """
        steps = self._steps()
        for step in reversed(steps):
            found = self._inspect(step)
            if isinstance(found, ResumePoint):
                return found
        if steps:
            raise NoSafeStateError(self._wreck_report(steps))
        return None

    def complete(self) -> list[int]:
        """Steps of all complete checkpoints, oldest first."""
        return [step for step in self._steps() if isinstance(self._inspect(step), ResumePoint)]

    def wrecks(self) -> list[int]:
        """Steps of the folders that are not complete, oldest first."""
        return [step for step in self._steps() if isinstance(self._inspect(step), str)]

    def sidecar(self, step: int) -> dict[str, object]:
        """What was written beside the weights of `step`. Raises `CheckpointError` when it cannot be read."""
        path = iteration_path(self._root, step) / SIDECAR_NAME
        value = read_json(path)
        if value is None:
            raise CheckpointError(f"{path}: missing, or not JSON; take another of {self._root}: {self.complete()}")
        return value

    def discard(self, step: int) -> None:
        """Remove the wreck of a failed save. Raises `CheckpointError` when it is committed or the folder not ours."""
        self._check_held()
        clear_partial(iteration_path(self._root, step))

    def set_aside_damaged(self, newer_than: int) -> list[Path]:
        """Rename folders that were committed and have lost files since, so that training past them can save again."""
        self._check_held()
        moved = []
        for step in self.wrecks():
            path = iteration_path(self._root, step)
            if step > newer_than and (path / MARKER_NAME).exists():
                moved.append(path.rename(self._root / f"{_DAMAGED}{path.name}"))
        return moved

    def _commit(self, path: Path, record: SaveRecord) -> None:
        created = datetime.now(UTC).isoformat(timespec="seconds")
        own = {"format": SIDECAR_FORMAT, "step": record.step, "samples": record.samples, "created": created}
        write_json(path / SIDECAR_NAME, {**record.sidecar, **own})
        sync_tree(path)
        sync(self._root)
        # Again: reaching the disk may have taken minutes, in which another run can have taken over.
        holder = self._check_held()
        write_json(path / MARKER_NAME, {"step": record.step, "token": holder.token})
        # For people and other programs; nothing here reads it, and the checkpoint is published without it.
        with suppress(OSError):
            write_json(self._root / LATEST_NAME, {"step": record.step, "path": path.name})

    def _check_held(self) -> Holder:
        if self._holder is None:
            raise CheckpointError(f"{self._root}: publish and discard only inside `with store.lock():`")
        check_held(self._root, self._holder)
        return self._holder

    def _prune(self, published: int) -> None:
        if not self._keep:
            return
        surplus = [step for step in self.complete()[: -self._keep] if step != published]
        for step in surplus:
            # Out of sight in one move: an interrupted removal must not look like an interrupted save. What cannot be
            # moved now stays for the next pruning.
            path = iteration_path(self._root, step)
            with suppress(OSError):
                path.rename(self._root / f"{_LEAVING}{path.name}")
        for path in self._root.glob(f"{_LEAVING}*"):
            # A reader may still hold a file open on NFS; the next pruning tries again.
            shutil.rmtree(path, ignore_errors=True)

    def _steps(self) -> list[int]:
        if not self._root.is_dir():
            return []
        matches = (_FOLDER.fullmatch(path.name) for path in self._root.iterdir() if path.is_dir())
        return sorted(int(match[1]) for match in matches if match is not None)

    def _inspect(self, step: int) -> ResumePoint | str:
        """The complete checkpoint of `step`, or why its folder is not one."""
        path = iteration_path(self._root, step)
        try:
            if not (path / MARKER_NAME).is_file():
                return f"no {MARKER_NAME}, the save did not finish"
            sidecar = read_json(path / SIDECAR_NAME) or {}
            samples = sidecar.get("samples")
            if sidecar.get("step") != step or not isinstance(samples, int):
                return f"{SIDECAR_NAME} is missing or damaged"
            return _missing_files(path) or ResumePoint(str(path), step, samples)
        except OSError as error:
            return f"cannot be read: {error}"

    def _wreck_report(self, steps: list[int]) -> str:
        newest = steps[::-1][:_WRECKS_SHOWN]
        lines = [f"  {iteration_path(self._root, step).name}: {self._inspect(step)}" for step in newest]
        if len(steps) > len(newest):
            lines.append(f"  and {len(steps) - len(newest)} older ones")
        return "\n".join(
            [
                f"{self._root}: none of the {len(steps)} checkpoints here is complete:",
                *lines,
                "Remove or move these folders to start again at step 0, or set checkpoint_path to another folder",
            ]
        )

    def _free_space(self) -> str:
        return f"{shutil.disk_usage(self._root).free / 2**30:.2f} GiB are free"


def _missing_files(path: Path) -> str | None:
    """Which of Megatron's files is not in `path`; None when all are there.

    The index is a pickle, which only torch can load; the names of the data files stand in it as plain text.
    """
    for name in _METADATA_NAMES:
        if not (path / name).is_file():
            return f"{name} is missing"
    listed = set(_DATA_FILE.findall((path / ".metadata").read_bytes()))
    present = {found for file in path.iterdir() for found in _DATA_FILE.findall(file.name.encode())}
    missing = sorted(listed - present)
    return f"{len(missing)} of {len(listed)} data files missing, such as {missing[0].decode()}" if missing else None
