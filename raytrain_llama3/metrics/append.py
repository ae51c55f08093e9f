"""A file that grows by whole records."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

_LONGEST_LINE_BYTES = 1 << 20


class WholeAppends:
    """Appends all of a record or none of it, so that a full disk cannot leave half of one among whole ones.

    Opened at construction, with its folder; `OSError` from there and from `write`.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._size = os.fstat(self._descriptor).st_size

    def write(self, record: bytes) -> None:
        """Append `record`; on `OSError` the file is as it was."""
        done = 0
        try:
            while done < len(record):
                done += os.write(self._descriptor, record[done:])
        except OSError:
            os.ftruncate(self._descriptor, self._size)
            raise
        self._size += done

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class JsonLines:
    """Appends lines of strict JSON to `path`; what earlier runs wrote stays, but for half a line of a killed one.

    Numbers that JSON lacks (NaN, infinity) become null. `OSError` as from `WholeAppends`.
    """

    def __init__(self, path: Path) -> None:
        if path.exists():
            _cut_off_half_line(path)
        self._file = WholeAppends(path)

    def write(self, kind: str, time: float, attempt: int, values: Mapping[str, object]) -> None:
        """Append one line: `kind`, `time` (Unix seconds), `attempt`, then `values`."""
        line = {"kind": kind, "time": time, "attempt": attempt, **values}
        self._file.write(json.dumps(_strict(line), allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


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
