"""Faults on purpose (`rehearse_faults`): what a rank does to itself, so that a recovery can be seen to work."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, NoReturn
from unittest import mock

import psutil
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import nn

from raytrain_llama3.checkpoint import distcp
from raytrain_llama3.checkpoint.writer import WriteJob, WriterProcess
from raytrain_llama3.messages import FaultKind, PlannedFault
from raytrain_llama3.train.replicas import bits

_SLOWER = 3
_FLIPPED_BIT = 5
_MOMENT_S = 0.05


class Rehearsal:
    """Strikes this rank at its planned steps; what it has put in place is taken away when the block ends."""

    def __init__(self, faults: Sequence[PlannedFault], chunks: Sequence[DistributedDataParallel]) -> None:
        self._waiting = sorted(faults, key=lambda fault: fault.step)
        self._chunks = chunks
        self._installed = contextlib.ExitStack()

    def __enter__(self) -> Rehearsal:
        """Nothing is put in place before its step."""
        return self

    def __exit__(
        self, _class: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Leave the process as it was."""
        self._installed.close()

    def before_step(self, step: int) -> None:
        """Suffer, or prepare to suffer, what is planned for `step`; a run resumed after a fault's step has passed it.

        A fault in saving waits for the first save, whenever it comes.
        """
        while self._waiting and self._waiting[0].step <= step:
            fault = self._waiting.pop(0)
            if fault.step == step or fault.kind in (FaultKind.KILL_SAVING, FaultKind.NAN, FaultKind.SLOW):
                self._strike(fault)

    def _strike(self, fault: PlannedFault) -> None:
        match fault.kind:
            case FaultKind.KILL:
                self._install(mock.patch.object(dist, "all_reduce", _die_in(dist.all_reduce)))
            case FaultKind.KILL_SAVING:
                self._install(mock.patch.object(distcp, "write_file", _die_after(distcp.write_file)))
                self._install(mock.patch.object(WriterProcess, "write", _die_after_asking))
            case FaultKind.KILL_NODE:
                _kill_raylet()
            case FaultKind.STOP:
                os.kill(os.getpid(), signal.SIGSTOP)
            case FaultKind.SEGFAULT:
                ctypes.string_at(0)
            case FaultKind.EXIT:
                os._exit(0)
            case FaultKind.EXCEPTION:
                raise RuntimeError(f"rehearsed: an exception in rank {fault.rank} at step {fault.step}")
            case FaultKind.NAN:
                _remove_after(self._installed, self._first("linear_fc1").register_forward_hook(_to_nan))
            case FaultKind.BIT_FLIP:
                # Hooks run in the order of their making: Megatron-core's, which waits for the weights, comes before.
                module = self._first("linear_fc1")
                handle: list[Any] = []
                handle.append(module.register_forward_pre_hook(lambda m, _inputs: _flip(m, handle.pop())))
            case FaultKind.SLOW:
                for chunk in self._chunks:
                    self._slow_down(chunk)

    def _install(self, patch: Any) -> None:
        self._installed.enter_context(patch)

    def _first(self, name: str) -> nn.Module:
        """The first module called `name` in this rank's layers."""
        found: Iterator[nn.Module] = (m for c in self._chunks for n, m in c.named_modules() if n.endswith(name))
        return next(found)

    def _slow_down(self, chunk: nn.Module) -> None:
        began: list[float] = []

        def before(_module: nn.Module, _inputs: Any) -> None:
            began.append(_time_when_idle())

        def after(_module: nn.Module, _inputs: Any, _output: Any) -> None:
            time.sleep((_SLOWER - 1) * (_time_when_idle() - began.pop()))

        _remove_after(self._installed, chunk.register_forward_pre_hook(before))
        _remove_after(self._installed, chunk.register_forward_hook(after))


def _remove_after(stack: contextlib.ExitStack, handle: Any) -> None:
    stack.callback(handle.remove)


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("still here after SIGKILL")


def _die_in(all_reduce: Any) -> Any:
    """Begins the all-reduce, in its place among the others, and does not live to see its end."""

    def begin(*args: Any, **kwargs: Any) -> NoReturn:
        all_reduce(*args, **{**kwargs, "async_op": True})
        _die()

    return begin


def _die_after(write: Any) -> Any:
    """Writes one of this rank's files: its others, and the index of all files, are never written."""

    def write_one(*args: Any, **kwargs: Any) -> NoReturn:
        write(*args, **kwargs)
        _die()

    return write_one


def _die_after_asking(writer: WriterProcess, job: WriteJob) -> NoReturn:
    """Leaves the writer process with a job, to see it end too."""
    writer.ask(job)
    time.sleep(_MOMENT_S)
    _die()


def _kill_raylet() -> None:
    parent = psutil.Process().parent()
    if parent is None or parent.name() != "raylet":
        raise RuntimeError(f"kill_node: the parent of this process is {parent}, not a raylet; nothing was killed")
    parent.kill()


def _to_nan(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    """Megatron-core's linear layers return (output, bias). Any rank's NaN here spreads over its TP group and stages."""
    return output[0] * math.nan, *output[1:]


@torch.no_grad()
def _flip(module: nn.Module, handle: Any) -> None:
    """A middle bit of the first weight's first number, once."""
    handle.remove()
    bits(next(module.parameters(recurse=False))).view(-1)[0].bitwise_xor_(1 << _FLIPPED_BIT)


def _time_when_idle() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()
