"""The other peer: the same layers in plain PyTorch, compiled, with its fastest attention; forward and backward alone.

`python torch_llama.py --layers 32 --micro-batches 8` prints one JSON line: seconds of each round of micro-batches.
"""

from __future__ import annotations

import argparse
import json
import time

import shape
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


class Layer(nn.Module):
    """Attention and SwiGLU, each behind a norm and beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        names = ("qkv", "proj", "gate_and_up", "down")
        for name, (inner, outer) in zip(names, shape.LAYER, strict=True):
            self.add_module(name, nn.Linear(inner, outer, bias=False))
        self.before, self.after = (nn.RMSNorm(shape.HIDDEN, eps=1e-5) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x`: [1, seq, hidden]."""
        queries, keys = shape.HEADS * shape.HEAD, shape.GROUPS * shape.HEAD
        parts = self.qkv(self.before(x)).split([queries, keys, keys], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, shape.HEAD)).transpose(1, 2) for part in parts)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.proj(out.transpose(1, 2).flatten(2))
        gate, up = self.gate_and_up(self.after(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions over halves; `x`: [1, heads, seq, head]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Llama(nn.Module):
    """Embedding, layers, norm, output layer, loss."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.VOCAB, shape.HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.RMSNorm(shape.HIDDEN, eps=1e-5)
        self.head = nn.Linear(shape.HIDDEN, shape.VOCAB, bias=False)

    def forward(self, window: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`window`: [1, seq + 1] ids; the mean loss."""
        x = self.embedding(window[:, :-1])
        for layer in self.layers:
            x = layer(x, cos, sin)
        return loss(self.head(self.norm(x)), window[:, 1:])


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the tokens, in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--micro-batches", type=int, default=8)
    given = parser.parse_args()
    torch.set_default_device("cuda")
    torch.set_default_dtype(torch.bfloat16)
    model = Llama(given.layers)
    for layer in model.layers:
        layer.compile()
    global loss
    loss = torch.compile(loss)
    half = shape.HEAD // 2
    angles = torch.arange(shape.SEQ).float()[:, None] * 500_000 ** (-torch.arange(half).float() / half)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    rounds = []
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        for micro_batches in (1, *[given.micro_batches] * 2):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(micro_batches):
                model(torch.randint(0, shape.VOCAB, (1, shape.SEQ + 1)), cos, sin).backward()
            torch.cuda.synchronize()
            rounds.append(time.perf_counter() - began)
    print(json.dumps({"passes_s": rounds[1:], "peak_gib": torch.cuda.max_memory_allocated() / 2**30}))


if __name__ == "__main__":
    main()
