"""What a person sees: one line per log interval, evaluation, save, recovery and event."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TextIO

from raytrain_llama3.messages import EvalRecord, SaveRecord, StepRecord
from raytrain_llama3.metrics.record import (
    AttemptStart,
    Ended,
    Event,
    Fault,
    Item,
    Recovered,
    RunFacts,
    Saved,
    StepMetrics,
    Summary,
    perplexity,
)


class ConsoleSink:
    """Writes lines to `out`, each flushed. Memory is shown on a GPU only, MFU only where the peak is known."""

    name = "console"

    def __init__(self, out: TextIO, facts: RunFacts) -> None:
        self._out, self._facts = out, facts

    def write(self, item: Item) -> None:
        """Write the line of `item`; single steps have none, and faults and the end are told at length elsewhere."""
        match item:
            case StepMetrics():
                self._line(step_line(item, self._facts))
            case EvalRecord():
                self._line(evaluation_line(item, self._facts))
            case Saved(record):
                self._line(saved_line(record, self._facts))
            case Event(text):
                self._line(text)
            case AttemptStart() if item.resume_step or item.attempt:
                self._line(f"attempt {item.attempt} goes on after step {item.resume_step}")
            case Recovered():
                self._line(recovery_line(item))
            case AttemptStart() | StepRecord() | Fault() | Ended():
                pass

    def close(self) -> None:
        """Leave `out` open: it is the caller's."""

    def _line(self, text: str) -> None:
        self._out.write(text + "\n")
        self._out.flush()


def step_line(metrics: StepMetrics, facts: RunFacts) -> str:
    """The line of one log interval."""
    rates = metrics.throughput
    parts = [
        _progress(metrics.step, facts),
        f"loss {loss(metrics.loss)}",
        f"lr {metrics.learning_rate:.1e}",
        f"grad {short(metrics.grad_norm)}",
        f"{count(rates.tokens_per_s)} tok/s",
        f"{count(rates.tokens_per_s_per_device)} tok/s/device",
    ]
    if rates.tflops_per_device is not None:
        parts.append(f"{short(rates.tflops_per_device)} TFLOP/s/device")
    if rates.mfu is not None:
        of_products = "" if rates.of_products is None else f" ({100 * rates.of_products:.0f}% of its products)"
        parts.append(f"{100 * rates.mfu:4.1f}% MFU{of_products}")
    parts.append(f"{seconds(metrics.step_s)} s/step")
    if facts.device == "cuda":
        parts.append(f"{metrics.peak_memory_bytes / 2**30:5.1f} GiB")
    if metrics.power_w:
        parts.append(f"{metrics.power_w:3.0f} W")
    parts.append(f"ETA {duration(metrics.eta_s)}")
    if metrics.skipped_steps:
        parts.append(f"skipped {metrics.skipped_steps} of {metrics.steps}")
    parts.append(f"attempt {metrics.attempt}")
    return " | ".join(parts)


def evaluation_line(record: EvalRecord, facts: RunFacts) -> str:
    """The line of one evaluation."""
    return " | ".join(
        [
            _progress(record.step, facts),
            f"validation loss {loss(record.loss)}",
            f"perplexity {perplexity(record):#.4g}",
            f"{count(record.tokens).strip()} tokens in {record.seconds:.1f} s",
        ]
    )


def saved_line(record: SaveRecord, facts: RunFacts) -> str:
    """The line of one published checkpoint."""
    waited = "" if record.wait_s is None else f" (training waited {seconds(record.wait_s).strip()} s)"
    return f"{_progress(record.step, facts)} | saved in {record.seconds:.1f} s{waited} as {Path(record.path).name}"


def recovery_line(item: Recovered) -> str:
    """The line of one recovery: seconds by phase, what is trained again, and where the ranks' processes came from."""
    phases = ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in item.phase_seconds.items())
    again = {0: "no step is trained again", 1: "1 step is trained again"}
    parts = [
        f"recovered in {item.total_s:.1f} s: {phases}",
        again.get(item.lost_steps, f"{item.lost_steps} steps are trained again"),
    ]
    origins = {"kept": "kept", "standby": "from standby", "new": "new"}
    found = [(number, origins.get(name, name)) for name, number in item.processes.items() if number]
    if found:
        (number, origin), *others = found
        processes = [f"{number} process{'es' if number > 1 else ''} {origin}", *(f"{n} {name}" for n, name in others)]
        parts.append(", ".join(processes))
    return "; ".join(parts)


def summary_lines(summary: Summary) -> list[str]:
    """The rows of the closing table that a run's numbers fill."""
    rows = []
    if summary.first_loss is not None:
        rows.append(f"loss         {summary.first_loss:.4f} at first, {summary.last_loss:.4f} at last")
        if summary.last_validation_loss is not None:
            rows.append(f"validation   {summary.last_validation_loss:.4f}")
        rows.append(f"speed        {summary.tokens_per_s:,.0f} tokens/s over {summary.tokens:,} tokens")
    if summary.attempts > 1:
        counts = {"fault": summary.faults, "preemption": summary.preemptions, "lost step": summary.lost_steps}
        found = ", ".join(f"{number} {name}{'' if number == 1 else 's'}" for name, number in counts.items())
        rows.append(f"attempts     {summary.attempts}: {found}")
    rows.append(f"goodput      {100 * summary.goodput:.1f} % of the time went into steps that count")
    return rows


def loss(value: float) -> str:
    """Six characters from 0 to 999: 0.9877, 2.4213, 11.762."""
    return f"{value:6.{_decimals(value, 4)}f}"


def short(value: float) -> str:
    """Four characters from 0.01 to 9999: 0.84, 8.41, 84.1, 841; below that `4.1e-03`."""
    if 0 < abs(value) < 0.01:
        return f"{value:.1e}"
    return f"{value:4.{_decimals(value, 2)}f}"


def seconds(value: float) -> str:
    """Five characters up to 999: 0.125, 12.50, 125.0."""
    return f"{value:5.{_decimals(value, 3)}f}"


def count(value: float) -> str:
    """Five characters: 9.5, 950, 1.25k, 18.2k, 1.82M."""
    if value < 999.5:
        return f"{value:5.{_decimals(value, 1)}f}"
    scaled, units = value / 1e3, "kMG"
    while scaled >= 999.5 and len(units) > 1:
        scaled, units = scaled / 1e3, units[1:]
    return f"{scaled:4.{_decimals(scaled, 2)}f}{units[0]}"


def duration(value: float) -> str:
    """`22 s`, `5 min 20 s`, `2 h 05 min`, `3 d 04 h`."""
    whole = math.ceil(value)
    if whole < 60:
        return f"{whole} s"
    minutes, rest_s = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest_s:02d} s"
    hours, rest_min = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {rest_min:02d} min"
    days, rest_h = divmod(hours, 24)
    return f"{days} d {rest_h:02d} h"


def _decimals(value: float, below_ten: int) -> int:
    """One decimal less for every digit before the point, so that the width stays the same after rounding."""
    decimals = below_ten
    limit = 10.0
    while decimals and abs(value) >= limit - 0.5 * 10.0**-decimals:
        decimals -= 1
        limit *= 10
    return decimals


def _progress(step: int, facts: RunFacts) -> str:
    total = str(facts.train_steps)
    return f"step {step:>{len(total)}}/{total}"
