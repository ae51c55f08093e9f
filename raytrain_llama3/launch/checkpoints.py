"""The checkpoints of this run: where it resumes, what it has published, and what it must not leave behind."""

from __future__ import annotations

from raytrain_llama3.checkpoint.store import CheckpointStore
from raytrain_llama3.launch.history import History
from raytrain_llama3.messages import ResumePoint, SaveRecord
from raytrain_llama3.metrics import Metrics


class RunCheckpoints:
    """A store as one run sees it: what was there before the run is not its own to remove."""

    def __init__(self, store: CheckpointStore, metrics: Metrics, history: History) -> None:
        self._store, self._metrics, self._history = store, metrics, history
        self._found = {*store.complete(), *store.wrecks()}
        self._published: set[int] = set()
        self.last_save_s: float | None = None

    def resume_point(self) -> ResumePoint | None:
        """The newest complete checkpoint. What was damaged after it is set aside, to be saved again."""
        resume = self._store.resume_point()
        for path in self._store.set_aside_damaged(resume.step if resume else 0):
            self._metrics.event(f"{path}: set aside, files are missing that were there when it was published")
        if resume:
            self._metrics.event(f"resuming from {resume.path} (step {resume.step}, {resume.samples} samples)")
        return resume

    @property
    def are_there(self) -> bool:
        """Whether there is a complete checkpoint."""
        return bool(self._store.complete())

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
