"""What Ray says of a lost rank, in the field's words: kind, cause, node and the last lines of its log."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

from raytrain_llama3.config.plan import LOG_HEADER
from raytrain_llama3.errors import HardwareError, RankError
from raytrain_llama3.host import end_of, log_tail
from raytrain_llama3.messages import Failure, FailureKind, RankSpec

_CRASH_BYTES = 262_144
_FATAL = re.compile(r"Fatal Python error: (.+)")
_MEMORY_REMEDY = (
    "the node's own memory, not a GPU's: use fewer processes a node, smaller micro_batch_size or standby_processes, or "
    "a node with more memory"
)

_SAYS_MOST = (
    FailureKind.NON_FINITE,
    FailureKind.CORRUPTED,
    FailureKind.OUT_OF_MEMORY,
    FailureKind.EXCEPTION,
    FailureKind.NODE_DIED,
    FailureKind.CRASHED,
    FailureKind.DIED,
    FailureKind.HANG,
    FailureKind.TIMED_OUT,
    FailureKind.PEER_LOST,
)
"""Of the ranks of one fault, what explains it before what merely followed from it."""


def rank_of_evidence(failure: Failure) -> int:
    """Sorts failures of one attempt: the cause first."""
    return _SAYS_MOST.index(failure.kind)


def from_error(spec: RankSpec, log_path: Path, error: Exception, pid: int | None = None) -> Failure:
    """What `error`, from `ray.get` of anything that the rank was asked, says about the rank."""
    import ray

    now = time.time()
    tail = log_tail(log_path)
    failure = Failure(
        rank=spec.rank,
        node_ip=spec.node_ip,
        node_id=spec.node_id,
        kind=FailureKind.EXCEPTION,
        error=_in_one_line(error),
        step=0,
        attempt=spec.attempt,
        at=now,
        log_path=str(log_path),
        log_tail=tail,
    )
    cause = _cause(error)
    if isinstance(cause, RankError):
        return replace(
            failure,
            kind=FailureKind(cause.kind),
            error=str(cause),
            exit_code=cause.code,
            rank=spec.rank if cause.culprit is None else cause.culprit,
            # Two replicas that differ do not say which of them is wrong: no node is to blame.
            node_id="" if cause.kind == FailureKind.CORRUPTED and cause.culprit is None else spec.node_id,
            at=cause.at,
            detect_s=max(now - cause.at, 0.0),
        )
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return replace(failure, kind=FailureKind.OUT_OF_MEMORY, error=f"{_in_one_line(error)} ({_MEMORY_REMEDY})")
    if isinstance(error, ray.exceptions.NodeDiedError):
        return replace(failure, kind=FailureKind.NODE_DIED)
    if isinstance(error, ray.exceptions.RayActorError):
        return _died(failure, error, pid)
    return failure


def of_lost_node(spec: RankSpec) -> Failure:
    """What there is to say of a rank whose node cannot be reached."""
    return Failure(
        rank=spec.rank,
        node_ip=spec.node_ip,
        node_id=spec.node_id,
        kind=FailureKind.NODE_DIED,
        error=f"node {spec.node_ip} is gone: its Ray does not answer",
        step=0,
        attempt=spec.attempt,
        at=time.time(),
    )


def _died(failure: Failure, error: Exception, pid: int | None) -> Failure:
    # The note stands above the stacks of all threads.
    own = end_of(Path(failure.log_path), _CRASH_BYTES).rpartition(LOG_HEADER)[2]
    notes = _FATAL.findall(own)
    who = "the process" if pid is None else f"process {pid}"
    if notes:
        return replace(failure, kind=FailureKind.CRASHED, error=f"{who} crashed: {notes[-1]}")
    text = str(error)
    if "error raised in its creation task" in text:
        reason = text.strip().splitlines()[-1].strip()
        needs = "every node needs this package, where its Ray finds it"
        said = f"no rank can start on {failure.node_ip}: {reason}; {needs}"
        return replace(failure, kind=FailureKind.EXCEPTION, error=said, exit_code=HardwareError.exit_code)
    if "its node has died" in text:
        return replace(
            failure, kind=FailureKind.NODE_DIED, error=f"node {failure.node_ip} is gone: Ray says that it died"
        )
    if "running low on memory" in text:
        return replace(failure, kind=FailureKind.OUT_OF_MEMORY, error=f"{who} was killed by Ray: {_MEMORY_REMEDY}")
    return replace(
        failure,
        kind=FailureKind.DIED,
        error=f"{who} ended without a word: it was killed (for want of memory?), or left by itself",
    )


def _cause(error: Exception) -> BaseException:
    """What the rank itself raised; of a lost process, Ray's own error."""
    import ray

    inner = error.cause if isinstance(error, ray.exceptions.RayTaskError) else None
    return inner if isinstance(inner, BaseException) else error


def _in_one_line(error: BaseException) -> str:
    """Class and message. Ray's own errors say why in their last line; that of a traceback has the class already."""
    import ray

    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    if isinstance(error, ray.exceptions.RayTaskError):
        return lines[-1]
    return f"{type(error).__name__}: {lines[-1 if isinstance(error, ray.exceptions.RayError) else 0]}"
