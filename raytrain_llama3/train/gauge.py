"""What a rank's GPU can do and what it draws: its own product rate, measured once, and its power."""

from __future__ import annotations

from typing import Any

import torch

from raytrain_llama3.config.plan import RunPlan

_PRODUCTS = 20
_WARM_UP = 3


class Gauge:
    """Of one device; on a CPU it says 0 of everything."""

    def __init__(self, plan: RunPlan, device: torch.device) -> None:
        self._device = device
        self.product_flops = product_rate(plan, device) if device.type == "cuda" else 0.0
        """FLOP/s of the model's widest product, in the precision of its layers."""
        self._has_power = device.type == "cuda" and self._draws()

    def power_w(self) -> float:
        """Watts now, as NVML tells; 0 where it does not."""
        return torch.cuda.power_draw(self._device) / 1000 if self._has_power else 0.0

    def _draws(self) -> bool:
        """Whether NVML answers: its Python module is not everywhere, and not every driver lets it."""
        try:
            torch.cuda.power_draw(self._device)
        except (ModuleNotFoundError, RuntimeError):
            return False
        return True


def product_rate(plan: RunPlan, device: torch.device) -> float:
    """FLOP/s of `[tokens, hidden] · [hidden, 2 · ffn]` as this rank has it, over 20 products (some 50 ms for 8B)."""
    c, layout = plan.config, plan.layout
    tokens = layout.micro_batch_size * c.seq_length // layout.cp
    inner, width = c.hidden_size, 2 * c.ffn_hidden_size // layout.tp
    product = _product(c.dtype, tokens, inner, width, device)
    for _ in range(_WARM_UP):
        product()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    began.record()
    for _ in range(_PRODUCTS):
        product()
    ended.record()
    torch.cuda.synchronize(device)
    return 2.0 * tokens * inner * width * _PRODUCTS / (float(began.elapsed_time(ended)) / 1000)


def _product(dtype: str, tokens: int, inner: int, width: int, device: torch.device) -> Any:
    half = {"fp32": torch.float32, "fp16": torch.float16}.get(dtype, torch.bfloat16)
    left = torch.randn(tokens, inner, device=device, dtype=half)
    right = torch.randn(width, inner, device=device, dtype=half)
    if dtype != "fp8":
        return lambda: torch.mm(left, right.t())
    one = torch.ones((), device=device)
    left8, right8 = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()
    return lambda: torch._scaled_mm(left8, right8, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
