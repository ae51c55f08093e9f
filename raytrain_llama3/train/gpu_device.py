"""One GPU of this process, with what Megatron-core looks for in APEX, and faster kernels in the place of some.

Tested with megatron-core 0.19.2, Transformer Engine 2.20.2 and torch 2.11.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
from megatron.core.models.common.language_module import language_module
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import attention
from torch import Tensor

from raytrain_llama3.train.adam import l2_norm
from raytrain_llama3.train.kernels import WeightGradients, cross_entropy
from raytrain_llama3.train.rotary import rotate


@contextlib.contextmanager
def gpu_device(index: int) -> Iterator[torch.device]:
    """Use GPU `index` until the context ends."""
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    with contextlib.ExitStack() as stack:
        # The output layer is Megatron-core's own; Transformer Engine's layers bring their product.
        stack.enter_context(mock.patch.object(layers, "fused_weight_gradient_mlp_cuda", WeightGradients, create=True))
        stack.enter_context(mock.patch.object(layers, "_grad_accum_fusion_available", True))
        stack.enter_context(mock.patch.object(_ParamAndGradBuffer, "scale_gradients", _scale_gradients))
        stack.enter_context(mock.patch.object(language_module, "te_parallel_cross_entropy", cross_entropy))
        stack.enter_context(mock.patch.object(attention, "apply_fused_qkv_rotary_pos_emb", rotate))
        stack.enter_context(mock.patch.object(clip_grads, "l2_norm_impl", l2_norm))
        yield device


def _scale_gradients(buffer: Any, factor: Tensor | float) -> None:
    """Megatron-core's, by a number of the host's.

    By one that is on the GPU in fp32, bf16 gradients take a kernel four times as slow, which rounds it to bf16 first.
    """
    number = float(factor)
    for grads in (buffer.grad_data, *buffer.extra_main_grads):
        grads.mul_(number)
