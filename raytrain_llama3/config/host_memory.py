"""Memory of the node, beside its devices', that saving takes: by arithmetic alone."""

from __future__ import annotations

from raytrain_llama3.config import estimate
from raytrain_llama3.config.plan import Layout
from raytrain_llama3.config.schema import Config

_GENERATIONS = 2


def part_bytes(config: Config, layout: Layout, device: str) -> float:
    """What the fullest rank saves: its share of the weights, and its own masters and moments."""
    c = config
    replicas = layout.dp * layout.cp
    width = 4 if c.dtype == "fp32" else 2
    weights = estimate.memory(c, layout, device).weights / width
    precise = device == "cuda" and c.dtype in ("bf16", "fp8") and c.use_distributed_optimizer
    moments = 4 if precise and c.optimizer_moments_dtype == "bf16" else 8
    # The fp32 masters are saved whole, whatever the optimizer keeps of them.
    return weights * (width + 4 + moments) / replicas


def host_bytes(config: Config, layout: Layout, device: str, nodes: int) -> float:
    """What saving takes of the node's memory for each of its ranks, at the most.

    An asynchronous save holds a copy of the rank's part. Memory checkpoints hold another, and each of the keepers
    that has it (two, where there are several nodes) two generations.
    """
    part = part_bytes(config, layout, device)
    is_async = device == "cuda" if config.async_save == "auto" else config.async_save
    keepers = min(nodes, 2) if config.memory_checkpoint_interval else 0
    return part * (is_async + (1 + _GENERATIONS * keepers if keepers else 0))
