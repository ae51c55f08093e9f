"""Llama3 in plain PyTorch, on one page: what Megatron-core's model is held against."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    layers: int
    heads: int
    groups: int
    head_dim: int
    rotary_base: float = 500_000.0
    epsilon: float = 1e-5


def loss(weights: Weights, shape: Shape, windows: Tensor) -> Tensor:
    """Mean next-token loss in nats; `windows`: [batch, seq + 1] token ids."""
    tokens, labels = windows[:, :-1], windows[:, 1:]
    return F.cross_entropy(logits(weights, shape, tokens).flatten(0, 1), labels.flatten())


def logits(w: Weights, shape: Shape, tokens: Tensor) -> Tensor:
    """[batch, seq] ids to [batch, seq, vocabulary]."""
    x = w["embedding.word_embeddings.weight"][tokens]
    for i in range(shape.layers):
        layer = f"decoder.layers.{i}."
        x = x + attention(w, layer, shape, norm(x, w[layer + "input_layernorm.weight"], shape))
        gate, up = F.linear(
            norm(x, w[layer + "pre_mlp_layernorm.weight"], shape), w[layer + "mlp.linear_fc1.weight"]
        ).chunk(2, dim=-1)
        x = x + F.linear(F.silu(gate) * up, w[layer + "mlp.linear_fc2.weight"])
    return F.linear(norm(x, w["decoder.final_layernorm.weight"], shape), w["output_layer.weight"])


def norm(x: Tensor, weight: Tensor, shape: Shape) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + shape.epsilon) * weight


def attention(w: Weights, layer: str, shape: Shape, x: Tensor) -> Tensor:
    batch, seq, _ = x.shape
    queries_a_group, d = shape.heads // shape.groups, shape.head_dim
    qkv = F.linear(x, w[layer + "self_attention.linear_qkv.weight"])
    # Rows are stored group by group: its queries, then its key, then its value.
    qkv = qkv.view(batch, seq, shape.groups, queries_a_group + 2, d)
    q, k, v = qkv.split([queries_a_group, 1, 1], dim=3)
    q = rotate(q.reshape(batch, seq, shape.heads, d), shape.rotary_base).transpose(1, 2)
    k = rotate(k.reshape(batch, seq, shape.groups, d), shape.rotary_base).transpose(1, 2)
    v = v.reshape(batch, seq, shape.groups, d).transpose(1, 2)
    k, v = (t.repeat_interleave(queries_a_group, dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / d**0.5
    future = torch.ones(seq, seq, dtype=torch.bool).triu(1)
    out = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
    return F.linear(out.transpose(1, 2).reshape(batch, seq, -1), w[layer + "self_attention.linear_proj.weight"])


def rotate(x: Tensor, base: float) -> Tensor:
    """Rotary positions over halves; `x`: [batch, seq, heads, head_dim]. Su et al. 2021, arXiv:2104.09864."""
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(0, half, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[1], dtype=torch.float32)[:, None] * frequency
    cos, sin = angle.cos()[None, :, None], angle.sin()[None, :, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
