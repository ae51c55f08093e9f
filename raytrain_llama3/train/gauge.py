"""What a rank's GPU can do and what it draws: its own product rate, measured once, and its power."""

from __future__ import annotations

from collections.abc import Callable

import torch

from raytrain_llama3.config.plan import RunPlan
from raytrain_llama3.train.process import Process

_REPEATS = 20
_WARM_UP = 3
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


class Gauge:
    """Of rank 0's device, which speaks for all; on other ranks and on a CPU it says 0 of everything."""

    def __init__(self, plan: RunPlan, process: Process) -> None:
        self._device = process.device
        is_asked = plan.device == "cuda" and process.rank == 0
        self.product_flops = product_rate(plan, self._device) if is_asked else 0.0
        """FLOP/s of the model's widest product, in the precision of its layers."""
        self._has_power = is_asked and self._draws()

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
    tokens, width = layout.micro_batch_size * c.seq_length // layout.cp, 2 * c.ffn_hidden_size // layout.tp
    return 2.0 * tokens * c.hidden_size * width / seconds_of(product(c.dtype, tokens, c.hidden_size, width, device))


def seconds_of(work: Callable[[], object]) -> float:
    """Of one call on the present GPU, over 20 in a row after 3 to warm up."""
    for _ in range(_WARM_UP):
        work()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    began.record()
    for _ in range(_REPEATS):
        work()
    ended.record()
    torch.cuda.synchronize()
    return float(began.elapsed_time(ended)) / 1000 / _REPEATS


def product(dtype: str, rows: int, inner: int, columns: int, device: torch.device) -> Callable[[], object]:
    """`[rows, inner] · [inner, columns]` by torch's own call; fp8 is e4m3 with one scale and fast accumulation."""
    half = _DTYPES.get(dtype, torch.bfloat16)
    left = torch.randn(rows, inner, device=device, dtype=half)
    right = torch.randn(columns, inner, device=device, dtype=half)
    if dtype != "fp8":
        return lambda: torch.mm(left, right.t())
    one = torch.ones((), device=device)
    left8, right8 = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()
    return lambda: torch._scaled_mm(left8, right8, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
