"""Master weights as checkpoints hold them."""

from __future__ import annotations

import torch

from raytrain_llama3.checkpoint.masters import divide, join


def masters() -> torch.Tensor:
    torch.manual_seed(3)
    random = torch.randn(100_000) * torch.logspace(-30, 30, 100_000)
    # Remainders of 0, the largest and the smallest, and signs either way.
    edges = torch.tensor([0x3F800000, 0x3F807FFF, 0x3F808000, 0x3F80FFFF, -0x407F8000, 0], dtype=torch.int32)
    return torch.cat([random, edges.view(torch.float32)])


def test_a_master_survives_its_division_bit_for_bit() -> None:
    whole = masters()
    assert torch.equal(join(*divide(whole)).view(torch.int32), whole.view(torch.int32))


def test_the_weight_is_the_nearest_bf16() -> None:
    whole = masters()
    weight, remainder = divide(whole)
    assert weight.dtype == torch.bfloat16
    assert remainder.dtype == torch.int16
    nearest = (whole.to(torch.bfloat16).float() - whole).abs()
    assert torch.equal((weight.float() - whole).abs(), nearest)
