"""Every step, evaluation, save and event as one line of strict JSON in `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping
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
    RunFacts,
    Saved,
    StepMetrics,
    perplexity,
    saved_values,
)

FILE_NAME = "metrics.jsonl"


class JsonlSink:
    """Appends to `<folder>/metrics.jsonl`; what earlier runs wrote stays.

    Each line has `kind` (step, evaluation, save or event), `time` (Unix seconds) and `attempt`. Numbers that JSON
    lacks (NaN, infinity) become null. A step that was repeated after a restart comes twice: the later line counts.
    """

    name = FILE_NAME

    def __init__(self, folder: Path, facts: RunFacts) -> None:
        self._facts = facts
        self._attempt = 0
        self._file = JsonLines(folder / FILE_NAME)

    def write(self, item: Item) -> None:
        """Append the line of `item`; intervals have none, since every step has its own; faults are in events.jsonl."""
        match item:
            case AttemptStart():
                self._attempt = item.attempt
                text = f"attempt {item.attempt} starts after step {item.resume_step}"
                self._line("event", item.at, {"text": text, "step": item.resume_step, "facts": asdict(self._facts)})
            case StepRecord():
                self._line("step", item.finished_at, asdict(item))
            case EvalRecord():
                self._line("evaluation", item.finished_at, {**asdict(item), "perplexity": perplexity(item)})
            case Saved(record, at):
                self._line("save", at, saved_values(record))
            case Event(text, at):
                self._line("event", at, {"text": text})
            case StepMetrics() | Fault() | Recovered() | Ended():
                pass

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _line(self, kind: str, at: float, values: Mapping[str, object]) -> None:
        others = {name: value for name, value in values.items() if name != "finished_at"}
        self._file.write(kind, at, self._attempt, others)
