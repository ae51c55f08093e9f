"""A file that grows by whole records."""

from __future__ import annotations

import os
from pathlib import Path


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
