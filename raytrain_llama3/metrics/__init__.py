"""What a run says about itself: a line for people, files for TensorBoard and programs, wandb where it is wanted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from raytrain_llama3.messages import EvalRecord, Failure, SaveRecord, StepRecord
from raytrain_llama3.metrics.console import ConsoleSink
from raytrain_llama3.metrics.events import EventsSink
from raytrain_llama3.metrics.goodput import Ledger
from raytrain_llama3.metrics.jsonl import JsonlSink
from raytrain_llama3.metrics.record import (
    AttemptStart,
    Ended,
    Event,
    Fault,
    Item,
    Recovered,
    RunFacts,
    Saved,
    Sink,
    Summary,
    summarise,
)
from raytrain_llama3.metrics.tensorboard import TensorBoardSink
from raytrain_llama3.metrics.wandb import WandbSink

__all__ = ["Metrics", "RunFacts", "Summary", "open_metrics"]


class Metrics:
    """Passes what the driver hears from the workers on to every sink; a context manager.

    A sink that meets `OSError` (a full disk) costs one warning on the console and is tried again with the next
    record: training goes on. `clock` counts seconds from anywhere; the run begins now.
    """

    def __init__(
        self, facts: RunFacts, console: ConsoleSink, sinks: list[Sink], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._facts, self._console, self._sinks = facts, console, sinks
        self._clock, self._began = clock, clock()
        self._ledger = Ledger()
        self._failing: set[str] = set()
        self._attempt = 0
        self._interval: list[StepRecord] = []
        self._first_loss: float | None = None
        self._last_loss: float | None = None
        self._last_validation_loss: float | None = None
        self._tokens, self._seconds = 0, 0.0

    @property
    def summary(self) -> Summary:
        """The run so far, as this process saw it."""
        accounts = self._ledger.accounts(self._elapsed_s)
        return Summary(
            first_loss=self._first_loss,
            last_loss=self._last_loss,
            last_validation_loss=self._last_validation_loss,
            tokens=self._tokens,
            seconds=self._seconds,
            tokens_per_s=self._tokens / self._seconds if self._seconds > 0 else 0.0,
            attempts=accounts.attempts,
            faults=accounts.faults,
            preemptions=accounts.preemptions,
            lost_steps=accounts.lost_steps,
            goodput=accounts.goodput,
        )

    def start_attempt(self, attempt: int, resume_step: int, devices: int | None = None) -> None:
        """Say that an attempt starts after `resume_step`; the steps after it are about to come again.

        `devices` is how many train from now on, where that is not as before.
        """
        self._facts = replace(self._facts, devices=devices or self._facts.devices)
        self._attempt = attempt
        self._ledger.start_attempt(resume_step)
        self._interval = [step for step in self._interval if step.step <= resume_step]
        self._write(AttemptStart(attempt, resume_step))

    def step(self, record: StepRecord) -> None:
        """Take one finished step; tell its interval when it is the last of one, or of the run."""
        self._first_loss = record.loss if self._first_loss is None else self._first_loss
        self._last_loss = record.loss
        self._tokens += record.tokens
        self._seconds += record.step_s
        self._ledger.step(record)
        self._interval.append(record)
        self._write(record)
        if record.step % self._facts.log_interval == 0 or record.step >= self._facts.train_steps:
            self._tell_interval()

    def evaluation(self, record: EvalRecord) -> None:
        """Take one evaluation."""
        self._last_validation_loss = record.loss
        self._write(record)

    def saved(self, record: SaveRecord) -> None:
        """Say that a checkpoint was published."""
        self._write(Saved(record))

    def fault(self, failure: Failure, decision: str) -> None:
        """Keep an account of a fault and of what was decided about it, in words; once for each."""
        self._ledger.fault(failure)
        self._write(Fault(failure, decision))

    def recovered(
        self, phase_seconds: Mapping[str, float], lost_steps: int, resume_step: int, processes: Mapping[str, int]
    ) -> None:
        """Say that the attempt under way has done its first step after a fault; `Recovered` says what the rest is."""
        goodput = self._ledger.accounts(self._elapsed_s).goodput
        self._write(Recovered(self._attempt, dict(phase_seconds), lost_steps, resume_step, dict(processes), goodput))

    def event(self, text: str) -> None:
        """Say anything else: a restart, a warning."""
        self._write(Event(text))

    def ended(self, exit_code: int) -> Summary:
        """Say what the run ends with; its summary."""
        self._write(Ended(exit_code, self._ledger.accounts(self._elapsed_s)))
        return self.summary

    def close(self) -> None:
        """Tell the interval that is under way, if any, and close every sink."""
        self._tell_interval()
        for sink in self._sinks:
            self._guarded(sink.name, sink.close)
        self._sinks = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _elapsed_s(self) -> float:
        return self._clock() - self._began

    def _tell_interval(self) -> None:
        if self._interval:
            self._write(summarise(self._facts, self._attempt, self._interval))
            self._interval = []

    def _write(self, item: Item) -> None:
        # Files first: whoever reads a line may look there for the rest of it.
        for sink in self._sinks:
            self._guarded(sink.name, partial(sink.write, item))
        self._say(item)

    def _say(self, item: Item) -> None:
        # A closed pipe or terminal leaves nowhere to warn.
        with suppress(OSError):
            self._console.write(item)

    def _guarded(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except OSError as error:
            if name not in self._failing:
                self._failing.add(name)
                self._say(Event(f"warning: {name} cannot be written ({error}); training goes on, some of it is lost"))


def open_metrics(
    facts: RunFacts,
    folder: Path,
    out: TextIO,
    wandb_project: str | None,
    wandb_run_name: str | None,
    config: Mapping[str, object],
    clock: Callable[[], float] = time.monotonic,
    also: Sequence[Sink] = (),
) -> Metrics:
    """Open every sink: lines to `out`, TensorBoard and JSONL files into `folder`, wandb when a project is named.

    What an earlier run left in `folder` is continued. A file that cannot be opened costs a warning on `out`; a wandb
    that is not installed, or does not start, raises `ConfigError`. wandb shows `config` as the run's configuration.
    `also` are sinks that are open already.
    """
    console = ConsoleSink(out, facts)
    openers: list[Callable[[], Sink]] = [
        partial(TensorBoardSink, folder),
        partial(JsonlSink, folder, facts),
        partial(EventsSink, folder),
    ]
    if wandb_project is not None:
        # First, so that a wandb that is not there leaves no files behind.
        openers.insert(0, partial(WandbSink, wandb_project, wandb_run_name, folder, config))
    sinks: list[Sink] = []
    for opener in openers:
        try:
            sinks.append(opener())
        except OSError as error:
            console.write(Event(f"warning: no metrics in {folder} ({error}); training goes on without them"))
    return Metrics(facts, console, [*sinks, *also], clock)
