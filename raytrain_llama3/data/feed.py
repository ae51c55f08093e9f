"""From a feeder to a rank: which batch a rank asks for, read ahead of need, handed over as micro-batches."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from raytrain_llama3.data.source import Tokens

if TYPE_CHECKING:
    from raytrain_llama3.config.plan import Layout, RunPlan
    from raytrain_llama3.data.samples import Samples
    from raytrain_llama3.data.sources import Sources

Part = Literal["train", "valid"]

_FIRST_WORD_S = 10.0
_NEXT_WORD_S = 60.0
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Request:
    """One data-parallel rank's share of the global batch that starts at `first_sample`."""

    part: Part
    first_sample: int
    dp_rank: int
    dp: int
    micro_batch_size: int
    num_micro_batches: int

    @property
    def samples(self) -> range:
        """The whole global batch's sample numbers."""
        count = self.dp * self.micro_batch_size * self.num_micro_batches
        return range(self.first_sample, self.first_sample + count)

    def numbers(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The share's sample numbers in micro-batch order, `[num_micro_batches * micro_batch_size]`.

        The global batch is cut into micro-batches in sample order and dealt out like cards: micro-batch m of rank r
        is number m * dp + r. So a global batch holds the same samples for every dp, and so does a resumed run.
        """
        size = self.micro_batch_size
        firsts = self.first_sample + (np.arange(self.num_micro_batches) * self.dp + self.dp_rank) * size
        return (firsts[:, None] + np.arange(size)).reshape(-1).astype(np.int64)

    def following(self) -> Request:
        """The same rank's share of the next global batch."""
        return Request(
            self.part, self.samples.stop, self.dp_rank, self.dp, self.micro_batch_size, self.num_micro_batches
        )


def share_of(part: Part, first_sample: int, layout: Layout, dp_rank: int) -> Request:
    """What the rank `dp_rank` needs of the global batch that starts at `first_sample`."""
    return Request(part, first_sample, dp_rank, layout.dp, layout.micro_batch_size, layout.num_micro_batches)


def read_share(samples: Samples, request: Request) -> Tokens:
    """`[num_micro_batches, micro_batch_size, seq_length + 1]`, int32. Raises `DataError` naming file and row."""
    tokens = samples.read(request.numbers())
    return tokens.reshape(request.num_micro_batches, request.micro_batch_size, -1)


def needs_tokens(plan: RunPlan, pp_rank: int) -> bool:
    """Whether a pipeline stage looks at tokens: the first embeds them, the last compares with them.

    With `reset_attention_mask` every stage has to see where documents end.
    """
    return pp_rank in (0, plan.layout.pp - 1) or plan.config.reset_attention_mask


class Link(Protocol):
    """Where a rank takes its shares from."""

    @property
    def read_ahead(self) -> int:
        """How many shares are taken before they are needed; 0: none, each is read when it is asked for."""
        ...

    @property
    def fingerprint(self) -> dict[str, Any]:
        """`Sources.fingerprint`."""
        ...

    @property
    def valid_samples(self) -> int:
        """Samples in one epoch of validation."""
        ...

    @property
    def end_of_document(self) -> int | None:
        """`Sources.end_of_document`."""
        ...

    @property
    def where(self) -> str:
        """What answers, for people."""
        ...

    def take(self, request: Request, is_given_up: Callable[[], bool]) -> Tokens:
        """The share of `request`, not to be written to. Waits until it is there, or nobody wants it any more.

        Raises `DataError` for data that cannot be read, `DataUnavailableError` when nothing answers.
        """
        ...


class LocalLink:
    """Reads shards in this process: for training without Ray, beside which Ray is measured."""

    read_ahead = 0
    where = "this process"

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self.fingerprint = sources.fingerprint()
        self.valid_samples = sources.valid.windows
        self.end_of_document = sources.end_of_document

    def take(self, request: Request, is_given_up: Callable[[], bool]) -> Tokens:
        """Read now."""
        return read_share(getattr(self._sources, request.part), request)


def local_link(plan: RunPlan) -> LocalLink:
    """A link that opens the run's data here."""
    from raytrain_llama3.data.sources import open_sources

    return LocalLink(open_sources(plan))


class Told(Protocol):
    """Who hears of waiting."""

    def add(self, record: str) -> None:
        """A line for people."""

    def waits_for(self, what: str) -> None:
        """What is waited for at this moment, so that it is not taken for a hang; empty: nothing."""


class Nobody:
    """Hears nothing."""

    def add(self, record: str) -> None:
        """Ignored."""

    def waits_for(self, what: str) -> None:
        """Ignored."""


class ReadAhead:
    """Takes the shares of one global batch after another on a thread of its own, `link.read_ahead` of them ahead.

    `request` is the first; `stop` ends the sequence before a sample number. `told` hears what is waited for.
    """

    def __init__(self, link: Link, request: Request, told: Told, stop: int | None = None) -> None:
        self._link, self._told, self._stop = link, told, stop
        self._next = request
        self._ready: deque[tuple[Request, Tokens | Exception]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, args=(request,), name="read-ahead", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Shares that are there and not asked for yet."""
        return len(self._ready)

    def take(self, first_sample: int) -> Tokens:
        """The next share, which must be that of `first_sample`. Raises what reading it raised."""
        if self._next.first_sample != first_sample:
            raise ValueError(f"the next share begins at sample {self._next.first_sample}, not {first_sample}")
        with self._changed:
            if not self._ready:
                self._wait()
            request, found = self._ready.popleft()
            self._changed.notify_all()
        if isinstance(found, Exception):
            raise found
        self._next = request.following()
        return found

    def close(self) -> None:
        """Take no more, and let go of what was taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(2 * _LOOK_S)
        self._ready.clear()

    def _wait(self) -> None:
        began, word_s = time.monotonic(), _FIRST_WORD_S
        samples = self._next.samples
        what = f"samples {samples.start} to {samples.stop - 1}, asked of {self._link.where}"
        while not self._changed.wait_for(lambda: bool(self._ready), _LOOK_S):
            self._told.waits_for(what)
            if (waited := time.monotonic() - began) > word_s:
                self._told.add(f"has waited {waited:.0f} s for data: {what}")
                word_s = waited + _NEXT_WORD_S
        self._told.waits_for("")

    def _run(self, request: Request) -> None:
        while self._stop is None or request.first_sample < self._stop:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._ready) < self._link.read_ahead)
                if self._closed:
                    return
            found: Tokens | Exception
            try:
                found = self._link.take(request, lambda: self._closed)
            except Exception as error:  # noqa: BLE001  (whatever it is, the training thread raises it)
                found = error
            with self._changed:
                if self._closed:
                    return
                self._ready.append((request, found))
                self._changed.notify_all()
            if isinstance(found, Exception):
                return
            request = request.following()


