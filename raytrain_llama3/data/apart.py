"""Reading files that may be damaged in a process of its own, where a library would end the process over them."""

from __future__ import annotations

import contextlib
import io
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from raytrain_llama3.errors import DataError

_SERVE = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from raytrain_llama3.data.apart import serve; serve()"
)
_SHOWN = 200


def read_apart[F, T](read: Callable[[F], T], files: Sequence[F], name: Callable[[F], str]) -> list[T]:
    """`read(file)` of each of `files`, all in one other process; `name` is what people call a file.

    `read`, `files` and what `read` returns or raises are pickled. Raises what it raised first, or `DataError` for the
    file over which the process died.
    """
    if not files:
        return []
    given = pickle.dumps(sys.path) + pickle.dumps((read, list(files)))
    done = subprocess.run([sys.executable, "-c", _SERVE], input=given, capture_output=True, check=False)
    found = _answers(done.stdout)
    if found and not found[-1][0]:
        raise found[-1][1]
    if len(found) < len(files):
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise DataError(
            f"{name(files[len(found)])} is damaged: a process that looked at it died, as this one would have "
            f"(exit {done.returncode}, {last[-_SHOWN:].strip() or 'without a word'}); restore it"
        )
    return [answer for _, answer in found]


def serve() -> None:
    """In the other process: answer with a pickle for each file, up to the first that raises."""
    read, files = pickle.load(sys.stdin.buffer)
    for file in files:
        try:
            answer: tuple[bool, Any] = True, read(file)
        except Exception as error:  # noqa: BLE001  (the process that asked raises it)
            answer = False, error
        sys.stdout.buffer.write(pickle.dumps(answer))
        sys.stdout.buffer.flush()
        if not answer[0]:
            return


def _answers(written: bytes) -> list[tuple[bool, Any]]:
    """Whether it was returned, not raised, and what."""
    found, stream = [], io.BytesIO(written)
    # What is cut off was being written when the process died.
    with contextlib.suppress(EOFError, pickle.UnpicklingError):
        while True:
            found.append(pickle.load(stream))
    return found
