"""What devices this machine has, without torch."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping

import psutil

from raytrain_llama3.config.plan import DeviceSupply
from raytrain_llama3.config.schema import Config
from raytrain_llama3.errors import HardwareError

_QUERY = ("--query-gpu=index,uuid,name,memory.total,compute_cap", "--format=csv,noheader,nounits")
_TIMEOUT_S = 30


def local_supply(config: Config, environ: Mapping[str, str]) -> DeviceSupply:
    """This machine's GPUs, or its CPU as many times as `gpus_per_node` asks for.

    Raises `HardwareError` when `device` is cuda and there is no GPU, or the driver does not answer.
    """
    gpus = [] if config.device == "cpu" else _visible(_gpus(), environ.get("CUDA_VISIBLE_DEVICES"))
    if gpus:
        _, _, name, _, _ = gpus[0]
        least_memory = min(int(memory) for *_, memory, _ in gpus) * 2**20
        capability = min(float(c) for *_, c in gpus)
        return DeviceSupply("cuda", (len(gpus),), name, least_memory, capability)
    if config.device == "cuda":
        raise HardwareError(
            "device=cuda: nvidia-smi shows no GPU on this machine; install the driver, or use device=cpu"
        )
    processes = 1 if config.gpus_per_node == "auto" else config.gpus_per_node
    return DeviceSupply("cpu", (processes,), "CPU", psutil.virtual_memory().total // processes)


def cores() -> int:
    """Cores that this process may use."""
    return len(psutil.Process().cpu_affinity())


def _gpus() -> list[list[str]]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run([program, *_QUERY], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise HardwareError(f"nvidia-smi has not answered for {_TIMEOUT_S} s: look at the GPU driver") from error
    return [[part.strip() for part in row.split(",")] for row in done.stdout.splitlines() if row.count(",") == 4]


def _visible(gpus: list[list[str]], chosen: str | None) -> list[list[str]]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, by index or UUID; all where it is unset."""
    if chosen is None:
        return gpus
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    return [gpu for name in names for gpu in gpus if name == gpu[0] or gpu[1].startswith(name)]
