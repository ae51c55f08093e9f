"""The SwiGLU that casts for its neighbours gives what they would have cast themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def results() -> Iterator[list[dict[str, Any]]]:
    """Of an MLP in fp8 with the casts in the activation, and in the Linear layers: three passes each."""
    import torch

    yield [three_passes(casts) for casts in (True, False)]
    torch.cuda.empty_cache()


def three_passes(casts: bool) -> dict[str, Any]:
    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Format
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

    from raytrain_llama3.train.kernels import SwiGLU

    FP8GlobalStateManager.reset()
    generator = torch.Generator("cuda").manual_seed(1)
    before = te.LayerNormLinear(256, 2 * 704, bias=False, normalization="RMSNorm", params_dtype=torch.bfloat16)
    after, activation = te.Linear(704, 256, bias=False, params_dtype=torch.bfloat16), SwiGLU()
    with torch.no_grad():
        for weight in (before.weight, after.weight):
            weight.normal_(0, 0.05, generator=generator)
    if casts:
        activation.cast_for(before, after)
    kinds, out = [], torch.empty(0)
    x = torch.randn(96, 2, 256, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
    grad = torch.randn(96, 2, 256, device="cuda", dtype=torch.bfloat16, generator=generator)
    for _ in range(3):
        x.grad = before.weight.grad = after.weight.grad = before.layer_norm_weight.grad = None
        with te.fp8_autocast(fp8_recipe=DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=4)):
            middle = activation(before(x))
            kinds.append(isinstance(middle, Float8Tensor))
            out = after(middle)
        out.backward(grad)
    scales = [q.scale.item() for q in (after.quantizers["scaling_fwd"][0], before.quantizers["scaling_bwd"][0])]
    grads = {"x": x.grad, "fc1": before.weight.grad, "fc2": after.weight.grad, "norm": before.layer_norm_weight.grad}
    with torch.no_grad(), te.fp8_autocast(fp8_recipe=DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=4)):
        evaluated = after(activation(before(x)))
    return {"kinds": kinds, "out": out, "evaluated": evaluated, "scales": scales} | grads


def test_it_casts_from_the_second_pass_on(results: list[dict[str, Any]]) -> None:
    ours, layers = results
    assert ours["kinds"] == [False, True, True]
    assert layers["kinds"] == [False, False, False]


@pytest.mark.parametrize("name", ["out", "evaluated", "x", "fc1", "fc2", "norm"])
def test_results_are_those_of_the_layers_own_casts(results: list[dict[str, Any]], name: str) -> None:
    ours, layers = (side[name].float() for side in results)
    # One rounding instead of two: to bf16, then to fp8.
    assert (ours - layers).norm() < 0.01 * layers.norm()


def test_scales_follow_the_same_maxima(results: list[dict[str, Any]]) -> None:
    ours, layers = (side["scales"] for side in results)
    assert ours == pytest.approx(layers, rel=0.01)
