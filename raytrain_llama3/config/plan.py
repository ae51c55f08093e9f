"""What a run is, once every `auto` is decided: the configuration and the values that follow from it.

`config.rules.plan_run` builds a `RunPlan`; the driver and every actor read it and nobody changes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from raytrain_llama3.config.schema import Config

Device = Literal["cpu", "cuda"]

LOG_HEADER = "===== attempt"
"""How a rank's log begins, each time that a process takes the rank up: a later run goes on in the same file."""


@dataclass(frozen=True, slots=True)
class DeviceSupply:
    """The devices there are: `per_node[i]` on node i. `memory_bytes` is the least of any."""

    device: Device
    per_node: tuple[int, ...]
    device_name: str = ""
    memory_bytes: int | None = None
    capability: float | None = None
    """Least CUDA compute capability, such as 9.0."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Parallel sizes. `world_size` = tp · cp · pp · dp; `vpp` is the number of virtual stages, or None."""

    world_size: int
    tp: int
    cp: int
    pp: int
    dp: int
    vpp: int | None
    sequence_parallel: bool
    micro_batch_size: int
    global_batch_size: int

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one step on each data-parallel rank."""
        return self.global_batch_size // (self.micro_batch_size * self.dp)


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Absolute folders of one run."""

    checkpoints: Path
    tensorboard: Path
    logs: Path
    data_cache: Path
    load: Path | None = None
    """Where to start from while `checkpoints` holds nothing."""

    def rank_log(self, attempt: int, rank: int) -> Path:
        """Where a rank's output goes in one attempt."""
        return self.logs / f"attempt_{attempt}" / f"rank_{rank}.log"


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A configuration that has passed every rule, for devices that are there."""

    config: Config
    device: Device
    layout: Layout
    ranks_per_node: tuple[int, ...]
    """Ranks on each node; their sum is the world size."""
    paths: RunPaths
    train_steps: int
    """Steps that reach `train_samples` (or `train_iters`)."""
    ends_at: float | None
    """Unix time at which `exit_duration_in_mins` is over; restarts share it."""
    warmup_samples: int
    decay_samples: int
    padded_vocab_size: int
    """Vocabulary rounded up once, independently of TP, so that every layout loads every checkpoint."""
    mock_data: bool
    worker_environment: dict[str, str]
    """Exactly what is set in every rank's environment before it imports torch."""
    moments_dtype: Literal["fp32", "bf16"]
    """Format of Adam's moments, where the optimizer knows a choice."""
    peak_flops: float | None
    """Dense peak of one device at this precision, FLOP/s, where the device is known."""
    supply: DeviceSupply
    """The devices that the plan was made for."""
