"""What a precision does to gradients, against float64 on the same weights and tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import train
from test_gpu_numbers import SMALL

ONE_LAYER = SMALL | {
    "num-layers": 1,
    "seq-length": 256,
    "micro-batch-size": 4,
    "global-batch-size": 8,
    "clip-grad": 0,
    "lr-warmup-samples": 0,
}
PRECISIONS: dict[str, tuple[dict[str, object], float]] = {
    "fp32": ({"dtype": "fp32"}, 2e-3),
    "bf16": ({"dtype": "bf16"}, 0.03),
    "bf16, fp32 gradients": ({"dtype": "bf16", "grad-reduce-in-bf16": 0}, 0.03),
    "fp8 delayed": ({"dtype": "fp8"}, 0.2),
    "fp8 delayed, fp8 attention": ({"dtype": "fp8", "fp8-attention": 1}, 0.3),
    "fp8 tensorwise": ({"dtype": "fp8", "fp8-recipe": "tensorwise"}, 0.2),
    "fp8 blockwise": ({"dtype": "fp8", "fp8-recipe": "blockwise", "fp8-format": "e4m3"}, 0.2),
}


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    runs = [ONE_LAYER | flags for flags, _ in PRECISIONS.values()]
    found = train(tmp_path_factory.mktemp("gradients"), runs, Path(__file__).with_name("gradients.py"))
    return dict(zip(PRECISIONS, found, strict=True))


@pytest.mark.parametrize("name", PRECISIONS)
def test_gradients_are_those_of_float64(errors: dict[str, dict[str, float]], name: str) -> None:
    allowed = PRECISIONS[name][1]
    assert len(errors[name]) == 9
    assert {weight: error for weight, error in errors[name].items() if not error < allowed} == {}
