"""The process that writes a rank's part of a checkpoint while the rank trains on.

It is a program of its own, started by exec and not by fork: a rank's process has threads and a GPU. It reads the
rank's numbers from shared memory, is kept from save to save, and ends with its rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from torch import Tensor

from raytrain_llama3.checkpoint.distcp import Box, Item, Part, write_files, write_index
from raytrain_llama3.checkpoint.hostbuffer import HostBuffer
from raytrain_llama3.messages import FileFacts

# Not `-m`: the jobs that arrive are of the module as it is imported.
_PROGRAM = "from raytrain_llama3.checkpoint.writer import main; main()"


_NICE = 5
"""Training comes first."""


class WriterLost(Exception):
    """The writer process ended, or was never there."""


@dataclass(frozen=True, slots=True)
class Staged:
    """A box whose numbers lie in the shared memory, from byte `start` on."""

    box: Box
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class WriteJob:
    """Files to write, by name; `size` is that of the shared memory."""

    folder: Path
    files: dict[str, Sequence[Staged | tuple[Item, bytes]]]
    size: int


@dataclass(frozen=True, slots=True)
class IndexJob:
    """The index to write, once all parts are there."""

    folder: Path
    parts: tuple[Part, ...]


class WriterProcess:
    """The rank's side: starts the process with the first job, and anew after it was lost."""

    def __init__(self, buffer: HostBuffer) -> None:
        self._buffer = buffer
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    def write(self, job: WriteJob) -> Part:
        """Have files written. Raises `OSError` as the writer met it, `WriterLost` when it ended."""
        answer = self._ask(job)
        assert isinstance(answer, Part)
        return answer

    def write_index(self, job: IndexJob) -> dict[str, FileFacts]:
        """Have the index written; what each file of the checkpoint is. Raises as `write` does."""
        answer = self._ask(job)
        assert isinstance(answer, dict)
        return answer

    def close(self) -> None:
        """End it at once, whatever it does."""
        with self._lock:
            self._is_closed = True
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def ask(self, job: WriteJob | IndexJob) -> Connection:
        """Hand a job over; where the answer will come."""
        connection = self._started()
        connection.send(job)
        return connection

    def _ask(self, job: WriteJob | IndexJob) -> object:
        try:
            answer = self.ask(job).recv()
        except (EOFError, OSError) as error:
            raise WriterLost(self._last_words()) from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _started(self) -> Connection:
        with self._lock:
            if self._is_closed:
                raise WriterLost("the writer process was told to end")
            if self._process is not None and self._connection is not None and self._process.poll() is None:
                return self._connection
            ours, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), str(self._buffer.descriptor)]
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(), self._buffer.descriptor)
                )
            self._connection = Connection(ours.detach())
            return self._connection

    def _last_words(self) -> str:
        with self._lock:
            process, self._process, self._connection = self._process, None, None
        if process is None:
            return "the writer process was told to end"
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        code = process.poll()
        if code is None:
            process.kill()
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
        return f"the writer process {process.pid} {how} (for want of memory?)"


def serve(connection: Connection, buffer_descriptor: int) -> None:
    """The writer's side: one job after another, until the rank is gone."""
    jobs = _Jobs(connection)
    buffer: HostBuffer | None = None
    while True:
        job = jobs.next()
        try:
            if isinstance(job, WriteJob):
                if buffer is None or buffer.size != job.size:
                    buffer = HostBuffer.attached(buffer_descriptor)
                files = {name: [_numbers(buffer, item) for item in items] for name, items in job.files.items()}
                answer: object = write_files(job.folder, files)
            else:
                answer = write_index(job.folder, job.parts)
        except (OSError, ValueError, RuntimeError, MemoryError) as error:
            traceback.print_exc()
            # torch wraps what the disk says in an error of its own.
            answer = _said_by_the_disk(error)
        connection.send(answer)


class _Jobs:
    """Receives jobs on a thread of its own, which notices that the rank is gone while a job is being done."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._job: WriteJob | IndexJob | None = None
        self._come = threading.Semaphore(0)
        threading.Thread(target=self._receive, daemon=True).start()

    def next(self) -> WriteJob | IndexJob:
        self._come.acquire()
        assert self._job is not None
        return self._job

    def _receive(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._job = self._connection.recv()
                self._come.release()
        # Also in the middle of a file: nobody waits for it any more.
        os._exit(0)


def _numbers(buffer: HostBuffer, item: Staged | tuple[Item, bytes]) -> tuple[Item, Tensor | bytes]:
    if isinstance(item, Staged):
        return item.box, buffer.at(item.start, item.nbytes).view(item.box.dtype).view(item.box.sizes)
    return item


def _said_by_the_disk(error: Exception) -> Exception:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return OSError(cause.errno, cause.strerror, cause.filename)
        cause = cause.__cause__ or cause.__context__
    return WriterLost(f"the writer process: {type(error).__name__}: {error}")


def main() -> None:
    """What the process runs."""
    # A stop of the whole process group is the rank's to heed: what it still saves is wanted.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(_NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(Connection(int(sys.argv[1])), int(sys.argv[2]))
