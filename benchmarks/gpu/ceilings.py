"""What one micro-batch cannot go below on this GPU: its own matrix products and its attention, each timed alone.

`python ceilings.py --precision bf16 --layers 32` prints one JSON line, milliseconds. Products are cuBLAS's through
torch, fp8 ones with fast accumulation in both passes (the output layer stays bf16, as in training); attention is
cuDNN's, in bf16. Norms, SwiGLU, rotary positions, casts and gradient accumulation are left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import shape
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from raytrain_llama3.train.gauge import product, seconds_of

_GPU = torch.device("cuda")


def milliseconds(work: Callable[[], object]) -> float:
    """Of one call."""
    return 1000 * seconds_of(work)


def products(tokens: int, inner: int, outer: int, *, fp8: bool) -> float:
    """Forward, gradient of the input, gradient of the weight."""
    shapes = ((tokens, inner, outer), (tokens, outer, inner), (outer, tokens, inner))
    return sum(milliseconds(product("fp8" if fp8 else "bf16", *each, _GPU)) for each in shapes)


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
