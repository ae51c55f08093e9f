"""How long a rank's own part of a step takes, which tells a slow rank from those that wait for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from raytrain_llama3.data.source import Tokens


class OwnWork:
    """Seconds in fetching micro-batches and in forward passes, since the last `start`.

    Waiting for weights that other ranks still gather is taken out; collectives of tensor and context parallelism
    are part of a forward pass, so that the ranks of one such group look alike. On a GPU the marks are events on the
    current stream, which cost microseconds and are read when they have long passed.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel], *, on_gpu: bool) -> None:
        self._mark: Callable[[], Any] = self._event if on_gpu else time.perf_counter
        self._between = _between_events if on_gpu else _between_times
        self._spans: list[tuple[Any, Any]] = []
        self._waits: list[tuple[Any, Any]] = []
        self._data_s = 0.0
        self._events: list[torch.cuda.Event] = []
        self._used = 0
        for chunk in chunks:
            if chunk.ddp_config.overlap_param_gather:
                for group in chunk.bucket_groups:
                    group.finish_param_sync = self._waiting(group, group.finish_param_sync)

    def start(self) -> None:
        """Begin a step."""
        self._spans.clear()
        self._waits.clear()
        self._data_s, self._used = 0.0, 0

    def fetched(self, batches: Iterator[Tokens | None]) -> Iterator[Tokens | None]:
        """`batches`, with the time that each takes counted."""
        while True:
            began = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self._data_s += time.perf_counter() - began
            yield batch

    def forward_began(self) -> Any:
        """A mark to give to `forward_ended`. A context would cost ten times as much."""
        return self._mark()

    def forward_ended(self, began: Any) -> None:
        """Count a forward pass."""
        self._spans.append((began, self._mark()))

    def seconds(self) -> float:
        """What was counted since `start`. On a GPU only once its work up to here is known to be done."""
        return self._data_s + sum(map(self._between, self._spans)) - sum(map(self._between, self._waits))

    def _waiting(self, group: Any, finish: Callable[..., None]) -> Callable[..., None]:
        """`finish` is called before every module and waits for other ranks only where a gather is on its way."""

        def finish_apart(*args: Any, **kwargs: Any) -> None:
            if group.param_gather_dispatched and group.param_gather_handle is None:
                finish(*args, **kwargs)
                return
            began = self._mark()
            finish(*args, **kwargs)
            self._waits.append((began, self._mark()))

        return finish_apart

    def _event(self) -> torch.cuda.Event:
        if self._used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        event = self._events[self._used]
        self._used += 1
        event.record()
        return event


def _between_times(span: tuple[float, float]) -> float:
    return span[1] - span[0]


def _between_events(span: tuple[torch.cuda.Event, torch.cuda.Event]) -> float:
    return float(span[0].elapsed_time(span[1])) / 1e3
