"""What a rank raised, in plain words: the driver has no torch to unpickle a torch exception with."""

from __future__ import annotations

import gc
import time
import traceback
from types import TracebackType

from raytrain_llama3.config import env
from raytrain_llama3.config.plan import RunPlan
from raytrain_llama3.errors import CheckpointError, CorruptionError, NonFiniteError, RankError, RaytrainError
from raytrain_llama3.messages import FailureKind

_OUT_OF_MEMORY = ("out of memory", "defaultcpuallocator", "cublas_status_alloc_failed")
_TIMED_OUT = ("timed out", "timeout", "time-out")
_PEER_LOST = ("connection closed by peer", "connection reset", "broken pipe", "socket closed", "connection refused")


class PlainWords:
    """A block whose errors leave it as `RankError`, with the traceback in the log and nothing held by its frames."""

    def __init__(self, plan: RunPlan | None = None) -> None:
        self._plan = plan

    def __enter__(self) -> None:
        """Nothing to do before the block."""

    def __exit__(
        self, _class: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Raise what the block raised as a `RankError`."""
        if error is None:
            return
        # The driver may be gone: the rank's own log keeps the whole of it.
        traceback.print_exception(error)
        said = rank_error(error, self._plan)
        _let_go(error)
        raise said from None


def rank_error(error: BaseException, plan: RunPlan | None = None) -> RankError:
    """`error` as text and numbers; `plan` gives the present values of the options that a remedy names."""
    if isinstance(error, RankError):
        return error
    kind = _kind(error)
    culprit = error.rank if isinstance(error, CorruptionError) and error.rank >= 0 else None
    # What ended a save or a load as CheckpointError may be the loss of another rank, which is no fault of the folder.
    ours = isinstance(error, RaytrainError) and kind not in _NOT_OURS
    code = error.exit_code if isinstance(error, RaytrainError) and ours else None
    message = str(error) if ours else f"{type(error).__name__}: {_first_line(error)}"
    return RankError(kind.value, message + _remedy(kind, plan), code, culprit, time.time())


_NOT_OURS = (FailureKind.OUT_OF_MEMORY, FailureKind.TIMED_OUT, FailureKind.PEER_LOST)


def _kind(error: BaseException) -> FailureKind:
    if isinstance(error, NonFiniteError):
        return FailureKind.NON_FINITE
    if isinstance(error, CorruptionError):
        return FailureKind.CORRUPTED
    if isinstance(error, CheckpointError) and error.__cause__ is not None:
        return _kind(error.__cause__)
    if isinstance(error, RaytrainError):
        return FailureKind.EXCEPTION
    if isinstance(error, MemoryError) or _is_torch(error, "OutOfMemoryError"):
        return FailureKind.OUT_OF_MEMORY
    return _kind_by_text(error) if isinstance(error, RuntimeError) else FailureKind.EXCEPTION


def _kind_by_text(error: RuntimeError) -> FailureKind:
    """Told by its words, because gloo, torch's CPU allocator and cuBLAS raise RuntimeErrors with no class of their own.

    torch.distributed has classes, but one for a peer that is gone and for one that is late.
    """
    text = str(error).lower()
    of_torch = any(_is_torch(error, name) for name in ("AcceleratorError", "DistError"))
    if not of_torch and type(error) is not RuntimeError:
        return FailureKind.EXCEPTION
    if any(words in text for words in _OUT_OF_MEMORY):
        return FailureKind.OUT_OF_MEMORY
    of_network = _is_torch(error, "DistError") or "gloo" in text or "nccl" in text
    if of_network and any(words in text for words in _TIMED_OUT):
        return FailureKind.TIMED_OUT
    lost = _is_torch(error, "DistBackendError") or _is_torch(error, "DistNetworkError")
    if lost or (of_network and any(words in text for words in _PEER_LOST)):
        return FailureKind.PEER_LOST
    return FailureKind.EXCEPTION


def _is_torch(error: BaseException, name: str) -> bool:
    """By name: what a process raises before torch is there must be classified too."""
    return any(c.__name__ == name and c.__module__.partition(".")[0] == "torch" for c in type(error).__mro__)


def _remedy(kind: FailureKind, plan: RunPlan | None) -> str:
    if plan is None:
        return ""
    if kind is FailureKind.OUT_OF_MEMORY:
        layout = plan.layout
        return (
            f". Lower micro_batch_size (now {layout.micro_batch_size}), raise tp_size (now {layout.tp}) or pp_size "
            f"(now {layout.pp}), or set recompute_activations (now {plan.config.recompute_activations})"
        )
    if kind is FailureKind.TIMED_OUT:
        variable = "GLOO_SOCKET_IFNAME" if plan.device == "cpu" else "NCCL_SOCKET_IFNAME"
        return (
            f". Raise distributed_timeout_minutes (now {plan.config.distributed_timeout_minutes}) if a rank may be "
            f"that slow, or name the network interface between the nodes in {variable} "
            f"(now {env.snapshot().get(variable, 'unset')})"
        )
    return ""


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else "no message"


def _let_go(error: BaseException) -> None:
    """Drop what the frames of a failed attempt hold (the model, its optimizer): the process may live on."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None
        waiting += [one.__cause__, one.__context__]
    # Modules and hooks refer to each other, and the collector is off while a rank trains (`manual_gc`).
    gc.enable()
    gc.collect()
