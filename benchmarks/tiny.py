"""The tiny Llama3 on a CPU that the benchmarks train: what they measure is around it."""

from __future__ import annotations

from typing import Any

MODEL: dict[str, Any] = {
    "device": "cpu",
    "dtype": "fp32",
    "num-layers": 2,
    "hidden-size": 64,
    "ffn-hidden-size": 176,
    "num-attention-heads": 4,
    "num-query-groups": 2,
    "kv-channels": 16,
    "seq-length": 32,
    "vocab-size": 256,
    "data-arg": "MOCK",
    "micro-batch-size": 2,
    "eval-interval": 0,
    "eval-iters": 1,
    "use-exp-structure": 1,
}
