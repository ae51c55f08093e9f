"""Whole fp32 master weights in checkpoints, though the optimizer keeps only what their bf16 copies lack.

Transformer Engine's FusedAdam stores for each bf16 weight the 16 bits that make it an fp32 master weight, as int16.
Megatron-core 0.19 would save those as if they were weights, and cannot load them. Here they become masters on the
way out and remainders on the way in, so that a checkpoint means the same to every optimizer, on GPUs and CPUs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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
    """While inside, the optimizer gives and takes fp32 master weights where checkpoints are made and read."""
    with contextlib.ExitStack() as stack:
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            if getattr(getattr(part, "optimizer", None), "store_param_remainders", False):
                for name, wrapped in (("_get", _giving), ("_set", _taking)):
                    method = f"{name}_main_param_and_optimizer_states"
                    stack.enter_context(mock.patch.object(part, method, wrapped(part, getattr(part, method))))
        yield


def _giving(part: Any, original: Callable[[Tensor], dict[str, Tensor]]) -> Callable[[Tensor], dict[str, Tensor]]:
    def give(model_param: Tensor) -> dict[str, Tensor]:
        tensors = original(model_param)
        if tensors["param"].dtype == torch.int16:
            tensors["param"] = join(_own_shard(part, model_param), tensors["param"])
        return tensors

    return give


def _taking(
    part: Any, original: Callable[[Tensor, dict[str, Tensor]], None]
) -> Callable[[Tensor, dict[str, Tensor]], None]:
    def take(model_param: Tensor, tensors: dict[str, Tensor]) -> None:
        shard = _own_shard(part, model_param)
        if shard.dtype == torch.bfloat16:
            weight, remainder = divide(tensors["param"].to(shard.device, torch.float32))
            shard.copy_(weight.view(shard.shape))
            tensors = tensors | {"param": remainder}
        original(model_param, tensors)

    return take


def _own_shard(part: Any, model_param: Tensor) -> Tensor:
    """This rank's piece of `model_param`: a view of it, which the optimizer updates."""
    group, order = part.model_param_group_index_map[model_param]
    shard: Tensor = part.optimizer.param_groups[group]["params"][order]
    return shard
