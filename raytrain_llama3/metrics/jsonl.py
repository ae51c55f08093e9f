"""Every step, evaluation, save and event as one line of strict JSON in `metrics.jsonl`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from raytrain_llama3.messages import EvalRecord, StepRecord
from raytrain_llama3.metrics.append import WholeAppends
from raytrain_llama3.metrics.record import AttemptStart, Event, Item, RunFacts, Saved, StepMetrics, perplexity

FILE_NAME = "metrics.jsonl"
_LONGEST_LINE_BYTES = 1 << 20


class JsonlSink:
    """Appends to `<folder>/metrics.jsonl`; what earlier runs wrote stays.

    Each line has `kind` (step, evaluation, save or event), `time` (Unix seconds) and `attempt`. Numbers that JSON
    lacks (NaN, infinity) become null. A step that was repeated after a restart comes twice: the later line counts.
    """

    name = FILE_NAME

    def __init__(self, folder: Path, facts: RunFacts) -> None:
        self._facts = facts
        self._attempt = 0
        path = folder / FILE_NAME
        if path.exists():
            _cut_off_half_line(path)
        self._file = WholeAppends(path)

    def write(self, item: Item) -> None:
        """Append the line of `item`; intervals have none, since every step has its own."""
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
                names = ("step", "samples", "path", "seconds")
                self._line("save", at, {name: getattr(record, name) for name in names})
            case Event(text, at):
                self._line("event", at, {"text": text})
            case StepMetrics():
                pass

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _line(self, kind: str, at: float, values: Mapping[str, object]) -> None:
        own = {"kind": kind, "time": at, "attempt": self._attempt}
        others = {name: value for name, value in values.items() if name != "finished_at"}
        self._file.write(json.dumps(_strict({**own, **others}), allow_nan=False).encode() + b"\n")


def _strict(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _strict(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cut_off_half_line(path: Path) -> None:
    """Remove what a killed driver left of its last line, so that the next line starts afresh."""
    with path.open("r+b") as file:
        start = max(file.seek(0, os.SEEK_END) - _LONGEST_LINE_BYTES, 0)
        file.seek(start)
        file.truncate(start + file.read(_LONGEST_LINE_BYTES).rfind(b"\n") + 1)
