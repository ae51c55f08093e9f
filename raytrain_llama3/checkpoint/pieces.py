"""What this rank writes and reads: boxes of global tensors, from Megatron-core's description of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model
from torch import Tensor

from raytrain_llama3.checkpoint.distcp import Blob, Box, Item, pack
from raytrain_llama3.checkpoint.reading import Target
from raytrain_llama3.checkpoint.shards import Run, State, boxes, is_divided, parts_of, runs_of

_METADATA = {"singleton_local_shards": False}


@dataclass(frozen=True, slots=True)
class Piece:
    """A box and how to get at its numbers. `read` gives them on any device, in the shape of the box."""

    box: Box
    read: Callable[[], Tensor]
    target: Callable[[], Target]
    is_main: bool
    """Whether of the tensor- and pipeline-parallel ranks that hold it this one saves it."""
    is_shared: bool
    """Whether every data-parallel rank holds it: then one of them is chosen to save it."""
    is_quantized: bool = False

    @property
    def nbytes(self) -> int:
        """Size of what is saved."""
        return torch.Size(self.box.sizes).numel() * self.box.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Slot:
    """A box of a global tensor that a weight of this rank fills from number `start` of its flattened form on."""

    key: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    start: int


Entry = Any
"""A `ShardedTensor` or a `ShardedTensorFactory` of Megatron-core, which has no types."""


Description = Sequence[tuple[Any, dict[str, Any]]]
"""Each module of the model, without its wrappers, and Megatron-core's description of its state."""


def describe(chunks: Sequence[DistributedDataParallel]) -> Description:
    """What Megatron-core says of the model's state, which stays in the model's own memory."""
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    modules = [unwrap_model(chunk) for chunk in chunks]
    # A dictionary for each call: Megatron-core would keep the process group of an earlier attempt in it.
    return [(m, m.sharded_state_dict(metadata={**_METADATA, "dp_cp_group": replicas})) for m in modules]


def model_pieces(model: Description) -> list[Piece]:
    """The weights of this rank."""
    return [
        piece
        for _, entries in model
        for entry in nested_values(entries)
        if isinstance(entry, ShardedTensor | ShardedTensorFactory)
        for piece in _weight_pieces(entry)
    ]


def saved_pieces(model: Description, optimizer: MegatronOptimizer) -> list[Piece]:
    """All that this rank may save. Of a weight whose state is divided over data-parallel ranks it is its own run.

    That run is what its optimizer has updated: with overlapped gathering other ranks' runs are still the old ones
    here, and only quantized weights, which have no runs, must be gathered first (`needs_gathering`).
    """
    whole = [p for p in model_pieces(model) if not _has_runs(p, optimizer)]
    return [*whole, *optimizer_pieces(model, optimizer, with_weights=True)]


def needs_gathering(optimizer: MegatronOptimizer) -> bool:
    """Whether weights that are saved whole may be stale in part."""
    return not all(is_divided(part) and not _has_quantized(part) for part in parts_of(optimizer))


def _has_quantized(part: Any) -> bool:
    return any(is_quantized(run.weight) for run in runs_of(part))


def _has_runs(piece: Piece, optimizer: MegatronOptimizer) -> bool:
    return not piece.is_quantized and all(is_divided(part) for part in parts_of(optimizer))


def is_quantized(weight: Tensor) -> bool:
    """Whether a weight is kept in fp8, by Transformer Engine."""
    return "dequantize" in type(weight).__dict__


def optimizer_pieces(model: Description, optimizer: MegatronOptimizer, *, with_weights: bool = False) -> list[Piece]:
    """The optimizer state of this rank; `with_weights` also the runs of the weights that it belongs to."""
    by_weight: dict[int, Entry] = {}
    for _, entries in model:
        for entry in nested_values(entries):
            if isinstance(entry, ShardedTensor | ShardedTensorFactory) and entry.data is not None:
                by_weight[id(entry.data)] = entry
    return [
        piece
        for part in parts_of(optimizer)
        for run in runs_of(part)
        for piece in _run_pieces(
            run if not (with_weights and is_divided(part)) or is_quantized(run.weight) else run.with_weight(),
            by_weight[id(run.weight)],
            is_shared=not is_divided(part),
        )
    ]


def objects_of(model: Description) -> Iterator[tuple[Any, dict[str, ShardedObject]]]:
    """Extra state (Transformer Engine's fp8 scales): each module, and by name in its state what describes it."""
    for module, entries in model:
        yield module, {name: entry for name, entry in entries.items() if isinstance(entry, ShardedObject)}


