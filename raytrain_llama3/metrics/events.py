"""What befell a run, as one line of strict JSON each in `events.jsonl`: attempts, faults, recoveries, checkpoints."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from raytrain_llama3.messages import EvalRecord, StepRecord
from raytrain_llama3.metrics.append import JsonLines
from raytrain_llama3.metrics.record import (
    AttemptStart,
    Ended,
    Event,
    Fault,
    Item,
    Recovered,
    Saved,
    StepMetrics,
    saved_values,
)

FILE_NAME = "events.jsonl"


class EventsSink:
    """Appends to `<folder>/events.jsonl`; what earlier runs wrote stays.

    Each line has `kind`, `time` (Unix seconds) and `attempt`; by kind also: attempt `resume_step`; fault `failure` (all
    of `messages.Failure`) and `decision`; recovery `phases` (seconds by name, in order), `total_s`, `lost_steps`,
    `resume_step`, `processes` and `goodput`; checkpoint `step`, `samples`, `path` and `seconds`; end `exit_code` and
    the run's accounts. A run that was killed has no line `end`.
    """

    name = FILE_NAME

    def __init__(self, folder: Path) -> None:
        self._attempt = 0
        self._file = JsonLines(folder / FILE_NAME)

    def write(self, item: Item) -> None:
        """Append the line of `item`, if it has one: steps, evaluations and plain words are in metrics.jsonl."""
        match item:
            case AttemptStart(attempt, resume_step, at):
                self._attempt = attempt
                self._file.write("attempt", at, attempt, {"resume_step": resume_step})
            case Fault(failure, decision, at):
                values = {"decision": decision, "failure": asdict(failure)}
                self._file.write("fault", at, failure.attempt, values)
            case Recovered():
                self._recovered(item)
            case Saved(record, at):
                self._file.write("checkpoint", at, self._attempt, saved_values(record))
            case Ended(exit_code, accounts, at):
                self._file.write("end", at, self._attempt, {"exit_code": exit_code, **asdict(accounts)})
            case Event() | StepRecord() | StepMetrics() | EvalRecord():
                pass

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _recovered(self, item: Recovered) -> None:
        values = {
            "phases": item.phase_seconds,
            "total_s": item.total_s,
            "lost_steps": item.lost_steps,
            "resume_step": item.resume_step,
            "processes": item.processes,
            "goodput": item.goodput,
        }
        self._file.write("recovery", item.at, item.attempt, values)
