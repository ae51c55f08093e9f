"""Where this rank's optimizer state lies: flat runs of each weight's fp32 master and moments, without a copy.

Megatron-core's own fully reshardable form gathers all of it into host memory first: 12 bytes for each weight of the
model-parallel rank, on every data-parallel rank (96 GB at 8B) or on the first. The runs are boxes of the same global
tensors, so each rank can write and read its own, into the same form on the disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from raytrain_llama3.checkpoint.masters import divide, join

MASTER = "param"
"""Megatron's word for the fp32 master weight, in the keys of a checkpoint."""


@dataclass(frozen=True, slots=True)
class State:
    """One kind of state (`param`, `exp_avg`, `exp_avg_sq`) of a run of a weight, as flat tensors of equal length."""

    name: str
    tensor: Tensor
    weight: Tensor | None = None
    """Of a master kept as 16-bit remainders in `tensor`: the bf16 weight that they complete."""

    @property
    def dtype(self) -> torch.dtype:
        """What it is saved as."""
        return torch.float32 if self.weight is not None else self.tensor.dtype

    def read(self, start: int, end: int) -> Tensor:
        """Numbers `start` to `end` of the run; a view where that is possible."""
        piece = self.tensor[start:end]
        return piece if self.weight is None else join(self.weight[start:end], piece)

    def view(self, start: int, end: int) -> Tensor | None:
        """The numbers themselves, to read into; None where they are not kept as they are saved."""
        return self.tensor[start:end] if self.weight is None else None

    def write(self, start: int, end: int, value: Tensor) -> None:
        """Put flat fp32 masters where `view` gives nothing."""
        assert self.weight is not None
        weight, remainder = divide(value.to(self.weight.device, torch.float32))
        self.weight[start:end].copy_(weight)
        self.tensor[start:end].copy_(remainder)


@dataclass(frozen=True, slots=True)
class Run:
    """Numbers `start` to `end` of the flattened `weight` (this rank's own part of the model), and their states."""

    weight: Tensor
    start: int
    end: int
    states: tuple[State, ...]

    def with_weight(self) -> Run:
        """With the run of the weight itself, under no name."""
        own = State("", self.weight.detach().view(-1)[self.start : self.end])
        return replace(self, states=(own, *self.states))


def parts_of(optimizer: MegatronOptimizer) -> list[Any]:
    """The optimizers that Megatron-core may have chained."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def is_divided(part: Any) -> bool:
    """Whether each data-parallel rank holds another part of the state."""
    return isinstance(part, DistributedOptimizer)


def runs_of(part: Any) -> Iterator[Run]:
    """All state of one optimizer that has taken a step, or was given room by `make_room`."""
    if is_divided(part):
        for ranges in part.gbuf_ranges:
            for buckets in ranges.values():
                for bucket in buckets:
                    for weight, found in bucket["param_map"].items():
                        yield _divided_run(part, weight, found["param"])
        return
    for weight, master in _whole_masters(part):
        states = [State(MASTER, master.detach().view(-1)), *_moments(part, master)]
        yield Run(weight, 0, weight.numel(), tuple(states))


def make_room(part: Any) -> None:
    """Give an optimizer that has not stepped yet the tensors that a checkpoint is read into."""
    if is_divided(part):
        part.load_state_dict(part.state_dict())
    else:
        part.init_state_fn(part.optimizer, part.config)


def _divided_run(part: Any, weight: Tensor, found: Any) -> Run:
    group, order = part.model_param_group_index_map[weight]
    shard: Tensor = part.optimizer.param_groups[group]["params"][order]
    if part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
        master = part.optimizer.state[shard]["master_param"].view(-1)
        remainders = master.dtype == torch.int16
        own = State(MASTER, master, shard.detach().view(-1) if remainders else None)
    else:
        own = State(MASTER, shard.detach().view(-1))
    return Run(weight, found.start, found.end, (own, *_moments(part, shard)))


def _moments(part: Any, shard: Tensor) -> Iterator[State]:
    for name, tensor in part.optimizer.state[shard].items():
        if isinstance(tensor, Tensor) and name not in ("master_param", "step"):
            yield State(name, tensor.detach().view(-1))


def _whole_masters(part: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """(weight, what the optimizer updates) where every data-parallel rank holds all of them."""
    if hasattr(part, "fp32_from_float16_groups"):
        for weights, masters in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            yield from zip(weights, masters, strict=True)
        for group in part.fp32_from_fp32_groups:
            yield from ((weight, weight) for weight in group)
        return
    yield from ((weight, weight) for weight in part.get_parameters())


def boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Numbers `start` to `end` of a row-major tensor as (offsets, sizes) of boxes, in order: three at most in 2-D."""
    if start >= end:
        return
    if len(shape) <= 1:
        yield (start,), (end - start,)
        return
    inner = _product(shape[1:])
    first, last = start // inner, (end - 1) // inner
    if first == last and end - start < inner:
        for offsets, sizes in boxes(shape[1:], start - first * inner, end - first * inner):
            yield (first, *offsets), (1, *sizes)
        return
    whole_from, whole_to = -(-start // inner), end // inner
    yield from boxes(shape, start, min(whole_from * inner, end))
    if whole_from < whole_to:
        yield (whole_from, *(0 for _ in shape[1:])), (whole_to - whole_from, *shape[1:])
    yield from boxes(shape, max(whole_to * inner, start), end) if whole_to >= whole_from else ()


def _product(numbers: tuple[int, ...]) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result
