"""Memory of the node, beside its devices', that saving takes: by arithmetic alone."""

from __future__ import annotations

from raytrain_llama3.config import estimate
from raytrain_llama3.config.plan import Layout
from raytrain_llama3.config.schema import Config

_GENERATIONS = 2


def saves_async(config: Config, device: str) -> bool:
    """Whether training goes on while a checkpoint is written."""
    return device == "cuda" if config.async_save == "auto" else config.async_save


def part_bytes(config: Config, layout: Layout, device: str, moments: str) -> float:
    """What the fullest rank saves: its share of the weights, and its own masters and moments (of type `moments`)."""
    c = config
    _, weights = estimate.rank_weights(c, layout)
    half_moments = estimate.is_precision_aware(c, device) and moments == "bf16"
    # The fp32 masters are saved whole, whatever the optimizer keeps of them.
    each = (4 if c.dtype == "fp32" else 2) + 4 + (4 if half_moments else 8)
    return weights * each / (layout.dp * layout.cp)


def host_bytes(config: Config, layout: Layout, device: str, moments: str, nodes: int) -> float:
    """What saving takes of the node's memory for each of its ranks, at the most.

    An asynchronous save holds a copy of the rank's part. Memory checkpoints hold another, and each of the keepers
    that has it (two, where there are several nodes) two generations.
    """
    part = part_bytes(config, layout, device, moments)
    keepers = min(nodes, 2) if config.memory_checkpoint_interval else 0
    return part * (saves_async(config, device) + (1 + _GENERATIONS * keepers if keepers else 0))
