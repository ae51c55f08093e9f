"""Weights and optimizer state in Megatron-core's `torch_dist` format, in the form that loads at any layout.

What lies in the files is Megatron's `fully_reshardable` form: its own loader reads it. The writing is ours, because
Megatron-core 0.19 gathers this form in host memory, and saves it asynchronously by a fork or by collectives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from raytrain_llama3.checkpoint.distcp import COMMON_KEY, Blob, Item, pack
from raytrain_llama3.checkpoint.pieces import (
    Description,
    Piece,
    blobs,
    describe,
    mine,
    model_pieces,
    needs_gathering,
    objects_of,
    optimizer_pieces,
    saved_pieces,
)
from raytrain_llama3.checkpoint.reading import Reader, Source
from raytrain_llama3.checkpoint.shards import is_divided, make_room, parts_of
from raytrain_llama3.checkpoint.staging import Files, files_for
from raytrain_llama3.errors import CheckpointError

_FILES = 2
_FORM = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the run had come."""

    step: int
    samples: int


class OwnState:
    """What one rank saves of a model and its optimizer, which has taken a step or was loaded.

    Where the numbers lie stays the same while an attempt lasts: Megatron-core describes it once, and every later save
    waits for its copy alone. Weights in fp8 are no such numbers, they are read anew each time.
    """

    def __init__(self, rank: int, chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
        self._rank, self._chunks, self._optimizer = rank, chunks, optimizer
        self._pieces: list[Piece] | None = None
        self._has_objects = True

    def files(self, progress: Progress) -> Files:
        """What is saved now, by file. The numbers are read when they are written or copied.

        Collective where weights are gathered (`gather_weights`).
        """
        if needs_gathering(self._optimizer):
            gather_weights(self._chunks)
        pieces = self._pieces
        if pieces is None:
            replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
            pieces = mine(saved_pieces(describe(self._chunks), self._optimizer), replicas.rank(), replicas.size())
            if not any(piece.is_quantized for piece in pieces):
                self._pieces = pieces
        return files_for(self._rank, pieces, self._objects(progress), _FILES)

    def _objects(self, progress: Progress) -> list[tuple[Item, bytes]]:
        found = blobs(describe(self._chunks)) if self._has_objects else []
        self._has_objects = bool(found)
        if self._rank == 0:
            common = {
                "progress": {"step": progress.step, "samples": progress.samples},
                "optimizer": _common_state(self._optimizer),
                "content_metadata": _FORM,
            }
            found.append((Blob(COMMON_KEY), pack(common)))
        return found


def load(source: Source, chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> Progress:
    """Read this rank's part of a checkpoint, whatever layout saved it.

    What the configuration says of the optimizer (learning rates, betas, epsilon) stays; its state is loaded. Extra
    state (fp8's scales) is taken where there is some. Raises `CheckpointError` naming the checkpoint when it does not
    fit the model.
    """
    with _as_checkpoint_error(source):
        reader = Reader(source)
        for part in parts_of(optimizer):
            make_room(part)
        model = describe(chunks)
        weights = model_pieces(model)
        # After the weights: a master that is kept as what a weight lacks puts that weight right too.
        reader.fill(piece.target() for piece in (*weights, *optimizer_pieces(model, optimizer)))
        _load_objects(reader, model)
        common: Any = reader.object(COMMON_KEY)
        _load_common(common["optimizer"], optimizer)
        if _are_rounded(reader, weights):
            # Masters made this rank's own shard of the weights whole again; the other ranks' are still rounded here.
            _spread(chunks, optimizer)
        return Progress(int(common["progress"]["step"]), int(common["progress"]["samples"]))


def load_weights(source: Source, chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    """Read the weights alone: optimizer state starts anew, from these weights. Raises as `load` does."""
    with _as_checkpoint_error(source):
        reader = Reader(source)
        model = describe(chunks)
        reader.fill(piece.target() for piece in model_pieces(model))
        _load_objects(reader, model)
        optimizer.reload_model_params()


def gather_weights(chunks: Sequence[DistributedDataParallel]) -> None:
    """With overlapped gathering a step leaves other ranks' shards of the weights for the next forward pass to fetch."""
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def _load_objects(reader: Reader, model: Description) -> None:
    there = reader.keys
    for module, entries in objects_of(model):
        found = {name: reader.object(entry.unique_key) for name, entry in entries.items() if entry.unique_key in there}
        if found:
            module.load_state_dict(found, strict=False)


def _are_rounded(reader: Reader, weights: Sequence[Piece]) -> bool:
    """Whether some weight is kept in fewer bits there than here."""
    stored = ((piece, reader.dtype(piece.box.key)) for piece in weights)
    return any(dtype is not None and dtype.itemsize < piece.box.dtype.itemsize for piece, dtype in stored)


def _load_common(saved: Any, optimizer: MegatronOptimizer) -> None:
    """What all ranks have alike: how many steps the optimizer has taken, and the loss scale."""
    steps = [group["step"] for group in saved["optimizer"]["param_groups"] if "step" in group]
    for part in parts_of(optimizer):
        for group in part.optimizer.param_groups:
            if steps:
                group["step"] = max(steps)
        if getattr(part, "grad_scaler", None) and "grad_scaler" in saved:
            part.grad_scaler.load_state_dict(saved["grad_scaler"])


def _common_state(optimizer: MegatronOptimizer) -> dict[str, object]:
    """What all ranks have alike of the optimizer, as Megatron-core's own loader expects it."""
    part = parts_of(optimizer)[0]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in part.optimizer.param_groups]
    state: dict[str, object] = {
        "optimizer": {"param_groups": [_plain(group) for group in groups]},
        "param_state_sharding_type": "fully_reshardable",
    }
    if getattr(part, "grad_scaler", None):
        state["grad_scaler"] = part.grad_scaler.state_dict()
    return state


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value.item() if isinstance(value, Tensor) else value for name, value in group.items()}


def _spread(chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    if all(is_divided(part) for part in parts_of(optimizer)):
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)


@contextlib.contextmanager
def _as_checkpoint_error(source: Source) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, KeyError, ValueError, EOFError) as error:
        said = error.args[0] if isinstance(error, KeyError) and error.args else str(error).strip()
        raise CheckpointError(f"{source}: does not load into this model: {type(error).__name__}: {said}") from error
