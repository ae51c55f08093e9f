"""The saves of one attempt, as one rank carries them out: at most one under way, and never in training's way for long.

Training waits for the copy of its numbers (async) or for all of the save. Nothing here is a collective: each rank
says through the attempt's store what it has written, rank 0 writes the index once all parts are there, and its report
to the driver, which publishes, is the end of it. All ranks learn the outcome, and so agree on how many saves failed.
"""

from __future__ import annotations

import pickle
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from raytrain_llama3.checkpoint.destinations import Destination
from raytrain_llama3.checkpoint.distcp import Part
from raytrain_llama3.checkpoint.durable import free_space
from raytrain_llama3.checkpoint.keeper import Refused
from raytrain_llama3.checkpoint.staging import Files, nbytes_of
from raytrain_llama3.checkpoint.writer import WriterLost
from raytrain_llama3.errors import CheckpointError
from raytrain_llama3.messages import FileFacts, SaveFailure, SaveRecord

_POLL_S = 0.02
_END_S = 10.0
_SHOWN = 3
_GIB = 2**30

_REFUSED = (OSError, MemoryError, WriterLost, Refused, CheckpointError, ValueError, RuntimeError)
"""What may go wrong in a save without being the end of the attempt."""


@dataclass(frozen=True, slots=True)
class Company:
    """This rank among those that save together. `store` is for saves alone, with a connection of its own."""

    rank: int
    world_size: int
    store: Any
    is_abandoned: Callable[[], bool]
    """Whether the attempt is over for want of another rank: nothing is to be waited for any more."""


@dataclass(slots=True)
class _Save:
    number: int
    path: Path
    step: int
    samples: int
    sidecar: Mapping[str, object]
    began: float
    nbytes: int = 0
    wait_s: float | None = None
    failure: str | None = None
    """Why it failed, on all ranks alike; empty when it did not; None while it is under way."""
    error: BaseException | None = None
    thread: threading.Thread | None = None