class RankFeed:
    """What one rank of one attempt trains and evaluates on.

    A rank without `has_need` (its pipeline stage looks at no tokens) gets None for each micro-batch, and asks nobody.
    `tap` is shown each share that the rank takes.
    """

    def __init__(
        self,
        link: Link,
        layout: Layout,
        dp_rank: int,
        has_need: bool = True,
        told: Told | None = None,
        tap: Callable[[Request, Tokens], None] | None = None,
    ) -> None:
        self._link, self._layout, self._dp_rank, self._tap = link, layout, dp_rank, tap
        self._told = told or Nobody()
        self._has_need = has_need
        self._ahead: dict[Part, ReadAhead] = {}
        self.fingerprint, self.valid_samples = link.fingerprint, link.valid_samples
        self.end_of_document = link.end_of_document

    def begin(self, part: Part, first_sample: int, stop: int | None = None) -> None:
        """Read ahead from `first_sample` on; what was read ahead of this part before is dropped."""
        self.end(part)
        if self._has_need and self._link.read_ahead:
            request = share_of(part, first_sample, self._layout, self._dp_rank)
            self._ahead[part] = ReadAhead(self._link, request, self._told, stop)

    def end(self, part: Part) -> None:
        """Read no further ahead in this part."""
        if part in self._ahead:
            self._ahead.pop(part).close()

    def micro_batches(self, part: Part, first_sample: int) -> Iterator[Tokens | None]:
        """The rank's micro-batches of the global batch that starts at `first_sample`.

        Yields `num_micro_batches` arrays of token ids, `[micro_batch_size, seq_length + 1]`, int32, not to be written
        to. Raises `DataError`, naming file and row.
        """
        if not self._has_need:
            yield from [None] * self._layout.num_micro_batches
            return
        request = share_of(part, first_sample, self._layout, self._dp_rank)
        ahead = self._ahead.get(part)
        share = ahead.take(first_sample) if ahead is not None else self._link.take(request, lambda: False)
        if self._tap is not None:
            self._tap(request, share)
        yield from share

    def close(self) -> None:
        """End all reading ahead."""
        for part in list(self._ahead):
            self.end(part)
