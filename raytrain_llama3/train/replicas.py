"""Are data-parallel replicas still the same weights? A guard against bits that flip without an error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model
from torch import Tensor

from raytrain_llama3.checkpoint.shards import parts_of
from raytrain_llama3.errors import CorruptionError
from raytrain_llama3.train.process import Process

NOBODY = -1
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Summing in int64 casts first: 128 MiB at a time.
_PIECE = 1 << 24


class Replicas:
    """Compares this rank's weights with those of the ranks that should hold the same (DP and CP)."""

    def __init__(
        self, process: Process, chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer
    ) -> None:
        self._process, self._optimizer = process, optimizer
        self._group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._ranks: list[int] = dist.get_process_group_ranks(self._group)
        self._names, self._weights = list[str](), list[Tensor]()
        for chunk in chunks:
            for name, weight in unwrap_model(chunk).named_parameters():
                self._names.append(name)
                self._weights.append(weight)

    @torch.no_grad()
    def compare(self, step: int) -> None:
        """Raise `CorruptionError` on all ranks alike where a weight differs. Collective over all ranks.

        Between the forward passes of a step and its update a flipped bit shows. Before, with overlapped gathering,
        a rank lacks the others' shards; after, the distributed optimizer has overwritten every weight.
        """
        mine = torch.stack([bit_sum(weight) for weight in self._weights])  # [parameters]
        everyone = [torch.empty_like(mine) for _ in self._ranks]
        dist.all_gather(everyone, mine, group=self._group)
        sums = torch.stack(everyone)  # [replicas, parameters]
        differ = (sums != sums[0]).any(dim=0)
        # Groups of other tensor and pipeline ranks have weights of their own, and must end with this one.
        somewhere = differ.any().to(torch.int32)
        dist.all_reduce(somewhere, op=dist.ReduceOp.MAX)
        if int(somewhere):
            self._accuse([int(i) for i in differ.nonzero().flatten()], sums, step)

    def _accuse(self, differing: list[int], sums: Tensor, step: int) -> None:
        mine = None
        if differing:
            column = sums[:, differing[0]].tolist()
            wrong = outvoted(column) or self._contradicted(self._weights[differing[0]])
            mine = self._in_words(wrong, differing, step)
        told: list[tuple[int, str] | None] = [None] * self._process.world_size
        dist.all_gather_object(told, mine)
        culprit, message = next(words for words in told if words)
        raise CorruptionError(message, culprit)

    def _contradicted(self, weight: Tensor) -> list[int]:
        """Places in the group whose copy of `weight` is not what the fp32 masters of it say; empty if none can.

        Each rank's optimizer is asked for the masters that it keeps: of its own shard, or of all.
        """
        told: list[Any] = [None] * len(self._ranks)
        dist.all_gather_object(told, list(_witnesses(self._optimizer, weight)), group=self._group)
        flat = weight.detach().flatten()
        wrong = any(int(bit_sum(flat[start:end])) != said for one in told for start, end, said in one)
        dist.all_gather_object(told, wrong, group=self._group)
        places = [i for i, is_wrong in enumerate(told) if is_wrong]
        return places if len(places) < len(told) else []

    def _in_words(self, wrong: list[int], differing: list[int], step: int) -> tuple[int, str]:
        names = self._names[differing[0]]
        if len(differing) > 1:
            names += f" and {len(differing) - 1} other parameters"
        ranks = [self._ranks[i] for i in wrong]
        if not ranks:
            return NOBODY, (
                f"ranks {_listed(self._ranks)} should hold the same weights and do not at step {step}: {names}. "
                "Nothing tells which of them is right (three replicas have a majority, and bf16 weights have fp32 "
                "masters): each of their devices is in doubt. Go on from the last checkpoint, on other nodes"
            )
        others = _listed(rank for rank in self._ranks if rank not in ranks)
        return ranks[0], (
            f"rank {_listed(ranks)} holds other weights at step {step} than rank {others}, whose replica it is: "
            f"{names}. A bit has changed without an error (replica_check_interval); go on from the last checkpoint, "
            f"and leave the node of rank {_listed(ranks)} out if it happens there again"
        )


def outvoted(sums: Sequence[int]) -> list[int]:
    """Places that do not hold what more than half of all hold; empty where no more than half agree."""
    value, count = Counter(sums).most_common(1)[0]
    return [i for i, one in enumerate(sums) if one != value] if 2 * count > len(sums) else []


def bit_sum(weight: Tensor) -> Tensor:
    """The sum (int64, a scalar on its device) of the bits of `weight` read as integers: any one flip changes it."""
    pieces = torch.split(bits(weight).flatten(), _PIECE)
    return torch.stack([piece.sum(dtype=torch.int64) for piece in pieces]).sum()


def bits(weight: Tensor) -> Tensor:
    """`weight` as integers of its width; a view. Of Transformer Engine's fp8 weights, the bytes that make them up."""
    raw = getattr(weight, "_data", None)
    raw = getattr(weight, "_rowwise_data", None) if raw is None else raw
    raw = weight.detach() if raw is None else raw
    return raw.view(_INTEGERS[raw.element_size()])


def _witnesses(optimizer: MegatronOptimizer, weight: Tensor) -> Iterator[tuple[int, int, int]]:
    """(start, end, bit sum) of each piece of `weight` as its fp32 master says that it must be.

    Masters that are the weight itself (fp32), or only what it lacks (Transformer Engine's remainders), say nothing.
    """
    for part in parts_of(optimizer):
        for whole, piece, master in _halves(part):
            if whole is weight and piece is not None and master is not None:
                start = (piece.data_ptr() - weight.data_ptr()) // weight.element_size()
                yield start, start + piece.numel(), int(bit_sum(master.to(weight.dtype)))


def _halves(part: Any) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None]]:
    """(half-precision weight, this rank's piece of it, the piece's fp32 master) of one Megatron-core optimizer."""
    if hasattr(part, "shard_fp32_from_float16_groups"):
        groups = (part.model_float16_groups, part.shard_float16_groups, part.shard_fp32_from_float16_groups)
    elif hasattr(part, "fp32_from_float16_groups"):
        groups = (part.float16_groups, part.float16_groups, part.fp32_from_float16_groups)
    else:
        return
    for group in zip(*groups, strict=True):
        yield from zip(*group, strict=True)


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
