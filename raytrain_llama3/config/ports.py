"""Every port that a Ray of pods listens on, the same on each node, below the range that the kernel gives away."""

from __future__ import annotations

from dataclasses import dataclass

SPAN = 1100
"""Ports of a plan, from its base."""
_WORKERS_FROM = 100
_WORKERS = (SPAN - _WORKERS_FROM) // 2
_TURN = 10


@dataclass(frozen=True, slots=True)
class PortPlan:
    """`SPAN` ports from `base` on: a few for Ray's services, the rest for its workers, one each.

    `turn` is 0 or 1, in turns for each Ray that a pod starts. Connections to one that was cut off hang for as long as
    it was, up to two minutes, and to Ray another at the same ports is at the end of these very connections.
    """

    base: int
    turn: int = 0

    @property
    def gcs(self) -> int:
        """Ray's head: where nodes join and drivers connect. On pod 0 alone, as is the dashboard."""
        return self.base

    @property
    def dashboard(self) -> int:
        """The dashboard and `ray job submit`."""
        return self.base + 1

    @property
    def raylet(self) -> int:
        """The node manager of each node: open as soon as the node has joined."""
        return self._first + 2

    @property
    def services(self) -> dict[str, int]:
        """`ray start`'s flags for the ports that every node has."""
        return {
            "--node-manager-port": self.raylet,
            "--object-manager-port": self._first + 3,
            "--dashboard-agent-listen-port": self._first + 4,
            "--dashboard-agent-grpc-port": self._first + 5,
            "--metrics-export-port": self.metrics,
            "--runtime-env-agent-port": self._first + 7,
        }

    @property
    def metrics(self) -> int:
        """Where Prometheus reads a node's metrics, always the same."""
        return self.base + 6

    @property
    def client(self) -> int:
        """Ray's client server on the head, which `ray start` does not leave out."""
        return self.base + 8

    @property
    def workers(self) -> tuple[int, int]:
        """First and last port of Ray's worker processes, ranks among them."""
        first = self.base + _WORKERS_FROM + self.turn * _WORKERS
        return first, first + _WORKERS - 1

    @property
    def last(self) -> int:
        """The last port of the plan."""
        return self.base + SPAN - 1

    @property
    def _first(self) -> int:
        return self.base + self.turn * _TURN

    def __contains__(self, port: int) -> bool:
        return self.base <= port <= self.last

    def __str__(self) -> str:
        return f"{self.base}–{self.last}"
