"""SIGTERM and Ctrl-C for the whole life of a command: noted while training, heeded at once before it."""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, Self

from raytrain_llama3.errors import RaytrainError, StoppedBySignal

AT_ONCE = 0
AFTER_ONE = 1
NEVER = math.inf


class StopSignal:
    """Counts SIGTERM and SIGINT; the one that goes past `patience` raises `StoppedBySignal` where it arrives.

    `patience` is how many are only noted: `AT_ONCE` during start-up, `AFTER_ONE` while training (the first asks the
    ranks to save and stop), `NEVER` during clean-up, which is short and must not be cut off.
    """

    def __init__(self) -> None:
        self.patience: float = AT_ONCE
        self._received = 0
        self._number = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        self.install()
        return self

    def __exit__(self, _kind: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def install(self) -> None:
        """Take the signals (again: `ray.init` puts a handler of its own in this place)."""
        for number in self._before:
            signal.signal(number, self._on_signal)

    @contextlib.contextmanager
    def unwrapped(self) -> Iterator[None]:
        """Raise `StoppedBySignal` as itself: whatever code it interrupted may have made another error of it."""
        try:
            yield
        except RaytrainError:
            raise
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None:
                if isinstance(cause, StoppedBySignal):
                    raise cause from None
                cause = cause.__cause__ or cause.__context__
            raise

    @property
    def is_set(self) -> bool:
        """Whether someone asked to stop."""
        return self._received > 0

    @property
    def name(self) -> str:
        """The last signal's name, or who else may have asked."""
        return signal.Signals(self._number).name if self._number else "asked to stop"

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        # Nothing is written here: this may have interrupted a write to the very stream that would tell about it.
        self._received += 1
        self._number = number
        if self._received > self.patience:
            self.patience = NEVER
            raise StoppedBySignal(f"{self.name}: ended at once")
