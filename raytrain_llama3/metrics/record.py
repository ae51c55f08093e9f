"""What the numbers of one log interval are: pure arithmetic over the steps in it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from raytrain_llama3.messages import EvalRecord, Failure, SaveRecord, StepRecord


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What stays the same over a run and turns times into rates.

    `flops_per_token` counts forward and backward with causal attention, whole model. `peak_flops` is the dense peak
    of one device, FLOP/s, or None where it is not known. `device` is "cpu" or "cuda".
    """

    train_steps: int
    global_batch_size: int
    devices: int
    flops_per_token: float
    peak_flops: float | None
    log_interval: int
    log_throughput: bool
    device: str


@dataclass(frozen=True, slots=True)
class Throughput:
    """Rates over some steps. TFLOP/s are None without `log_throughput`; `mfu` (0 to 1) also without a known peak."""

    tokens_per_s: float
    tokens_per_s_per_device: float
    tflops_per_device: float | None
    mfu: float | None
    of_products: float | None = None
    """The same FLOP/s over what the GPU's own products reached when it started (0 to 1)."""


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The steps of one log interval, told at its last step."""

    step: int
    train_steps: int
    samples: int
    tokens: int
    """Tokens of the interval."""
    loss: float
    """Mean over the steps that changed the weights (over all, where none did), nats a token."""
    learning_rate: float
    """At the last step."""
    grad_norm: float
    """At the last step that changed the weights (at the last, where none did)."""
    batch_size: int
    throughput: Throughput
    step_s: float
    """Mean seconds a step, without evaluation and saving."""
    eta_s: float
    """Seconds to `train_steps` at that pace."""
    attempt: int
    steps: int
    skipped_steps: int
    peak_memory_bytes: int
    finished_at: float
    """Unix time, seconds."""
    power_w: float = 0.0
    """Mean over the steps, watts; 0 where it is not known."""


@dataclass(frozen=True, slots=True)
class AttemptStart:
    """An attempt begins after `resume_step`: what earlier ones recorded of later steps no longer counts."""

    attempt: int
    resume_step: int
    at: float = field(default_factory=time.time)
    """Unix time, seconds."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint was published."""

    record: SaveRecord
    at: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class Event:
    """Anything else worth a line: a restart, a warning."""

    text: str
    at: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class Fault:
    """An attempt failed; `decision` says for people what was done about it."""

    failure: Failure
    decision: str
    at: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class Recovered:
    """The first step after a fault is done.

    `phase_seconds`: detect, clear, place, start, load, first_step, and perhaps others, in the order in which they came.
    `processes`: how many ranks' processes were `kept`, came from `standby`, or are `new`.
    """

    attempt: int
    phase_seconds: dict[str, float]
    lost_steps: int
    """Steps finished before the fault that are trained again."""
    resume_step: int
    processes: dict[str, int]
    goodput: float
    """Of the run so far, the recovery included."""
    at: float = field(default_factory=time.time)

    @property
    def total_s(self) -> float:
        """Seconds from the fault to the end of the first step after it."""
        return sum(self.phase_seconds.values())


@dataclass(frozen=True, slots=True)
class Accounts:
    """What a run's attempts, and the time between them, came to (`goodput.Ledger` says what each number means)."""

    attempts: int = 0
    faults: int = 0
    """Without preemptions."""
    preemptions: int = 0
    """Nodes that died."""
    lost_steps: int = 0
    counted_s: float = 0.0
    """Seconds of the steps that count."""
    elapsed_s: float = 0.0
    """Seconds since the run began."""
    goodput: float = 0.0
    """`counted_s` over `elapsed_s`."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The run is over, and this is what the command ends with."""

    exit_code: int
    accounts: Accounts
    at: float = field(default_factory=time.time)


Item = AttemptStart | StepRecord | StepMetrics | EvalRecord | Saved | Event | Fault | Recovered | Ended


class Sink(Protocol):
    """Where metrics go. Each takes the items that it has a form for and passes over the others."""

    name: str

    def write(self, item: Item) -> None:
        """Record `item` now. Raises `OSError` when it cannot; nothing is left half-written then."""
        ...

    def close(self) -> None:
        """Finish; no `write` follows."""
        ...


@dataclass(frozen=True, slots=True)
class Summary:
    """What this process saw of a run, for the closing table; None where there was nothing.

    Steps that were repeated after a restart count each time, in tokens and in seconds (without evaluation and saving).
    """

    first_loss: float | None
    last_loss: float | None
    last_validation_loss: float | None
    tokens: int
    seconds: float
    tokens_per_s: float
    attempts: int
    faults: int
    """Without preemptions."""
    preemptions: int
    """Nodes that died."""
    lost_steps: int
    goodput: float
    """0 to 1: `goodput.Ledger` says of what."""


def throughput(facts: RunFacts, tokens: int, seconds: float, product_flops: float = 0.0) -> Throughput:
    """Rates for `tokens` in `seconds`; all 0 when no time has passed."""
    tokens_per_s = tokens / seconds if seconds > 0 else 0.0
    per_device = tokens_per_s / facts.devices
    if not facts.log_throughput:
        return Throughput(tokens_per_s, per_device, None, None)
    flops = per_device * facts.flops_per_token
    return Throughput(
        tokens_per_s,
        per_device,
        flops / 1e12,
        flops / facts.peak_flops if facts.peak_flops else None,
        flops / product_flops if product_flops else None,
    )


def summarise(facts: RunFacts, attempt: int, steps: Sequence[StepRecord]) -> StepMetrics:
    """The metrics of an interval; `steps` holds at least one, in the order in which they were trained."""
    last = steps[-1]
    applied = [step for step in steps if not step.skipped] or list(steps)
    seconds = sum(step.step_s for step in steps)
    tokens = sum(step.tokens for step in steps)
    return StepMetrics(
        step=last.step,
        train_steps=facts.train_steps,
        samples=last.samples,
        tokens=tokens,
        loss=sum(step.loss for step in applied) / len(applied),
        learning_rate=last.learning_rate,
        grad_norm=applied[-1].grad_norm,
        batch_size=facts.global_batch_size,
        throughput=throughput(facts, tokens, seconds, last.product_flops),
        step_s=seconds / len(steps),
        eta_s=max(facts.train_steps - last.step, 0) * seconds / len(steps),
        attempt=attempt,
        steps=len(steps),
        skipped_steps=sum(step.skipped for step in steps),
        peak_memory_bytes=max(step.peak_memory_bytes for step in steps),
        finished_at=last.finished_at,
        power_w=sum(step.power_w for step in steps) / len(steps),
    )


def perplexity(record: EvalRecord) -> float:
    """exp(loss); infinite where a float cannot hold it."""
    try:
        return math.exp(record.loss)
    except OverflowError:
        return math.inf


def saved_values(record: SaveRecord) -> dict[str, object]:
    """What files keep of a published checkpoint: its sidecar has the rest."""
    waited = {} if record.wait_s is None else {"wait_s": record.wait_s}
    return {"step": record.step, "samples": record.samples, "path": record.path, "seconds": record.seconds} | waited
