"""The TCP connections that gloo keeps to other ranks, and how to break them.

gloo has no abort: a rank that waits for one which itself waits, or has given up, would wait for the whole time-out.
Broken connections end every such wait with an error, in all ranks at once, and leave a process that can form new
groups.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

import psutil


class Links:
    """Tells gloo's connections from others by the ports that it listens on, which were not there before."""

    def __init__(self) -> None:
        self._others: set[int] = set()

    def before_opening(self) -> None:
        """Note what listens now: not gloo's."""
        self._others = {c.laddr.port for c in _connections() if c.status == psutil.CONN_LISTEN}

    def sever(self) -> int:
        """Shut down every connection that another rank made to this one; how many there were.

        Of each pair of ranks one made the connection, so all ranks that sever break all pairs.
        """
        present = _connections()
        ports = {c.laddr.port for c in present if c.status == psutil.CONN_LISTEN} - self._others
        return sum(_shut(c.fd, ports) for c in present if c.status != psutil.CONN_LISTEN and c.laddr.port in ports)


def _connections() -> list[Any]:
    return [c for c in psutil.Process().net_connections("tcp") if c.fd >= 0]


def _shut(descriptor: int, ports: set[int]) -> bool:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        # The number may have passed to another file since it was listed.
        if connection.getsockname()[1] in ports:
            connection.shutdown(socket.SHUT_RDWR)
            return True
    return False
