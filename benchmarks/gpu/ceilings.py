"""What one micro-batch cannot go below on this GPU: its own matrix products and its attention, each timed alone.

`python ceilings.py --precision bf16 --layers 32` prints one JSON line, milliseconds. Products are cuBLAS's through
torch, fp8 ones with fast accumulation in both passes (the output layer stays bf16, as in training); attention is
cuDNN's, in bf16. Norms, SwiGLU, rotary positions, casts and gradient accumulation are left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import shape
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

_REPEATS = 20


def milliseconds(work: Callable[[], Any]) -> float:
    """Of one call, over `_REPEATS` in a row."""
    for _ in range(3):
        work()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(_REPEATS):
        work()
    ended.record()
    torch.cuda.synchronize()
    return float(began.elapsed_time(ended)) / _REPEATS


def product(rows: int, inner: int, columns: int, *, fp8: bool) -> float:
    """`[rows, inner] · [inner, columns]`."""
    left = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(columns, inner, device="cuda", dtype=torch.bfloat16)
    if not fp8:
        return milliseconds(lambda: torch.mm(left, right.t()))
    one, left8, right8 = torch.ones((), device="cuda"), left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()
    return milliseconds(
        lambda: torch._scaled_mm(left8, right8, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    )


def products(tokens: int, inner: int, outer: int, *, fp8: bool) -> float:
    """Forward, gradient of the input, gradient of the weight."""
    return (
        product(tokens, inner, outer, fp8=fp8)
        + product(tokens, outer, inner, fp8=fp8)
        + product(outer, tokens, inner, fp8=fp8)
    )


def attention(tokens: int) -> tuple[float, float]:
    """Forward, and backward, of causal attention of one layer."""

    def part(heads: int) -> torch.Tensor:
        return torch.randn(1, heads, tokens, shape.HEAD, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    q, k, v = part(shape.HEADS), part(shape.GROUPS), part(shape.GROUPS)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):

        def forward() -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        out = forward()
        grad = torch.randn_like(out)
        once = milliseconds(forward)
        both = milliseconds(lambda: torch.autograd.grad(forward(), (q, k, v), grad))
    return once, both - once


def copy_rate() -> float:
    """Bytes a second that a large copy reads and writes."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (milliseconds(lambda: target.copy_(source)) / 1000)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", choices=("bf16", "fp8"), required=True)
    parser.add_argument("--layers", type=int, default=32)
    given = parser.parse_args()
    fp8 = given.precision == "fp8"
    of_layer = sum(products(shape.SEQ, inner, outer, fp8=fp8) for inner, outer in shape.LAYER)
    output = products(shape.SEQ, shape.HIDDEN, shape.VOCAB, fp8=False)
    forward, backward = attention(shape.SEQ)
    found = {
        "layer_products_ms": of_layer * given.layers,
        "output_products_ms": output,
        "attention_forward_ms": forward * given.layers,
        "attention_backward_ms": backward * given.layers,
    }
    print(json.dumps(found | {"floor_ms": sum(found.values()), "copy_bytes_per_s": copy_rate()}))


if __name__ == "__main__":
    main()
