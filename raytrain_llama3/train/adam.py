"""Adam's step and the gradients' norm on a GPU, at the rate at which it copies.

Transformer Engine's kernel for weights whose masters are kept as remainders takes 2.2 times as long on an H200, its
norm 1.8 times, and Megatron-core divides by the number of tokens and clips in passes of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import triton.language as tl
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from raytrain_llama3.checkpoint.shards import parts_of
from raytrain_llama3.train import triton_kernels as kernels

_CHUNK = 32_768
_LAUNCH: Any = {"CHUNK": _CHUNK, "BLOCK": 1024, "num_warps": 4}
"""The fastest of 33 on an H200, by up to a fifth."""
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class RemainderAdam:
    """What Transformer Engine's `multi_tensor_adam_param_remainder` does, with gradients times `scale` and `clip`."""

    def __init__(self) -> None:
        self.scale = 1.0
        """What makes this step's gradients, which are sums, the mean over tokens."""
        self.clip = 1.0
        """What this step's norm asks for."""

    def scale_gradients(self, scale: Tensor | float) -> None:
        """Megatron-core's, later: as they are read. Until then they and their norm are `1 / scale` times too large."""
        self.scale = float(scale)

    def __call__(
        self,
        chunk_size: int,
        noop: Tensor,
        tensors: Sequence[Sequence[Tensor]],
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        step: int,
        decouples_decay: int,
        corrects_bias: int,
        decay: float,
    ) -> None:
        """Write weights, moments and remainders, `tensors` being gradients, weights, means, squares and remainders.

        Weights are bf16, remainders int16: the lower half of the fp32 master's bits. Each list is one tensor a weight.
        """
        del chunk_size, noop
        if not decouples_decay:
            raise NotImplementedError("weight decay that is part of the gradient: this is AdamW alone")
        grads, _, means, _, _ = tensors
        corrections = (1 - beta1**step, 1 - beta2**step) if corrects_bias else (1.0, 1.0)
        table = _Chunks(grads)
        kernels.adam[(table.count,)](
            *table.given, *map(table.addresses, tensors), self.scale * self.clip, lr, beta1, beta2, eps, decay,
            *corrections, GRAD=_TYPES[grads[0].dtype], MOMENT=_TYPES[means[0].dtype],
            ALIGNED=all(map(_aligned, tensors)), **_LAUNCH,
        )  # fmt: skip


def take_over(optimizer: MegatronOptimizer, chunks: Iterable[DistributedDataParallel]) -> None:
    """Give `optimizer`, which keeps remainders, this step, and leave to it the scale of `chunks`' gradients."""
    step: Any = RemainderAdam()
    for part in parts_of(optimizer):
        if getattr(part, "optimizer", None) is not None:
            part.optimizer.multi_tensor_adam_param_remainder = step
    for chunk in chunks:
        chunk.scale_gradients = step.scale_gradients


def l2_norm(chunk_size: int, noop: Tensor, tensors: Sequence[Sequence[Tensor]], by_tensor: bool) -> tuple[Tensor, None]:
    """What Transformer Engine's `multi_tensor_l2norm` returns: the norm of all numbers of `tensors[0]`, fp32, `[1]`."""
    del chunk_size, noop
    if by_tensor:
        raise NotImplementedError("a norm of each tensor")
    squares = [_sums_of_squares(alike) for alike in _by_type(tensors[0])]
    return torch.cat(squares).sum(dtype=torch.float32).sqrt()[None], None


def _by_type(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    for dtype in {tensor.dtype: None for tensor in tensors}:
        yield [tensor for tensor in tensors if tensor.dtype is dtype]


def _sums_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Of each chunk."""
    table = _Chunks(tensors)
    sums = torch.empty(table.count, dtype=torch.float32, device=tensors[0].device)
    kernels.sum_of_squares[(table.count,)](
        *table.given, table.addresses(tensors), sums,
        DTYPE=_TYPES[tensors[0].dtype], ALIGNED=_aligned(tensors), **_LAUNCH,
    )  # fmt: skip
    return sums


def _aligned(tensors: Sequence[Tensor]) -> bool:
    """Whether each can be read 16 bytes at a time: a rank's share of the weights may begin anywhere."""
    return all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


class _Chunks:
    """Many tensors as one launch: a program for each chunk, which looks up whose it is."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._device = tensors[0].device
        sizes = np.array([tensor.numel() for tensor in tensors], dtype=np.int64)
        chunks = -(-sizes // _CHUNK)
        self.count = int(chunks.sum())
        owners = np.repeat(np.arange(len(sizes), dtype=np.int32), chunks)
        firsts = (np.cumsum(chunks) - chunks).astype(np.int32)
        self.given = tuple(self._there(part) for part in (owners, firsts, sizes))
        """Each chunk's tensor, each tensor's first chunk, each tensor's size."""

    def addresses(self, tensors: Sequence[Tensor]) -> Tensor:
        """Of each tensor's first number."""
        return self._there(np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64))

    def _there(self, numbers: Any) -> Tensor:
        return torch.from_numpy(numbers).to(self._device, non_blocking=True)