def mine(pieces: Sequence[Piece], place: int, places: int) -> list[Piece]:
    """Those of `pieces` that data-parallel rank `place` of `places` saves; every rank finds the same for all.

    Of those that all of them hold, the largest first, each goes to the one that has least to write.
    """
    loads = [0] * places
    chosen = [piece for piece in pieces if piece.is_main and not piece.is_shared]
    shared = [piece for piece in pieces if piece.is_main and piece.is_shared]
    for piece in sorted(shared, key=lambda piece: (-piece.nbytes, piece.box.key, piece.box.offsets)):
        least = loads.index(min(loads))
        loads[least] += piece.nbytes
        if least == place:
            chosen.append(piece)
    return chosen


def blobs(model: Description) -> list[tuple[Item, bytes]]:
    """The extra state that this rank saves."""
    return [
        (Blob(entry.unique_key), pack(entry.data))
        for _, entries in objects_of(model)
        for entry in entries.values()
        if _is_zero(entry.replica_id)
    ]


def _weight_pieces(entry: Entry) -> Iterator[Piece]:
    weight = entry.data
    quantized = is_quantized(weight)
    plain = weight.dequantize() if quantized else weight.detach()
    flat = plain.reshape(-1) if quantized else plain.view(-1)
    waiting = [0]

    def arrived() -> None:
        # Quantized anew once all boxes of the weight are there.
        waiting[0] -= 1
        if not waiting[0]:
            with torch.no_grad():
                weight.copy_(flat.view(weight.shape))

    for slot in _slots(entry):
        waiting[0] += 1
        length = torch.Size(slot.shape).numel()
        axes = len(slot.global_shape) - len(slot.shape)
        box = Box(slot.key, flat.dtype, slot.global_shape, slot.offsets, (1,) * axes + slot.shape)
        view = flat[slot.start : slot.start + length].view(box.sizes)
        done = arrived if quantized else None
        yield Piece(
            box,
            read=lambda view=view: view,  # type: ignore[misc]
            target=lambda box=box, view=view, done=done: Target(box, view, done),  # type: ignore[misc]
            is_main=_is_zero(_without_replica(entry.replica_id)),
            is_shared=True,
            is_quantized=quantized,
        )


def _run_pieces(run: Run, entry: Entry, *, is_shared: bool) -> Iterator[Piece]:
    is_main = _is_zero(_without_replica(entry.replica_id))
    for slot in _slots(entry):
        length = torch.Size(slot.shape).numel()
        start, end = max(run.start, slot.start), min(run.end, slot.start + length)
        axes = len(slot.global_shape) - len(slot.shape)
        at = start - run.start
        for offsets, sizes in boxes(slot.shape, start - slot.start, end - slot.start):
            where = (*slot.offsets[:axes], *(o + p for o, p in zip(slot.offsets[axes:], offsets, strict=True)))
            shape, to = (1,) * axes + sizes, at + torch.Size(sizes).numel()
            for state in run.states:
                key = f"optimizer.state.{state.name}.{slot.key}" if state.name else slot.key
                box = Box(key, state.dtype, slot.global_shape, where, shape)
                yield Piece(box, *_access(state, box, at, to), is_main=is_main, is_shared=is_shared)
            at = to


def _access(state: State, box: Box, start: int, end: int) -> tuple[Callable[[], Tensor], Callable[[], Target]]:
    def read() -> Tensor:
        return state.read(start, end).view(box.sizes)

    def target() -> Target:
        view = state.view(start, end)
        if view is not None:
            return Target(box, view.view(box.sizes))
        arriving = torch.empty(box.sizes, dtype=torch.float32)
        return Target(box, arriving, lambda: state.write(start, end, arriving.view(-1)))

    return read, target


def _slots(entry: Entry) -> Iterator[_Slot]:
    """Where the numbers of one weight of this rank go: gate and up, one weight here, are two boxes there."""
    if isinstance(entry, ShardedTensor):
        yield _slot(replace(entry, data=None), tuple(entry.local_shape), 0)
        return
    # Built on numbers that are not there, whose places tell which they would be.
    ghost = torch.empty(entry.data.shape, device="meta")
    for built in nested_values(entry.build_fn(entry.key, ghost, 0, None)):
        yield _slot(built, tuple(built.local_shape), int(built.data.storage_offset()))


def _slot(entry: ShardedTensor, shape: tuple[int, ...], start: int) -> _Slot:
    return _Slot(entry.key, tuple(entry.global_shape), tuple(entry.global_offset), shape, start)


def _without_replica(replica_id: Any) -> Any:
    """Without its last number, which counts data-parallel ranks."""
    return replica_id[:-1] if isinstance(replica_id, tuple) else ()


def _is_zero(replica_id: Any) -> bool:
    return replica_id == 0 if isinstance(replica_id, int) else all(number == 0 for number in replica_id)
