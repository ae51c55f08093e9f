"""Which checkpoints are complete, which is the newest, which are kept, and who may publish one.

`checkpoint.folder` says what makes one folder complete; here are all folders of a run together.
"""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from raytrain_llama3.checkpoint.durable import free_space, read_json, sync, sync_tree, write_json
from raytrain_llama3.checkpoint.folder import (
    MARKER_NAME,
    SIDECAR_NAME,
    clear_partial,
    damaged_files,
    iteration_path,
    listed_files,
    missing_files,
    read_sidecar,
)
from raytrain_llama3.checkpoint.lock import Holder, check_held, hold
from raytrain_llama3.errors import CheckpointError, NoSafeStateError
from raytrain_llama3.messages import ResumePoint, SaveRecord

LATEST_NAME = "latest.json"
OWNER_NAME = ".store.json"
"""Holds an id that each marker names too: a checkpoint that was brought from elsewhere is never pruned."""
SIDECAR_FORMAT = 2

_FOLDER = re.compile(r"iter_(\d{7}|[1-9]\d{7,})")
_LEAVING = ".pruned_"
_DAMAGED = "damaged_"
_WRECKS_SHOWN = 5


class CheckpointStore:
    """The checkpoints of one run below `root`.

    `keep` is how many of the newest stay (None or 0: all of them); those whose step divides by `keep_every` stay for
    ever. Reading needs no lock; publishing and removing do.
    """

    def __init__(self, root: Path, keep: int | None, keep_every: int | None = None) -> None:
        self.root = root
        self._keep, self._keep_every = keep or 0, keep_every or 0
        self._holder: Holder | None = None
        self._id = ""
        self._verified: set[Path] = set()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder for this run, making it if it is missing.

        Raises `CheckpointError` naming host, process and time of the holder when another run has it.
        """
        with hold(self.root) as holder:
            self._holder, self._id = holder, self._own_id()
            try:
                yield
            finally:
                self._holder = None

    def publish(self, record: SaveRecord) -> None:
        """Make the files of `record` a checkpoint: durable, then committed, then older ones pruned.

        Raises `CheckpointError` when the folder is not ours, a file is missing or has another size, or the disk
        refuses; the folder then stays without a marker and is no checkpoint.
        """
        self._check_held()
        path = iteration_path(self.root, record.step)
        try:
            fault = missing_files(path, record.files)
            if fault is not None:
                raise CheckpointError(
                    f"{path}: not a checkpoint that can be published: {fault} (saved as {record.path}). The checkpoint "
                    f"folder must be one that every node and the driver share"
                )
            self._commit(path, record)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be published: {error}; {free_space(self.root)}") from error
        self._prune(record.step)

    def resume_point(self, *, verify: bool = False) -> ResumePoint | None:
        """The newest complete checkpoint, with `verify` the newest whose digests are right too; None if none was saved.

        Raises `NoSafeStateError` when there are folders, but none will do.
        """
        steps, refused = self._steps(), dict[int, str]()
        for step in reversed(steps):
            found = self._inspect(step, verify=verify)
            if isinstance(found, ResumePoint):
                return found
            refused[step] = found
        if steps:
            raise NoSafeStateError(self._wreck_report(refused))
        return None

    def at(self, step: int, *, verify: bool = False) -> ResumePoint:
        """The checkpoint of one step. Raises `NoSafeStateError` when it is not complete, or with `verify` damaged."""
        found = self._inspect(step, verify=verify)
        if isinstance(found, ResumePoint):
            return found
        raise NoSafeStateError(f"{iteration_path(self.root, step)}: {found}; take another of {self.complete()}")

    def complete(self) -> list[int]:
        """Steps of all complete checkpoints, oldest first."""
        return [step for step in self._steps() if isinstance(self._inspect(step), ResumePoint)]

    def wrecks(self) -> list[int]:
        """Steps of the folders that are not complete, oldest first."""
        return [step for step in self._steps() if isinstance(self._inspect(step), str)]

    def states(self) -> dict[int, str | None]:
        """All folders, by step, oldest first: None for a complete one, else what is wrong with it."""
        found = {step: self._inspect(step) for step in self._steps()}
        return {step: state if isinstance(state, str) else None for step, state in found.items()}

    def sidecar(self, step: int) -> dict[str, object]:
        """What was written beside the weights of `step`. Raises `CheckpointError` when it cannot be read."""
        path = iteration_path(self.root, step) / SIDECAR_NAME
        value = read_json(path)
        if value is None:
            raise CheckpointError(f"{path}: missing, or not JSON; take another of {self.root}: {self.complete()}")
        return value

    def discard(self, step: int) -> None:
        """Remove the wreck of a failed save. Raises `CheckpointError` when it is committed or the folder not ours."""
        self._check_held()
        clear_partial(iteration_path(self.root, step))

    def set_aside_damaged(self, newer_than: int) -> list[Path]:
        """Rename folders that were committed and have lost files since, so that training past them can save again."""
        self._check_held()
        moved = []
        for step in [*self.wrecks(), *(s for s in self.complete() if s > newer_than)]:
            path = iteration_path(self.root, step)
            if step > newer_than and (path / MARKER_NAME).exists():
                moved.append(path.rename(self._free_name(f"{_DAMAGED}{path.name}")))
        return moved

    def _damaged(self, path: Path) -> list[str]:
        """What is wrong with the bytes of a checkpoint; those of one that was read once are not read again."""
        damaged = [] if path in self._verified else damaged_files(path)
        if not damaged:
            self._verified.add(path)
        return damaged

    def _free_name(self, name: str) -> Path:
        path, number = self.root / name, 1
        while path.exists():
            path, number = self.root / f"{name}_{number}", number + 1
        return path

    def _commit(self, path: Path, record: SaveRecord) -> None:
        own = {
            "format": SIDECAR_FORMAT,
            "step": record.step,
            "samples": record.samples,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "files": {name: asdict(facts) for name, facts in sorted(record.files.items())},
        }
        write_json(path / SIDECAR_NAME, {**record.sidecar, **own})
        sync_tree(path)
        sync(self.root)
        # Again: reaching the disk may have taken minutes, in which another run can have taken over.
        holder = self._check_held()
        write_json(path / MARKER_NAME, {"step": record.step, "token": holder.token, "store": self._id})
        # For people and other programs; nothing here reads it, and the checkpoint is published without it.
        with suppress(OSError):
            write_json(self.root / LATEST_NAME, {"step": record.step, "path": path.name})

    def _check_held(self) -> Holder:
        if self._holder is None:
            raise CheckpointError(f"{self.root}: publishing and removing need the folder's lock")
        check_held(self.root, self._holder)
        return self._holder

    def _own_id(self) -> str:
        known = (read_json(self.root / OWNER_NAME) or {}).get("store")
        if isinstance(known, str):
            return known
        mine = uuid.uuid4().hex
        try:
            write_json(self.root / OWNER_NAME, {"store": mine})
        except OSError as error:
            raise CheckpointError(f"{self.root / OWNER_NAME}: cannot be written: {error}") from error
        return mine

    def _prune(self, published: int) -> None:
        if not self._keep:
            return
        surplus = [step for step in self.complete()[: -self._keep] if step != published]
        for step in surplus:
            path = iteration_path(self.root, step)
            if (self._keep_every and step % self._keep_every == 0) or not self._is_ours_alone(path):
                continue
            # Out of sight in one move: an interrupted removal must not look like an interrupted save. What cannot be
            # moved now stays for the next pruning.
            with suppress(OSError):
                path.rename(self.root / f"{_LEAVING}{path.name}")
        for path in self.root.glob(f"{_LEAVING}*"):
            # A reader may still hold a file open on NFS; the next pruning tries again.
            shutil.rmtree(path, ignore_errors=True)

    def _is_ours_alone(self, path: Path) -> bool:
        """Whether all that is in a checkpoint's folder was written by runs of this store."""
        if (read_json(path / MARKER_NAME) or {}).get("store") != self._id:
            return False
        written = {MARKER_NAME, SIDECAR_NAME, *(listed_files(read_sidecar(path)) or {})}
        return all(file.name in written for file in path.iterdir())

    def _steps(self) -> list[int]:
        if not self.root.is_dir():
            return []
        matches = (_FOLDER.fullmatch(path.name) for path in self.root.iterdir() if path.is_dir())
        return sorted(int(match[1]) for match in matches if match is not None)

    def _inspect(self, step: int, *, verify: bool = False) -> ResumePoint | str:
        """The complete checkpoint of `step`, with `verify` an undamaged one, or why its folder is not one."""
        path = iteration_path(self.root, step)
        try:
            if not (path / MARKER_NAME).is_file():
                return f"no {MARKER_NAME}, the save did not finish"
            sidecar = read_sidecar(path)
            samples, files = sidecar.get("samples"), listed_files(sidecar)
            if sidecar.get("step") != step or not isinstance(samples, int) or files is None:
                return f"{SIDECAR_NAME} is missing or damaged"
            fault = missing_files(path, files)
        except OSError as error:
            return f"cannot be read: {error}"
        if fault is None and verify:
            fault = next(iter(self._damaged(path)), None)
        return fault or ResumePoint(str(path), step, samples, weights_only=bool(sidecar.get("weights_only")))

    def _wreck_report(self, refused: dict[int, str]) -> str:
        newest = list(refused)[:_WRECKS_SHOWN]
        lines = [f"  {iteration_path(self.root, step).name}: {refused[step]}" for step in newest]
        if len(refused) > len(newest):
            lines.append(f"  and {len(refused) - len(newest)} older ones")
        return "\n".join(
            [
                f"{self.root}: none of the {len(refused)} checkpoints here is complete:",
                *lines,
                "Remove or move these folders to start again at step 0, or set checkpoint_path to another folder",
            ]
        )
