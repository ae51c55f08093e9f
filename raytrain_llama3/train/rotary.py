"""Rotary positions on queries, keys and values at once, in the time that reading and writing them takes.

Transformer Engine's kernels for this take 0.15 ms each for 8192 tokens of Llama3-8B on an H200, three times as long.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd import Function

from raytrain_llama3.train import triton_kernels as kernels

_WARPS = 4


def rotate(mixed: Tensor, query_angles: Tensor, key_angles: Tensor, parts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, each `[seq, batch, heads, head width]`, the first two turned by their positions.

    `mixed`: `[seq, batch, groups, width]`, in each group its queries, its key and its value, of `parts` widths. The
    angles: `[seq, 1, 1, turned width]`, fp32, both halves alike. What is not Llama's shape goes to Transformer Engine.
    """
    width = parts[1]
    if query_angles is key_angles and query_angles.shape[-1] == width == parts[2] and not width & (width - 1):
        turned: Any = _Rotate.apply(mixed, query_angles)  # type: ignore[no-untyped-call]
    else:
        from transformer_engine.pytorch.attention.rope import apply_fused_qkv_rotary_pos_emb

        turned = apply_fused_qkv_rotary_pos_emb(mixed, query_angles, key_angles, parts)
    queries, keys, values = turned
    return queries, keys, values


class _Rotate(Function):
    @staticmethod
    def forward(ctx: Any, mixed: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mixed, angles = mixed.contiguous(), angles.float().contiguous()
        seq, batch, groups, _ = mixed.shape
        ctx.save_for_backward(angles)
        ctx.shape = mixed.shape
        per_group, width = _heads(mixed.shape, angles)
        queries, keys, values = (
            mixed.new_empty((seq, batch, heads, width)) for heads in (groups * (per_group - 2), groups, groups)
        )
        _launch(kernels.rotate_forward, mixed.shape, angles, (mixed, angles, queries, keys, values))
        return queries, keys, values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (angles,) = ctx.saved_tensors
        queries, keys, values = (grad.contiguous() for grad in grads)
        mixed = queries.new_empty(ctx.shape)
        _launch(kernels.rotate_backward, ctx.shape, angles, (queries, keys, values, angles, mixed))
        return mixed, None


def _heads(shape: torch.Size, angles: Tensor) -> tuple[int, int]:
    """Of one group, and their width."""
    width = angles.shape[-1]
    return shape[-1] // width, width


def _launch(kernel: Any, shape: torch.Size, angles: Tensor, tensors: tuple[Tensor, ...]) -> None:
    seq, batch, groups, _ = shape
    per_group, width = _heads(shape, angles)
    rows = triton.next_power_of_2(groups * per_group)
    kernel[(seq * batch,)](
        *tensors, batch, GROUPS=groups, PER_GROUP=per_group, HALF=width // 2, ROWS=rows, num_warps=_WARPS
    )
