"""What a run leaves behind for whoever did not see it end: exit code, reason, and what was saved."""

from __future__ import annotations

import contextlib
import time

from raytrain_llama3.checkpoint.durable import write_json
from raytrain_llama3.checkpoint.store import CheckpointStore
from raytrain_llama3.config.plan import RunPaths
from raytrain_llama3.errors import RaytrainError

NAME = "result.json"


def leave(paths: RunPaths, code: int, end: str, saved: int | None) -> None:
    """Write `result.json` beside the ranks' logs; a folder that cannot be written is not the run's fault."""
    facts = {"exit_code": code, "end": end.splitlines()[0], "saved_step": saved, "time": time.time()}
    with contextlib.suppress(OSError):
        paths.logs.mkdir(parents=True, exist_ok=True)
        write_json(paths.logs / NAME, facts)


def saved_step(paths: RunPaths) -> int | None:
    """The step of the newest complete checkpoint."""
    with contextlib.suppress(RaytrainError, OSError):
        point = CheckpointStore(paths.checkpoints, 0).resume_point()
        return point.step if point else None
    return None
