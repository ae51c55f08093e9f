"""The end of a driver whose Ray is gone, before Ray itself aborts the process with a code that says nothing."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from raytrain_llama3.errors import ClusterFormationError
from raytrain_llama3.launch.addresses import accepts

_LOOK_S = 2.0
_SILENT_S = 45.0
"""Ray's client gives up after a minute, and takes its process with it."""


@contextlib.contextmanager
def guard(what_is_wrong: Callable[[], str]) -> Iterator[None]:
    """End this process at once, exit code 139, when `what_is_wrong` says something while the block runs.

    Nothing can be saved then: every rank hangs on Ray. The platform starts the command again, which resumes.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_LOOK_S):
            reason = what_is_wrong()
            if reason and not over.is_set():
                sys.stderr.write(f"error: {reason}; the run resumes from its newest checkpoint when started again\n")
                sys.stderr.flush()
                os._exit(ClusterFormationError.exit_code)

    thread = threading.Thread(target=watch, name="guard", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


def silence(address: str) -> Callable[[], str]:
    """For `guard`: Ray's head at host:port has not been reached for long."""
    host, _, port = address.rpartition(":")
    reached = [time.monotonic()]

    def what_is_wrong() -> str:
        if accepts(host, int(port)):
            reached[0] = time.monotonic()
        gone_s = time.monotonic() - reached[0]
        return f"Ray's head at {address} has not answered for {gone_s:.0f} s" if gone_s > _SILENT_S else ""

    return what_is_wrong
