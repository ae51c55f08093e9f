"""Weights and optimizer state in Megatron-core's `torch_dist` format, in the form that loads at any layout."""

from __future__ import annotations

import contextlib
import queue
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.api import CheckpointException

from raytrain_llama3.checkpoint.masters import whole_masters
from raytrain_llama3.checkpoint.store import clear_partial
from raytrain_llama3.errors import CheckpointError

_SETTINGS = ("max_lr", "min_lr", "betas", "eps")
_FORM = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


def save(
    path: Path, step: int, samples: int, chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer
) -> None:
    """Write every rank's part into `path`; returns when all ranks' files are there.

    The folder is not a checkpoint yet: `checkpoint.store` makes it one by its commit marker. Collective.
    """
    if dist.get_rank() == 0:
        clear_partial(path)
        path.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    gather_weights(chunks)
    with _as_checkpoint_error(path, "cannot be written"):
        with whole_masters(optimizer):
            state = _sharded_state(chunks, optimizer, is_loading=False)
        state["progress"] = {"step": step, "samples": samples}
        _write_in_this_process()
        dist_checkpointing.save(
            state,
            str(path),
            FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), _replicas()),
            content_metadata=_FORM,
            async_strategy="mcore",
        )
        dist.barrier()


def load(path: Path, chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer) -> tuple[int, int]:
    """Read this rank's part of the checkpoint in `path`, whatever layout saved it.

    What the configuration says of the optimizer (learning rates, betas, epsilon) stays; its state is loaded.

    Returns:
        (step, samples consumed). Raises `CheckpointError` naming the folder when it does not fit the model.

    """
    with _as_checkpoint_error(path, "does not load into this model"):
        state = _sharded_state(chunks, optimizer, is_loading=True)
        loaded = dist_checkpointing.load(
            state, str(path), FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), _replicas())
        )
        for key, chunk in _named(chunks):
            chunk.load_state_dict(loaded[key])
        _keep_settings(loaded["optimizer"], optimizer)
        with whole_masters(optimizer):
            optimizer.load_state_dict(loaded["optimizer"])
        progress = loaded["progress"]
        return int(progress["step"]), int(progress["samples"])


@contextlib.contextmanager
def _as_checkpoint_error(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except (CheckpointException, CheckpointingException, OSError, RuntimeError, KeyError, ValueError) as error:
        free = shutil.disk_usage(path if path.is_dir() else path.parent).free / 2**30
        reason = f"{type(error).__name__}: {str(error).strip()}"
        raise CheckpointError(f"{path}: {what}: {reason}; {free:.2f} GiB are free there") from error


def gather_weights(chunks: list[DistributedDataParallel]) -> None:
    """With overlapped gathering a step leaves other ranks' shards of the weights for the next forward pass to fetch."""
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def _keep_settings(state: dict[str, Any], optimizer: MegatronOptimizer) -> None:
    """Megatron-core tells parameter groups apart by their learning rates: put ours where the checkpoint has its own."""
    ours = {key: optimizer.param_groups[0][key] for key in _SETTINGS if key in optimizer.param_groups[0]}
    for part in [state] if "optimizer" in state else state.values():
        for group in part["optimizer"]["param_groups"]:
            group.update({key: value for key, value in ours.items() if key in group})


def _sharded_state(
    chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer, *, is_loading: bool
) -> dict[str, Any]:
    # A dictionary of this call's own: Megatron-core would keep the process group of an earlier attempt in it.
    metadata = {**_FORM, "dp_cp_group": _replicas()}
    models = {key: chunk.sharded_state_dict(metadata=metadata) for key, chunk in _named(chunks)}
    model_state = models if len(models) > 1 else models["model"]
    return {
        **models,
        "optimizer": optimizer.sharded_state_dict(model_state, is_loading=is_loading, metadata=metadata),
    }


def _named(chunks: list[DistributedDataParallel]) -> list[tuple[str, Any]]:
    """Megatron-LM's own names: `model`, or `model0`, `model1`, … with virtual stages."""
    modules = [unwrap_model(chunk) for chunk in chunks]
    return [("model" if len(modules) == 1 else f"model{i}", module) for i, module in enumerate(modules)]


def _replicas() -> Any:
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _write_in_this_process() -> None:
    """Spare Megatron-core's helper process, whose only work is to pass write results between processes.

    A save that writes in this process's own threads needs no more than a queue; the helper would start by `spawn`,
    importing torch again.
    """
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()
