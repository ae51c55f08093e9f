"""Whole fp32 master weights in checkpoints, though the optimizer keeps only what their bf16 copies lack.

Transformer Engine's FusedAdam stores for each bf16 weight the 16 bits that make it an fp32 master weight, as int16.
Megatron-core 0.19 would save those as if they were weights, and cannot load them. Here they become masters on the
way out and remainders on the way in, so that a checkpoint means the same to every optimizer, on GPUs and CPUs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master of a bf16 `weight` and its int16 `remainder`; same shape."""
    return ((weight.view(torch.int16).to(torch.int32) << 16) + remainder.to(torch.int32)).view(torch.float32)


def divide(master: Tensor) -> tuple[Tensor, Tensor]:
    """The (bf16 weight, int16 remainder) of an fp32 `master`: what `join` takes; the weight is the nearest bf16."""
    bits = master.contiguous().view(torch.int32)
    remainder = bits.to(torch.int16)
    return ((bits - remainder.to(torch.int32)) >> 16).to(torch.int16).view(torch.bfloat16), remainder


@contextlib.contextmanager
def whole_masters(optimizer: MegatronOptimizer) -> Iterator[None]:
    """While inside, the optimizer's state shows and takes fp32 master weights."""
    with contextlib.ExitStack() as stack:
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            inner = getattr(part, "optimizer", None)
            if getattr(inner, "store_param_remainders", False):
                stack.enter_context(mock.patch.object(inner, "get_unscaled_state", _getter(inner)))
                stack.enter_context(mock.patch.object(inner, "set_scaled_state", _setter(inner)))
        yield


def _getter(inner: Any) -> Any:
    original = inner.get_unscaled_state

    def get(param: Tensor, name: str, *rest: Any, **options: Any) -> Tensor:
        state: Tensor = original(param, name, *rest, **options)
        return join(param, state) if name == "master_param" and state.dtype == torch.int16 else state

    return get


def _setter(inner: Any) -> Any:
    original = inner.set_scaled_state

    def put(param: Tensor, name: str, value: Tensor) -> None:
        if name == "master_param" and param.dtype == torch.bfloat16:
            weight, value = divide(value.to(param.device, torch.float32))
            param.copy_(weight.view(param.shape))
        original(param, name, value)

    return put