class Saves:
    """Begins saves to one destination, and waits for them where it must."""

    def __init__(
        self,
        company: Company,
        destination: Destination,
        report: Callable[[SaveRecord | SaveFailure], None],
        max_failed: float,
    ) -> None:
        self._company, self._destination, self._report, self._max_failed = company, destination, report, max_failed
        self._current: _Save | None = None
        self._number = self._failed = 0
        self._last_failure = ""
        self._is_closed = False
        self.saved_step: int | None = None
        """Step of the last save that came about."""

    def begin(self, path: Path, step: int, samples: int, files: Files, sidecar: Mapping[str, object]) -> None:
        """Save `files`; returns when the numbers may change again. Waits for the save before this one first.

        Raises `CheckpointError`, on all ranks alike, once more than `max_failed_saves` in a row did not come about.
        """
        self.settle()
        save = _Save(self._number, path, step, samples, sidecar, time.perf_counter(), nbytes_of(files))
        self._number, self._current = self._number + 1, save
        staging = self._destination.staging
        if staging is None:
            self._carry_out(save, lambda: self._destination.write(path, files, samples))
            self.settle()
            return
        try:
            job = staging.stage(path, files)
        except (OSError, MemoryError) as error:
            refused = CheckpointError(
                f"no host memory for the copy of this rank's {save.nbytes / _GIB:.2f} GiB: {error}; --async-save 0 "
                "does without a copy"
            )
            write: Callable[[], Part] = lambda: _refuse(refused)  # noqa: E731
        else:
            write = lambda: self._destination.write(path, job, samples)  # noqa: E731
        save.wait_s = time.perf_counter() - save.began
        save.thread = threading.Thread(
            target=self._carry_out, args=(save, write), name=f"save of step {step}", daemon=True
        )
        save.thread.start()

    def settle(self) -> None:
        """Wait for the save that is under way, if one is. Raises as `begin` does."""
        save, self._current = self._current, None
        if save is None:
            return
        if save.thread is not None:
            save.thread.join()
        if save.error is not None:
            raise save.error
        if save.failure:
            self._failed, self._last_failure = self._failed + 1, save.failure
        else:
            self._failed, self.saved_step = 0, save.step
        if self._failed > self._max_failed:
            raise CheckpointError.after_failures(f"{save.path}: {save.failure}", self._failed, self._max_failed)

    @property
    def is_under_way(self) -> bool:
        """Whether a save has begun that `settle` would wait for."""
        return self._current is not None

    @property
    def last_failure(self) -> str:
        """Why the last save that failed did so."""
        return self._last_failure

    def close(self) -> None:
        """Drop what is under way: its part stays without an index, and is no checkpoint."""
        self._is_closed = True
        self._destination.close()
        save, self._current = self._current, None
        if save is not None and save.thread is not None:
            save.thread.join(_END_S)
        if self._destination.staging is not None:
            self._destination.staging.close()

    def _carry_out(self, save: _Save, write: Callable[[], Part]) -> None:
        """All of a save but the copy, on a thread of its own where training goes on meanwhile."""
        try:
            refused = self._opened(save)
            part: Part | str = refused or self._written(save, write)
            self._tell(save, str(self._company.rank), part)
            if self._company.rank == 0:
                self._tell(save, "outcome", self._concluded(save))
            save.failure = str(self._hear(save, "outcome"))
            if not save.failure:
                self._destination.confirm(save.path)
        except BaseException as error:  # noqa: BLE001  (raised in the training thread, by `settle`)
            save.error = error

    def _opened(self, save: _Save) -> str:
        """Have an empty folder, made by rank 0; why there is none, else an empty text."""
        if self._company.rank == 0:
            self._tell(save, "folder", self._refusal_of(save, lambda: self._destination.prepare(save.path)))
        return str(self._hear(save, "folder"))

    def _written(self, save: _Save, write: Callable[[], Part]) -> Part | str:
        part: list[Part] = []

        def attempt() -> None:
            if self._destination.is_disk and shutil.disk_usage(save.path).free < save.nbytes:
                raise CheckpointError(f"{save.nbytes / _GIB:.2f} GiB are to be written")
            part.append(write())

        return self._refusal_of(save, attempt) or part[0]

    def _concluded(self, save: _Save) -> str:
        """On rank 0: wait for every part, write the index, report. Why there is no checkpoint, else an empty text."""
        answers = [self._hear(save, str(rank)) for rank in range(self._company.world_size)]
        refusals = _by_rank(answers)
        files: dict[str, FileFacts] = {}
        if not refusals:
            parts = [answer for answer in answers if isinstance(answer, Part)]
            refusal = self._refusal_of(save, lambda: files.update(self._destination.conclude(save.path, parts)))
            refusals = [refusal] if refusal else []
        for rank in range(self._company.world_size):
            self._company.store.delete_key(_key(save, str(rank)))
        if refusals:
            more = f"; and {len(refusals) - _SHOWN} more" if len(refusals) > _SHOWN else ""
            text = "cannot be written: " + "; ".join(refusals[:_SHOWN]) + more
            self._report(SaveFailure(save.step, str(save.path), text, self._failed + 1))
            return text
        seconds = time.perf_counter() - save.began
        self._report(
            SaveRecord(save.step, save.samples, str(save.path), seconds, dict(save.sidecar), files, save.wait_s)
        )
        return ""

    def _refusal_of(self, save: _Save, act: Callable[[], object]) -> str:
        try:
            act()
        except _REFUSED as error:
            # torch wraps what a disk says; anything else is no matter of disks.
            if isinstance(error, RuntimeError) and not isinstance(error.__context__, OSError):
                raise
            return _in_words(error) + (f"; {free_space(save.path)}" if self._destination.is_disk else "")
        return ""

    def _tell(self, save: _Save, name: str, value: object) -> None:
        self._company.store.set(_key(save, name), zlib.compress(pickle.dumps(value), 1))

    def _hear(self, save: _Save, name: str) -> object:
        """What was told under `name`, once it is. Raises what a lost connection raises when the attempt is over."""
        key = _key(save, name)
        while not self._company.store.check([key]):
            if self._is_closed or self._company.is_abandoned():
                raise dist.DistNetworkError("connection closed by peer: another rank was lost during a save")
            time.sleep(_POLL_S)
        return pickle.loads(zlib.decompress(self._company.store.get(key)))


def _key(save: _Save, name: str) -> str:
    return f"{save.number}/{name}"


def _refuse(error: CheckpointError) -> Part:
    raise error


def _by_rank(answers: Sequence[object]) -> list[str]:
    """What ranks refused with, each reason once with the ranks that gave it."""
    ranks: dict[str, list[str]] = {}
    for rank, answer in enumerate(answers):
        if isinstance(answer, str):
            ranks.setdefault(answer, []).append(str(rank))
    return [reason if len(who) == len(answers) else f"rank {', '.join(who)}: {reason}" for reason, who in ranks.items()]


def _in_words(error: BaseException) -> str:
    cause = error.__context__ if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError) else error
    if isinstance(cause, OSError):
        return f"{cause.strerror or cause}" + (f": {cause.filename}" if cause.filename else "")
    return str(cause) or type(cause).__name__
