"""What the tests of configuration share: supplies of devices, and a plan or the lines that refuse it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from raytrain_llama3.config import rules
from raytrain_llama3.config.load import Loaded, load
from raytrain_llama3.config.plan import DeviceSupply, RunPlan
from raytrain_llama3.errors import ConfigError

GIB = 2**30

ONE_H200 = DeviceSupply("cuda", (1,), "NVIDIA H200", 141 * GIB, 9.0)
EIGHT_H100 = DeviceSupply("cuda", (8,), "NVIDIA H100 80GB HBM3", 80 * GIB, 9.0)
EIGHT_NODES = DeviceSupply("cuda", (8,) * 8, "NVIDIA H100 80GB HBM3", 80 * GIB, 9.0)

TINY = [
    *("--num-layers", "4", "--hidden-size", "128", "--ffn-hidden-size", "384", "--num-attention-heads", "8"),
    *("--num-query-groups", "4", "--kv-channels", "32", "--seq-length", "128", "--vocab-size", "257"),
    *("--micro-batch-size", "2", "--global-batch-size", "16", "--dtype", "fp32"),
]
"""A model that fits everywhere and breaks no rule."""


def cpu(processes: int = 1) -> DeviceSupply:
    """A machine without GPUs, 24 GiB for each process."""
    return DeviceSupply("cpu", (processes,), "CPU", 24 * GIB)


def planned(argv: Sequence[str], supply: DeviceSupply, environ: Mapping[str, str] | None = None) -> RunPlan:
    """The plan for `argv` on `supply`, which must break no rule."""
    return rules.plan_run(load(argv, environ or {}), supply)


def refused(argv: Sequence[str], supply: DeviceSupply, environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The lines that say why `argv` cannot run on `supply`."""
    loaded = load(argv, environ or {})
    with pytest.raises(ConfigError) as caught:
        rules.plan_run(loaded, supply)
    return caught.value.problems


def unreadable(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The lines that say what in `argv` and `environ` cannot be read."""
    with pytest.raises(ConfigError) as caught:
        load(argv, environ or {})
    return caught.value.problems


def set_by(loaded: Loaded) -> dict[str, tuple[object, str]]:
    """Value and origin of every option that is not at its default."""
    return {name: (getattr(loaded.config, name), origin) for name, origin in loaded.origins.items()}
