"""The GPU's kernels against torch's own arithmetic: what `test_kernels.py` runs with TRITON_INTERPRET=1, on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from raytrain_llama3.train import adam, rotary

SIZES = [5, adam._CHUNK * 2, adam._CHUNK + 7]
"""Less than one chunk, two of them, and one with a rest."""


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """An fp32 master as its bf16 weight, rounded, and the lower half of its bits."""
    bits = master.view(torch.int32)
    low = (bits & 0xFFFF).to(torch.int16)
    return ((bits >> 16) + (low < 0).int()).to(torch.int16).view(torch.bfloat16), low


def join(weight: Tensor, low: Tensor) -> Tensor:
    high = weight.view(torch.int16).int() - (low < 0).int()
    return ((high << 16) | (low.int() & 0xFFFF)).view(torch.float32)


@pytest.mark.parametrize("moment", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("first", [0, 1])
def test_adam_keeps_every_bit_of_the_master(moment: torch.dtype, first: int) -> None:
    """`first`: 1 for tensors that begin where 16 bytes at once cannot be read."""
    masters = [torch.randn(n + first)[first:] for n in SIZES]
    weights, rests = (list(each) for each in zip(*map(split, masters), strict=True))
    assert all(torch.equal(join(*each), master) for *each, master in zip(weights, rests, masters, strict=True))
    grads = [torch.randn(n + first).bfloat16()[first:] for n in SIZES]
    means = [(0.1 * torch.randn(n)).to(moment) for n in SIZES]
    squares = [torch.rand(n).to(moment) for n in SIZES]
    lr, beta1, beta2, eps, decay, step = 0.01, 0.9, 0.95, 1e-8, 0.1, 3
    take = adam.RemainderAdam()
    take.scale_gradients(torch.tensor(0.25))
    take.clip = 2.0
    wanted = []
    for master, grad, mean, square in zip(masters, grads, means, squares, strict=True):
        g = grad.float() * 0.5
        m, v = beta1 * mean.float() + (1 - beta1) * g, beta2 * square.float() + (1 - beta2) * g * g
        change = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps) + decay * master
        wanted.append((master - lr * change, m, v))
    take(0, torch.zeros(1), [grads, weights, means, squares, rests], lr, beta1, beta2, eps, step, 1, 1, decay)
    close = {"rtol": 1e-5, "atol": 1e-6} if moment is torch.float32 else {"rtol": 8e-3, "atol": 1e-6}
    for (master, m, v), weight, mean, square, rest in zip(wanted, weights, means, squares, rests, strict=True):
        torch.testing.assert_close(join(weight, rest), master, rtol=1e-6, atol=1e-7)
        assert (weight.float() - master).abs().max() <= master.abs().max() / 256
        torch.testing.assert_close(mean.float(), m, **close)
        torch.testing.assert_close(square.float(), v, **close)


def test_what_is_past_a_tensors_end_is_left_alone() -> None:
    whole = [torch.ones(64, dtype=dtype) for dtype in (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32)]
    rests = torch.ones(64, dtype=torch.int16)
    tensors = [*([each[:40]] for each in whole), [rests[:40]]]
    adam.RemainderAdam()(0, torch.zeros(1), tensors, 0.1, 0.9, 0.95, 1e-8, 1, 1, 1, 0.1)
    assert all(torch.equal(each[40:], torch.ones(24, dtype=each.dtype)) for each in (*whole[1:], rests))
    assert not torch.equal(whole[1][:40], torch.ones(40, dtype=torch.bfloat16))


def test_decay_that_is_part_of_the_gradient_is_refused() -> None:
    tensors = [[torch.ones(4)]] * 5
    with pytest.raises(NotImplementedError, match="AdamW"):
        adam.RemainderAdam()(0, torch.zeros(1), tensors, 0.1, 0.9, 0.95, 1e-8, 1, 0, 1, 0.1)


@pytest.mark.parametrize("first", [0, 1])
def test_the_norm_is_that_of_all_numbers_of_either_type(first: int) -> None:
    tensors = [torch.randn(n + first)[first:].to(dtype) for n in SIZES for dtype in (torch.bfloat16, torch.float32)]
    norm, by_tensor = adam.l2_norm(0, torch.zeros(1), [tensors], False)
    assert (norm.shape, norm.dtype, by_tensor) == ((1,), torch.float32, None)
    assert norm.item() == pytest.approx(torch.cat([each.double() for each in tensors]).norm().item(), rel=1e-5)


@pytest.mark.parametrize(("batch", "groups", "queries"), [(2, 3, 4), (1, 1, 1), (1, 2, 6)])
def test_positions_turn_queries_and_keys_and_leave_values(batch: int, groups: int, queries: int) -> None:
    seq, width = 7, 16
    angles = (torch.arange(seq)[:, None] * torch.rand(width // 2)).repeat(1, 2)[:, None, None]
    mixed = torch.randn(seq, batch, groups, (queries + 2) * width, requires_grad=True)
    again = mixed.detach().clone().requires_grad_()
    found = rotary.rotate(mixed, angles, angles, [queries * width, width, width])
    wanted = plain(again, angles, queries)
    for ours, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, other)
    grads = [torch.randn_like(each) for each in wanted]
    torch.autograd.backward(found, grads)
    torch.autograd.backward(wanted, grads)
    torch.testing.assert_close(mixed.grad, again.grad)


def plain(mixed: Tensor, angles: Tensor, queries: int) -> list[Tensor]:
    heads = mixed.unflatten(-1, (queries + 2, angles.shape[-1]))
    cos, sin = angles[..., None, :].cos(), angles[..., None, :].sin()

    def turned(heads: Tensor) -> Tensor:
        first, second = heads.chunk(2, -1)
        return heads * cos + torch.cat([-second, first], -1) * sin

    parts = turned(heads[..., :queries, :]), turned(heads[..., queries : queries + 1, :]), heads[..., queries + 1 :, :]
    return [part.flatten(2, 3) for part in parts]
