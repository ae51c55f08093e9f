"""Kernels that Megatron-core does not reach for itself: SwiGLU, the loss in its logits' place, added gradients."""

from __future__ import annotations

from typing import Any

import transformer_engine_torch as te_kernels
from torch import Tensor, nn
from torch.autograd import Function
from transformer_engine.pytorch.cpp_extensions import general_gemm
from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy


class SwiGLU(nn.Module):
    """silu(gate) · up, by Transformer Engine's two kernels.

    The backward one takes 0.30 ms for `[8192, 28672]` on an H200; the one that torch.compile makes of Megatron-core's
    formula takes 0.53. Its own operator for this would add a state of its own to every checkpoint.
    """

    def __init__(self, config: object = None) -> None:
        super().__init__()

    def forward(self, gate_and_up: Tensor) -> Tensor:
        """`[..., 2 · ffn]`, the gates first, to `[..., ffn]`."""
        out: Tensor = _SwiGLU.apply(gate_and_up)  # type: ignore[no-untyped-call]
        return out


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_and_up)
        out: Tensor = te_kernels.swiglu(gate_and_up, None)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_and_up,) = ctx.saved_tensors
        out: Tensor = te_kernels.dswiglu(grads[0].contiguous(), gate_and_up, None)
        return out


def cross_entropy(logits: Tensor, labels: Tensor, tp_group: Any, is_cg_capturable: bool = False) -> Tensor:
    """Loss of each token, fp32; `logits`: `[seq, batch, vocabulary]`, in whose place their gradient is made.

    Megatron-core's call of the same kernel keeps both: 2 GiB more with 8192 tokens of Llama3.
    """
    del is_cg_capturable
    loss: Tensor = parallel_cross_entropy(logits, labels, dist_process_group=tp_group, overwrite_input=True)
    return loss


class WeightGradients:
    """What APEX calls `fused_weight_gradient_mlp_cuda`: `main_grad [out, in]` += `grad [tokens, out]`ᵀ · `inputs`.

    One product that reads and writes the buffer, instead of a product, a read of both and an addition.
    """

    @staticmethod
    def wgrad_gemm_accum_fp16(inputs: Tensor, grad: Tensor, main_grad: Tensor) -> None:
        """With a half-precision buffer; cuBLAS adds in fp32 before it rounds."""
        main_grad.addmm_(grad.t(), inputs)

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: Tensor, grad: Tensor, main_grad: Tensor) -> None:
        """With an fp32 buffer, for inputs of any type."""
        general_gemm(inputs, grad, out_dtype=main_grad.dtype, layout="NT", out=main_grad, accumulate=True, grad=True)
