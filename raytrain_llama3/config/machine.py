"""What devices this machine has, without torch."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence

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
    found = [] if config.device == "cpu" else _visible(gpus(), environ.get("CUDA_VISIBLE_DEVICES"))
    if there := gpu_supply(found):
        return there
    if config.device == "cuda":
        raise HardwareError(
            "device=cuda: nvidia-smi shows no GPU on this machine; install the driver, or use device=cpu"
        )
    processes = 1 if config.gpus_per_node == "auto" else config.gpus_per_node
    return DeviceSupply("cpu", (processes,), "CPU", psutil.virtual_memory().total // processes)


def gpu_supply(found: Sequence[Sequence[str]]) -> DeviceSupply | None:
    """Those GPUs, rows of `gpus`, as one node's supply: the least memory and capability of any; None for none."""
    if not found:
        return None
    _, _, name, _, _ = found[0]
    least_memory = min(int(memory) for *_, memory, _ in found) * 2**20
    return DeviceSupply("cuda", (len(found),), name, least_memory, min(float(c) for *_, c in found))


def cores() -> int:
    """Cores that this process may use."""
    return len(psutil.Process().cpu_affinity())


def gpus() -> list[list[str]]:
    """Each GPU of this machine as nvidia-smi has it: index, UUID, name, MiB of memory, compute capability."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run([program, *_QUERY], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise HardwareError(f"nvidia-smi has not answered for {_TIMEOUT_S} s: look at the GPU driver") from error
    return [[part.strip() for part in row.split(",")] for row in done.stdout.splitlines() if row.count(",") == 4]


def driver() -> str:
    """The GPU driver's version; empty where there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    return (done.stdout.splitlines() or [""])[0].strip()


def _visible(gpus: list[list[str]], chosen: str | None) -> list[list[str]]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, by index or UUID; all where it is unset."""
    if chosen is None:
        return gpus
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    return [gpu for name in names for gpu in gpus if name == gpu[0] or gpu[1].startswith(name)]
