"""What a run wrote about itself, read back: its steps, and its way to the first one."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

_TORCHRUN_ENDS = re.compile(r"[WE](\d\d)(\d\d) (\d\d:\d\d:\d\d\.\d+) .*(?:closing signal|failed \(exitcode)")
_RANK_PHASES = ("process_group", "model", "first_step")


@dataclass(frozen=True, slots=True)
class Step:
    """One training step."""

    step: int
    loss: float
    finished_at: float
    """Unix time, seconds."""


def read(path: Path) -> list[dict[str, Any]]:
    """Every whole line of a JSON lines file; none where there is no file yet."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


class Tail:
    """A JSON lines file that grows: all of it so far, each line parsed once."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.lines: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """Every whole line so far."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                whole = file.read().rpartition(b"\n")
            self._offset += len(whole[0]) + len(whole[1])
            self.lines += [json.loads(line) for line in whole[0].splitlines()]
        return self.lines


def steps(lines: list[dict[str, Any]]) -> list[Step]:
    """The steps among `lines`, in order."""
    return [Step(line["step"], line["loss"], line["time"]) for line in lines if line["kind"] == "step"]


def torchrun_phases(lines: list[dict[str, Any]], started_at: float) -> dict[str, float]:
    """Seconds of each part of torchrun's way to the first step, which add up to the whole of it."""
    (last,) = (line for line in lines if line["kind"] == "phases")
    return {"launcher or driver": last["born"] - started_at} | _in_rank(lines, last["seconds"], last["born"])


def recoveries(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The recoveries among the lines of our events.jsonl: `attempt`, `phases` (seconds by name), `processes`."""
    return [line for line in lines if line["kind"] == "recovery"]


def torchrun_noticed(output: Path, after: float) -> float | None:
    """When torchrun said first, later than `after` (Unix seconds), that it ends the ranks because one failed."""
    for line in output.read_text(errors="replace").splitlines():
        if match := _TORCHRUN_ENDS.match(line):
            at = _unix_time(match[1], match[2], match[3], after)
            if at >= after:
                return at
    return None


def _unix_time(month: str, day: str, clock: str, near: float) -> float:
    """The local time in a line of torch's log, which leaves out the year: that of `near`."""
    year = datetime.fromtimestamp(near).year
    return datetime.strptime(f"{year}-{month}-{day} {clock}", "%Y-%m-%d %H:%M:%S.%f").timestamp()


def command_phases(lines: list[dict[str, Any]], started_at: float, spoke_at: float, console: str) -> dict[str, float]:
    """The same for our command, which spoke its first line at `spoke_at`; `console` is all that it printed."""
    seconds = _closing_seconds(console)
    attempt_at = next(line["time"] for line in lines if line["kind"] == "event")
    asked_at = attempt_at + seconds.get("place", 0.0)
    return {
        "launcher or driver": spoke_at - started_at,
        "Ray": attempt_at - spoke_at,
        "placement": asked_at - attempt_at,
    } | _in_rank(lines, seconds, asked_at)


def _in_rank(lines: list[dict[str, Any]], seconds: dict[str, float], asked_at: float) -> dict[str, float]:
    """From a rank's process being asked for to the end of its first step."""
    last = [seconds.get(phase, 0.0) for phase in _RANK_PHASES]
    imported_at = steps(lines)[0].finished_at - sum(last)
    imports = seconds["import"]
    return {"rank's process": imported_at - imports - asked_at, "its imports": imports} | dict(
        zip((phase.replace("_", " ") for phase in _RANK_PHASES), last, strict=True)
    )


def _closing_seconds(console: str) -> dict[str, float]:
    """The line `seconds  ray 6.1, actors 7.9, …` that the command closes with."""
    found = re.search(r"^\s+seconds\s+(.*)$", console, re.MULTILINE)
    if found is None:
        raise ValueError(f"no line of seconds in what the command printed:\n{console}")
    return {name: float(value) for name, value in re.findall(r"(\w+) ([\d.]+)", found.group(1))}
