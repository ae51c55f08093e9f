"""Whether a rank's part fits its device, what is chosen so that it does, and the nearest that fits if it does not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from raytrain_llama3.config import estimate
from raytrain_llama3.config.estimate import GIB
from raytrain_llama3.config.layout_rules import layout_of, layout_problems, world_problems
from raytrain_llama3.config.plan import DeviceSupply, Layout, RunPlan
from raytrain_llama3.config.schema import Config, flag_of

Moments = Literal["fp32", "bf16"]

_TIGHT = 0.96
"""The estimate is right to a few hundredths."""
_MORE = (2, 4, 8, 16, 32, 64)
_RESERVE = 1.5 * GIB
"""Taken of a GPU before the first tensor: CUDA's context, NCCL, what the allocator cannot use."""


def moments_dtype(config: Config, layout: Layout, supply: DeviceSupply) -> Moments:
    """What `optimizer_moments_dtype` comes to: fp32, unless only bf16 fits."""
    asked = config.optimizer_moments_dtype
    if asked != "auto":
        return asked
    if not _has_a_choice_of_moments(config, supply) or _fits(config, layout, supply, "fp32", _TIGHT):
        return "fp32"
    return "bf16"


def memory_problems(
    config: Config, layout: Layout, supply: DeviceSupply, moments: Moments | None = None
) -> Iterator[str]:
    """A line when a device has too little memory for its part, where it is known how much there is.

    `moments` are those of a run that is under way, which keeps them.
    """
    moments = moments or moments_dtype(config, layout, supply)
    if supply.memory_bytes is None or _fits(config, layout, supply, moments):
        return
    need = estimate.memory(config, layout, supply.device, moments)
    parts = ", ".join(f"{name} {getattr(need, name) / GIB:.1f}" for name in estimate.PARTS if getattr(need, name))
    billions = estimate.parameters(config) / 1e9
    where = "a process on this CPU" if supply.device == "cpu" else supply.device_name
    yield (
        f"a model of {billions:.2f} billion parameters needs about {need.total / GIB:.0f} GiB a device "
        f"({parts}); {where} has {supply.memory_bytes / GIB:.0f} GiB: {_remedy(config, layout, supply)}"
    )


def tight_memory(plan: RunPlan, supply: DeviceSupply) -> list[str]:
    """A line when the estimate says that memory may not be enough, within what the estimate can tell."""
    need = estimate.memory(plan.config, plan.layout, plan.device, plan.moments_dtype).total
    if supply.memory_bytes is None or need < _TIGHT * _usable(supply):
        return []
    return [
        f"memory is tight: about {need / GIB:.0f} of {supply.memory_bytes / GIB:.0f} GiB a device; if it runs out, "
        f"{_remedy(plan.config, plan.layout, supply)}"
    ]


def _has_a_choice_of_moments(config: Config, supply: DeviceSupply) -> bool:
    # fp8 weights are stepped by an Adam that wants fp32 moments.
    return estimate.is_precision_aware(config, supply.device) and not config.fp8_param_gather


def _usable(supply: DeviceSupply) -> float:
    return (supply.memory_bytes or 0) - (_RESERVE if supply.device == "cuda" else 0)


def _fits(config: Config, layout: Layout, supply: DeviceSupply, moments: Moments, share: float = 1.0) -> bool:
    if supply.memory_bytes is None:
        return True
    return estimate.memory(config, layout, supply.device, moments).total <= share * _usable(supply)


def _remedy(config: Config, layout: Layout, supply: DeviceSupply) -> str:
    if supply.device == "cpu":
        return "use GPUs, or see a small model train here: make demo, or --config configs/demo.toml"
    nearest = min(_changes(config, layout, supply), default=None, key=lambda change: change.cost)
    if nearest is None:
        more = (layout.world_size * factor for factor in _MORE)
        devices = next((n for n in more if _fits_on(config, n, supply)), None)
        fewer = "use a smaller model, or GPUs with more memory"
        return fewer if devices is None else f"nothing fits {layout.world_size} of them; {devices} would do"
    return f"nearest that fits: {nearest.flags} (about {nearest.total / GIB:.0f} GiB)"


@dataclass(frozen=True, slots=True)
class _Change:
    flags: str
    cost: tuple[int, ...]
    """What is dearer comes later: more pieces of the model, then computing again, then smaller moments."""
    total: float


def _changes(config: Config, layout: Layout, supply: DeviceSupply) -> Iterator[_Change]:
    """Every change of a few options with which the model fits these devices and no rule is broken."""
    again: tuple[tuple[str, ...], ...] = ((), ("mlp",), ("layer",))
    sizes = (1, *_MORE)
    micro_batches = sorted({config.micro_batch_size, 1}, reverse=True)
    # What is "auto" becomes bf16 by itself.
    other_moments = config.optimizer_moments_dtype == "fp32" and _has_a_choice_of_moments(config, supply)
    for tp, pp, micro_batch, modules in itertools.product(sizes, sizes, micro_batches, again):
        changed = {"tp_size": tp, "pp_size": pp, "micro_batch_size": micro_batch}
        if modules:
            changed["recompute_modules"] = modules  # type: ignore[assignment]
        if other_moments:
            changed["optimizer_moments_dtype"] = "bf16"  # type: ignore[assignment]
        changed = {name: value for name, value in changed.items() if getattr(config, name) != value}
        other = config.model_copy(update=changed)
        world = layout.world_size
        if tp * pp * other.cp_size > world or [*layout_problems(other), *world_problems(other, world, [world])]:
            continue
        divided = layout_of(other, world)
        total = estimate.memory(other, divided, supply.device, moments_dtype(other, divided, supply)).total
        if total <= _TIGHT * _usable(supply):
            # A run that is under way may have begun with larger moments than are chosen now.
            changed = changed or {"optimizer_moments_dtype": "bf16"}  # type: ignore[dict-item]
            flags = " ".join(f"{flag_of(name)} {_written(value)}" for name, value in changed.items())
            smaller = config.micro_batch_size - micro_batch
            yield _Change(flags, (tp * pp, again.index(modules), smaller, pp, len(changed)), total)


def _written(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _fits_on(config: Config, devices: int, supply: DeviceSupply) -> bool:
    if list(world_problems(config, devices, [devices])):
        return False
    return any(True for _ in _changes(config, layout_of(config, devices), supply))
