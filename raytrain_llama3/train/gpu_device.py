"""One GPU of this process, with what Megatron-core looks for in APEX.

Tested with megatron-core 0.19.2, Transformer Engine 2.20.2 and torch 2.11.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from megatron.core.tensor_parallel import layers

from raytrain_llama3.train.kernels import WeightGradients


@contextlib.contextmanager
def gpu_device(index: int) -> Iterator[torch.device]:
    """Use GPU `index` until the context ends."""
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    with contextlib.ExitStack() as stack:
        # The output layer is Megatron-core's own; Transformer Engine's layers bring their product.
        stack.enter_context(mock.patch.object(layers, "fused_weight_gradient_mlp_cuda", WeightGradients, create=True))
        stack.enter_context(mock.patch.object(layers, "_grad_accum_fusion_available", True))
        yield device
