"""The driver's last word to the other pods: the exit code, left in a file of each by a task that runs there."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from raytrain_llama3.config import env
from raytrain_llama3.launch.session import on_node

FILE_VARIABLE = "RAYTRAIN_POD_EXIT_CODE"
"""Names the file, in the environment of a pod's raylet and so of every task there."""
_ANSWER_S = 20.0


class PodsFarewell:
    """Tells every node of the cluster once."""

    def __init__(self) -> None:
        self._told = False

    def tell(self, code: int) -> None:
        """Leave `code` on each node that answers in time; the others find out by the head's going."""
        if self._told:
            return
        self._told = True
        import ray

        with contextlib.suppress(ray.exceptions.RayError, RuntimeError, ConnectionError):
            nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
            refs = [on_node(node["NodeID"], leave_code, code) for node in nodes if node["Alive"]]
            ray.wait(refs, num_returns=len(refs), timeout=_ANSWER_S)


def leave_code(code: int) -> None:
    """On a pod: say that the run is over. The file appears whole."""
    path = Path(env.snapshot()[FILE_VARIABLE])
    temporary = path.with_suffix(".new")
    temporary.write_text(str(code))
    temporary.rename(path)
