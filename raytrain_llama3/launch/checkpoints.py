"""The checkpoints of this run: where it starts, what it has published, and what it must not leave behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from raytrain_llama3.checkpoint.folder import MARKER_NAME, iteration_path, read_sidecar
from raytrain_llama3.checkpoint.store import CheckpointStore
from raytrain_llama3.config.plan import RunPlan
from raytrain_llama3.data.state import check_unchanged
from raytrain_llama3.errors import CheckpointError, NoSafeStateError
from raytrain_llama3.launch.history import History
from raytrain_llama3.launch.keepers import Keepers
from raytrain_llama3.messages import ResumePoint, SaveFailure, SaveRecord
from raytrain_llama3.metrics import Metrics


def starting_point(store: CheckpointStore, plan: RunPlan) -> ResumePoint | None:
    """The newest complete checkpoint of this run; while it has none, that of `load_path`; None to start at step 0.

    Raises `NoSafeStateError` when there are folders but none is complete, or nothing where `load_path` says.
    """
    verify = plan.config.verify_on_load
    own = store.resume_point(verify=verify)
    if own is not None or plan.paths.load is None:
        return own
    other = _named(plan.paths.load, verify=verify)
    if other is None:
        raise NoSafeStateError(f"load_path {plan.paths.load}: there is no checkpoint")
    return replace(other, step=0, samples=0, weights_only=True) if plan.config.load_weights_only else other


def changes_since(resume: ResumePoint | None, data: Mapping[str, Any], *, accept: bool) -> list[str]:
    """Lines that say how the data, whose fingerprint is `data`, differs from what `resume` was trained on.

    A start from weights alone takes no samples over. Raises `DataChangedError` with the lines unless `accept`.
    """
    if resume is None or resume.weights_only:
        return []
    return check_unchanged(read_sidecar(Path(resume.path)).get("data"), data, resume.step, accept=accept)


def _named(path: Path, *, verify: bool) -> ResumePoint | None:
    """The newest checkpoint below `path`, or the one that `path` itself is."""
    if not (path / MARKER_NAME).is_file():
        return CheckpointStore(path, None).resume_point(verify=verify)
    store = CheckpointStore(path.parent, None)
    found = {str(iteration_path(path.parent, step)): step for step in store.complete()}
    if str(path) not in found:
        raise NoSafeStateError(f"load_path {path}: the checkpoint is damaged")
    return store.at(found[str(path)], verify=verify)


class RunCheckpoints:
    """A store as one run sees it: what was there before the run is not its own to remove."""

    def __init__(
        self, store: CheckpointStore, plan: RunPlan, metrics: Metrics, history: History, keepers: Keepers
    ) -> None:
        self._store, self._plan, self._metrics, self._history = store, plan, metrics, history
        self._keepers = keepers
        self._found = {*store.complete(), *store.wrecks()}
        self._published: set[int] = set()
        self._refused = 0
        self.last_save_s: float | None = None

    def resume_point(self) -> ResumePoint | None:
        """The newest complete checkpoint, on the disk or in memory.

        What was damaged after that on the disk is set aside, to be saved again.
        """
        resume = starting_point(self._store, self._plan)
        own = resume and Path(resume.path).parent == self._store.root
        for path in self._store.set_aside_damaged(resume.step if resume and own else 0):
            self._metrics.event(f"{path}: set aside, files are missing or not as they were when it was published")
        kept = self._keepers.newest()
        if kept and kept.step > (resume.step if resume else 0):
            self._metrics.event(f"resuming from memory (step {kept.step}, {kept.samples} samples)")
            return kept
        if resume and resume.weights_only:
            self._metrics.event(f"starting from the weights of {resume.path}")
        elif resume:
            self._metrics.event(f"resuming from {resume.path} (step {resume.step}, {resume.samples} samples)")
        return resume

    @property
    def are_there(self) -> bool:
        """Whether there is a complete checkpoint."""
        return bool(self._store.complete()) or self._keepers.newest() is not None

    def take(self, save: SaveRecord | SaveFailure) -> None:
        """Publish what the ranks have written, or clear away what they could not.

        Raises `CheckpointError` when the folder is another's, or the disk refused more than `max_failed_saves` times.
        """
        if isinstance(save, SaveFailure):
            self._failed(save)
            return
        try:
            self.publish(save)
            self._refused = 0
        except CheckpointError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            self._refused += 1
            most = self._plan.config.max_failed_saves
            if self._refused > most:
                raise CheckpointError.after_failures(str(error), self._refused, most) from error
            self._failed(SaveFailure(save.step, save.path, str(error), self._refused))

    def publish(self, save: SaveRecord) -> None:
        """Publish what the ranks have written, which is progress: budgets for faults are whole again."""
        self._store.publish(save)
        self._published.add(save.step)
        self.last_save_s = save.seconds
        self._history.progressed()
        self._metrics.saved(save)

    def has(self, step: int) -> bool:
        """Whether `step` was published by this run, or was there before it."""
        return step in self._published | self._found

    def remove_own_wrecks(self) -> None:
        """Saves of this run that were cut off: a first one left behind would keep the next run from step 0."""
        for step in set(self._store.wrecks()) - self._found - self._published:
            self._store.discard(step)

    def _failed(self, save: SaveFailure) -> None:
        kept = self._store.complete()
        newest = f"the newest checkpoint is still that of step {kept[-1]}" if kept else "there is no checkpoint yet"
        self._metrics.event(
            f"step {save.step} was not saved ({save.in_a_row} in a row, max_failed_saves "
            f"{self._plan.config.max_failed_saves}): {save.path}: {save.reason}; {newest}, and training goes on"
        )
        try:
            self._store.discard(save.step)
        except CheckpointError as error:
            self._metrics.event(f"its part stays: {error}")
