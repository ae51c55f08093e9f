"""The wish to end a run before its target: asked of one rank, agreed by all."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from raytrain_llama3.messages import EndReason


@dataclass(frozen=True, slots=True)
class Votes:
    """Wishes to end after a step: a rank's own (0 or 1 each), or, summed over all ranks, how many have it."""

    stop: int = 0
    """Asked to stop."""
    late: int = 0
    """The time is over."""
    unsaved: int = 0
    """Asked to stop without saving; one such vote keeps every rank from saving."""

    @property
    def end_reason(self) -> EndReason | None:
        """Why the run ends, if it does."""
        if self.stop:
            return EndReason.STOP
        return EndReason.DURATION if self.late else None


class StopRequest:
    """Set by the driver's call on one thread, read by the training loop on another."""

    def __init__(self) -> None:
        self._asked, self._unsaved = threading.Event(), threading.Event()
        self._abandoned = threading.Event()

    def ask(self, *, save: bool) -> None:
        """Wish to stop. Once without saving is wished for, a later wish with saving does not undo it."""
        if not save:
            self._unsaved.set()
        self._asked.set()

    def clear(self) -> None:
        """Forget what was asked of an earlier attempt."""
        self._asked.clear()
        self._unsaved.clear()
        self._abandoned.clear()

    def abandon(self) -> None:
        """Another rank was lost: whatever waits for it is to give up."""
        self._abandoned.set()

    @property
    def is_abandoned(self) -> bool:
        """Whether another rank was lost."""
        return self._abandoned.is_set()

    def votes(self, *, late: bool = False) -> Votes:
        """This rank's votes as of now."""
        asked = self._asked.is_set()
        return Votes(stop=int(asked), late=int(late), unsaved=int(asked and self._unsaved.is_set()))
