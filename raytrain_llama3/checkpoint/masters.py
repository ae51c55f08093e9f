"""Whole fp32 master weights in checkpoints, though the optimizer keeps only what their bf16 copies lack.

Transformer Engine's FusedAdam stores for each bf16 weight the 16 bits that make it an fp32 master weight, as int16.
Megatron-core 0.19 would save those as if they were weights, and cannot load them. Here they become masters on the
way out and remainders on the way in (`shards`), so that a checkpoint means the same to every optimizer.
"""

from __future__ import annotations

import torch
from torch import Tensor


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master of a bf16 `weight` and its int16 `remainder`; same shape."""
    return ((weight.view(torch.int16).to(torch.int32) << 16) + remainder.to(torch.int32)).view(torch.float32)


def divide(master: Tensor) -> tuple[Tensor, Tensor]:
    """The (bf16 weight, int16 remainder) of an fp32 `master`: what `join` takes; the weight is the nearest bf16."""
    bits = master.contiguous().view(torch.int32)
    remainder = bits.to(torch.int16)
    return ((bits - remainder.to(torch.int32)) >> 16).to(torch.int16).view(torch.bfloat16), remainder
