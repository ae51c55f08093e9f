"""What is put in the place of Megatron-core's own on a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch


# A number in bf16 is at most 2^-8 off; the factor in bf16 would add a third of that.
@pytest.mark.parametrize(("dtype", "off"), [(torch.bfloat16, 2**-8), (torch.float32, 2**-23)])
def test_gradients_are_scaled_by_a_factor_that_is_not_rounded_first(dtype: torch.dtype, off: float) -> None:
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer

    from raytrain_llama3.train.gpu_device import gpu_device

    with gpu_device(0) as device:
        grads = torch.randn(1 << 16, device=device).to(dtype)
        extra = torch.randn(64, device=device)
        expected = [numbers.double() / 30_000 for numbers in (grads, extra)]
        factor = 1.0 / torch.tensor(30_000, device=device)
        _ParamAndGradBuffer.scale_gradients(SimpleNamespace(grad_data=grads, extra_main_grads=[extra]), factor)
    for numbers, wanted in zip((grads, extra), expected, strict=True):
        limit = off if numbers.dtype == dtype else 2**-23
        torch.testing.assert_close(numbers.double(), wanted, rtol=1.01 * limit, atol=0)
