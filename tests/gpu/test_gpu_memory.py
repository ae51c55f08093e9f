"""What `config.estimate` says beforehand against what a GPU then held."""

from __future__ import annotations

from typing import Any

import pytest
from runs import train

BASE: dict[str, object] = {
    "num-layers": 4,
    "seq-length": 8192,
    "global-batch-size": 2,
    "train-iters": 3,
    "eval-interval": 0,
    "save-interval": 0,
    "save-at-end": 0,
    "lr-warmup-samples": 0,
}
CONFIGURATIONS: dict[str, dict[str, object]] = {
    "8B, bf16": {"num-layers": 32},
    "8B, fp8": {"num-layers": 32, "dtype": "fp8", "fp8-attention": 1},
    "8B, all computed again": {"num-layers": 32, "recompute-modules": "layer"},
    "16 layers, fp32 moments": {"num-layers": 16, "optimizer-moments-dtype": "fp32"},
    "MLPs computed again": {"num-layers": 12, "recompute-modules": "mlp"},
    "fp32 gradients": {"num-layers": 8, "grad-reduce-in-bf16": 0},
    "micro-batch 4, sequence 4096": {
        "num-layers": 8,
        "micro-batch-size": 4,
        "global-batch-size": 8,
        "seq-length": 4096,
    },
    "fp8, tensorwise": {"num-layers": 8, "dtype": "fp8", "fp8-recipe": "tensorwise"},
    "fp8, bf16 attention": {"num-layers": 8, "dtype": "fp8"},
    "fp16": {"num-layers": 8, "dtype": "fp16"},
    "no distributed optimizer": {"num-layers": 8, "use-distributed-optimizer": 0},
    "a wide vocabulary": {"num-layers": 2, "vocab-size": 256_000, "hidden-size": 2048, "kv-channels": 64},
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    results = train(tmp_path_factory.mktemp("memory"), [BASE | flags for flags in CONFIGURATIONS.values()])
    return dict(zip(CONFIGURATIONS, results, strict=True))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_estimate_is_within_5_percent(measured: dict[str, dict[str, Any]], name: str) -> None:
    found = measured[name]
    assert "error" not in found, found["error"]
    assert found["estimate"]["total"] == pytest.approx(found["peak_bytes"], rel=0.05)
