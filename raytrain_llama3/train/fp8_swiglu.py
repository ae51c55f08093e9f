"""SwiGLU for fp8: its result is scaled, cast, transposed and measured as it is made, and so is its gradient.

Transformer Engine's Linear layers cast what they are given in a pass of their own: with 8192 tokens of Llama3-8B that
takes 0.38 of a layer's 14 ms. Both forms are needed on Hopper, whose fp8 products take rows alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor, nn
from torch.autograd import Function
from transformer_engine.pytorch.constants import DType, FP8BwdTensorIdx, FP8FwdTensorIdx
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer, Float8Tensor
from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

from raytrain_llama3.train import fp8_swiglu_kernels as kernels

_ROWS, _COLUMNS, _WARPS = 128, 64, 8
_DTYPES = {DType.kFloat8E4M3: torch.float8_e4m3fn, DType.kFloat8E5M2: torch.float8_e5m2}


class Neighbours:
    """The Linear layers before and after a SwiGLU, with whose scales it casts."""

    def __init__(self, before: nn.Module, after: nn.Module) -> None:
        self._before: Any = before
        self._after: Any = after
        after.register_forward_hook(_forget_rows)

    def quantizers(self) -> tuple[Float8Quantizer, Float8Quantizer] | None:
        """Of the result and of its gradient, where this pass trains in fp8 with delayed scales.

        The layers have none before their first pass.
        """
        if not (FP8GlobalStateManager.is_fp8_enabled() and torch.is_grad_enabled()):
            return None
        if is_non_tn_fp8_gemm_supported() or not FP8GlobalStateManager.get_fp8_recipe().delayed():
            return None
        forward, backward = self._after.quantizers["scaling_fwd"], self._before.quantizers["scaling_bwd"]
        if not (forward and backward):
            return None
        return forward[FP8FwdTensorIdx.GEMM1_INPUT], backward[FP8BwdTensorIdx.GRAD_OUTPUT1]


def swiglu(gate_and_up: Tensor, result: Float8Quantizer, gradient: Float8Quantizer) -> Tensor:
    """silu(gate) · up of `[..., 2 · ffn]`, the gates first, as an fp8 tensor `[..., ffn]`."""
    out: Tensor = _SwiGLU.apply(gate_and_up, result, gradient)  # type: ignore[no-untyped-call]
    return out


def _forget_rows(_module: nn.Module, given: tuple[Any, ...], _result: Any) -> None:
    """Of its input a Linear layer needs the transposed form alone once it has gone forward."""
    if isinstance(given[0], Float8Tensor):
        given[0].update_usage(rowwise_usage=False, columnwise_usage=True)


class _Gradient(Float8Tensor):  # type: ignore[misc]
    """One that stays transposed when its leading dimensions become one.

    Transformer Engine 2.20 reshapes a gradient before it looks at what it is, and loses or garbles that form.
    """

    def reshape(self, *shape: Any) -> Float8Tensor:
        """To `[tokens, width]`: nothing else is asked of it."""
        width = self.shape[-1]
        if tuple(*shape) != (-1, width):
            raise ValueError(f"an fp8 gradient becomes rows of {width}, not {shape}")
        rows, columns = self._data.view(-1, width), self._transpose.view(width, -1)
        return _tensor(Float8Tensor, rows, columns, self._scale_inv, self.dtype, self._quantizer)


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor, result: Float8Quantizer, gradient: Float8Quantizer) -> Tensor:
        ctx.save_for_backward(gate_and_up)
        ctx.gradient = gradient
        out: Tensor = _launched(kernels.forward, (gate_and_up,), gate_and_up.shape[-1] // 2, result, Float8Tensor)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gate_and_up,) = ctx.saved_tensors
        given = (gate_and_up, grads[0].contiguous())
        return _launched(kernels.backward, given, gate_and_up.shape[-1], ctx.gradient, _Gradient), None, None


def _launched(
    kernel: Any, given: tuple[Tensor, ...], width: int, quantizer: Float8Quantizer, kind: type[Float8Tensor]
) -> Float8Tensor:
    """What `kernel` makes of `given`: `[..., width]`, and the same transposed."""
    gate_and_up = given[0]
    *leading, both = gate_and_up.shape
    tokens, ffn, dtype = gate_and_up.numel() // both, both // 2, _DTYPES[quantizer.dtype]
    rows = torch.empty((*leading, width), dtype=dtype, device=gate_and_up.device)
    columns = torch.empty((width, *leading), dtype=dtype, device=gate_and_up.device)
    inverse = torch.empty(1, dtype=torch.float32, device=gate_and_up.device)
    kernel[triton.cdiv(tokens, _ROWS), triton.cdiv(ffn, _COLUMNS)](
        *given, rows, columns, quantizer.scale, inverse, quantizer.amax, tokens, ffn,
        LARGEST=torch.finfo(dtype).max, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=_WARPS,
    )  # fmt: skip
    return _tensor(kind, rows.view(torch.uint8), columns.view(torch.uint8), inverse, gate_and_up.dtype, quantizer)


def _tensor(
    kind: type[Float8Tensor], rows: Tensor, columns: Tensor, inverse: Tensor, dtype: torch.dtype, quantizer: Any
) -> Float8Tensor:
    return kind(
        shape=rows.shape, dtype=dtype, data=rows, data_transpose=columns, fp8_scale_inv=inverse,
        fp8_dtype=quantizer.dtype, quantizer=quantizer, device=rows.device,
    )  # fmt: skip
