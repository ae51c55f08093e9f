"""What one micro-batch cannot go below on this GPU: its own matrix products and its attention, each timed alone.

`python ceilings.py --precision bf16 --layers 32` prints one JSON line, milliseconds. Products are cuBLAS's through
torch, fp8 ones with fast accumulation in both passes (the output layer stays bf16, as in training); attention is
cuDNN's, in bf16. Norms, SwiGLU, rotary positions, casts and gradient accumulation are left out.

`floor_ms` is the sum of them, each timed alone for a fraction of a second. `sustained_ms` is the same work one after
another for some seconds, as training does it: by then the chip has come to the clock that its power allows.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import shape
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from raytrain_llama3.train.gauge import product, seconds_of

_GPU = torch.device("cuda")


_WARM_S, _MEASURED_S = 6, 6

Work = Callable[[], object]


def milliseconds(work: Work) -> float:
    """Of one call."""
    return 1000 * seconds_of(work)


def products(tokens: int, inner: int, outer: int, *, fp8: bool) -> list[Work]:
    """Forward, gradient of the input, gradient of the weight."""
    shapes = ((tokens, inner, outer), (tokens, outer, inner), (outer, tokens, inner))
    return [product("fp8" if fp8 else "bf16", *each, _GPU) for each in shapes]


def attention(tokens: int) -> tuple[Work, Work]:
    """Forward, and forward and backward, of causal attention of one layer."""

    def part(heads: int) -> torch.Tensor:
        return torch.randn(1, heads, tokens, shape.HEAD, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    q, k, v = part(shape.HEADS), part(shape.GROUPS), part(shape.GROUPS)

    def forward() -> torch.Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    grad = torch.randn_like(forward())
    return forward, lambda: torch.autograd.grad(forward(), (q, k, v), grad)


def sustained(layer: list[Work], layers: int, output: list[Work]) -> float:
    """Milliseconds of one micro-batch whose kernels follow one another, after some seconds of them."""

    def run_for(seconds: float) -> float:
        torch.cuda.synchronize()
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            for work in (*layer * layers, *output):
                work()
            torch.cuda.synchronize()
            count += 1
        return 1000 * (time.perf_counter() - began) / count

    run_for(_WARM_S)
    return run_for(_MEASURED_S)


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
    layer = [work for inner, outer in shape.LAYER for work in products(shape.SEQ, inner, outer, fp8=fp8)]
    output = products(shape.SEQ, shape.HIDDEN, shape.VOCAB, fp8=False)
    forward, both = attention(shape.SEQ)
    once = milliseconds(forward)
    parts = {
        "layer_products_ms": sum(map(milliseconds, layer)) * given.layers,
        "output_products_ms": sum(map(milliseconds, output)),
        "attention_forward_ms": once * given.layers,
        "attention_backward_ms": (milliseconds(both) - once) * given.layers,
    }
    found = parts | {
        "floor_ms": sum(parts.values()),
        "sustained_ms": sustained([*layer, both], given.layers, output),
        "copy_bytes_per_s": copy_rate(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
