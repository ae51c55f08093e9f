"""Options about checkpoints; see `schema`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import NonNegativeInt

from raytrain_llama3.config.schema_base import Options, option
from raytrain_llama3.config.values import Auto


class Checkpoints(Options):
    """Saving, and where things go."""

    exp_name: str = "llama3-8b-training"
    """Name of the run (the script's names say fp8 while it trains bf16)."""
    exp_dir: Path = Path("./experiments")
    """Parent of experiment folders."""
    use_exp_structure: bool = False
    """Put everything into EXP_DIR/EXP_NAME/{checkpoints,tensorboard,logs}, over explicit paths."""
    checkpoint_path: Path | None = option(None, "--save")
    """Folder of checkpoints, saved to and resumed from; unset: checkpoints/EXP_NAME."""
    load_path: Path | None = option(None, "--load")
    """Folder of checkpoints to start from as long as checkpoint_path holds none; unset: only checkpoint_path counts."""
    load_weights_only: bool = option(False, "--finetune")
    """Take only the weights from load_path: step 0, first sample, new optimizer state."""
    verify_on_load: bool = option(False, "--verify")
    """Compare a checkpoint's files with their digests before it is loaded; one that differs counts as incomplete."""
    tensorboard_logs_path: Path | None = option(None, "--tensorboard-dir")
    """Folder of TensorBoard and JSONL files; unset: tensorboard_logs/EXP_NAME."""
    logs_path: Path | None = None
    """Folder of a log file per rank and attempt; unset: logs/EXP_NAME."""
    save_interval: NonNegativeInt = 1000
    """Steps between checkpoints; 0: only at the end."""
    save_at_end: bool = True
    """Save when training ends, for whatever reason; with save_interval 0 and this off nothing is ever saved."""
    max_checkpoints: NonNegativeInt = 5
    """Complete checkpoints to keep; 0: all."""
    keep_every: NonNegativeInt = 0
    """Keep those whose step divides by this for ever, over and above max_checkpoints; 0: none."""
    async_save: Auto | bool = "auto"
    """Write checkpoints while training goes on, from a copy in host memory; auto: on GPUs."""
    max_failed_saves: NonNegativeInt = 3
    """Saves in a row that may fail (full disk, lost writer) before the run stops (exit 3)."""
    memory_checkpoint_interval: NonNegativeInt = 0
    """Steps between checkpoints kept in the memory of another node, to lose less to a fault; 0: none."""
    ckpt_format: Literal["torch_dist"] = "torch_dist"
    """Megatron-core's distributed format, which loads at any layout."""
