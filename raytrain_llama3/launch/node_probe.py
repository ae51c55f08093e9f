"""What a node is like, asked on the node itself without torch: memory, limits, disk, network, the shared folder."""

from __future__ import annotations

import contextlib
import resource
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil

from raytrain_llama3.checkpoint.durable import nearest_folder
from raytrain_llama3.config import machine
from raytrain_llama3.config.plan import Device
from raytrain_llama3.launch import limits
from raytrain_llama3.messages import Finding, Verdict

_GIB = 2**30
_LEAST_DEVICE_BYTES = 8 * _GIB
_MEMORY_A_GPU_BYTES = 64 * _GIB
_LEAST_DISK_BYTES = 200 * _GIB
"""A checkpoint of 8B with its optimizer is 112 GB; the former one stays until the next is complete."""


def look(where: str, ip: str, device: Device, folder: str) -> list[Finding]:
    """Everything about this node; `folder` is the run's checkpoint path."""
    gpus = machine.gpus() if device == "cuda" else []
    found = [*_devices(where, gpus, device), _memory(where, len(gpus))]
    found += [_shm(where, device), _files(where), _disk(where, Path(folder)), _network(where, ip)]
    return found


def leave(folder: str, name: str) -> None:
    """Write a token that the other nodes must see."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / name).write_text(socket.gethostname())


def sees(folder: str, name: str) -> bool:
    """Whether a token that another node wrote is here."""
    # A shared filesystem may answer from its cache until the folder is listed anew.
    with contextlib.suppress(OSError):
        list(Path(folder).iterdir())
    return (Path(folder) / name).is_file()


def take_away(folder: str, name: str) -> None:
    """Remove the token."""
    (Path(folder) / name).unlink(missing_ok=True)


def _devices(where: str, gpus: list[list[str]], device: Device) -> Iterator[Finding]:
    if device == "cpu":
        yield Finding(where, "devices", f"CPU, {machine.cores()} cores")
        yield Finding(where, "driver", "needs a GPU", Verdict.SKIPPED)
        yield Finding(where, "GPU memory", "needs a GPU", Verdict.SKIPPED)
        return
    names = sorted({name for _, _, name, _, _ in gpus})
    capability = ", ".join(sorted({c for *_, c in gpus}))
    yield Finding(where, "devices", f"{len(gpus)} × {', '.join(names)}, capability {capability}")
    yield Finding(where, "driver", machine.driver() or "unknown")
    least = min((int(memory) * 2**20 for *_, memory, _ in gpus), default=0)
    enough = least >= _LEAST_DEVICE_BYTES
    yield Finding(
        where,
        "GPU memory",
        f"{least / _GIB:.0f} GiB at least",
        Verdict.OK if enough else Verdict.BAD,
        "" if enough else "8 GiB is the least that anything but a toy trains in: use larger GPUs",
    )


def _memory(where: str, gpus: int) -> Finding:
    total = psutil.virtual_memory().total
    wanted = gpus * _MEMORY_A_GPU_BYTES
    # A node of 512 GB reports somewhat less.
    enough = total >= 0.9 * wanted
    return Finding(
        where,
        "system memory",
        f"{total / _GIB:.0f} GiB" + (f" for {gpus} GPUs" if gpus else ""),
        Verdict.OK if enough else Verdict.WARNING,
        "" if enough else f"64 GiB a GPU is advised, {wanted / _GIB:.0f} GiB here",
    )


def _shm(where: str, device: Device) -> Finding:
    lines = [line for line in limits.shortages(device) if line.startswith("/dev/shm")]
    size = f"{limits.shm_bytes() / _GIB:.1f} GiB"
    return Finding(where, "/dev/shm", size, Verdict.WARNING if lines else Verdict.OK, "".join(lines))


def _files(where: str) -> Finding:
    limits.raise_open_files()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lines = [line for line in limits.shortages("cpu") if "files" in line]
    value = f"{soft} of at most {'any number' if hard == resource.RLIM_INFINITY else hard}"
    return Finding(where, "open files", value, Verdict.WARNING if lines else Verdict.OK, "".join(lines))


def _disk(where: str, folder: Path) -> Finding:
    there = nearest_folder(folder)
    free = shutil.disk_usage(there).free
    enough = free >= _LEAST_DISK_BYTES
    return Finding(
        where,
        "free disk",
        f"{free / _GIB:.0f} GiB at {there}",
        Verdict.OK if enough else Verdict.WARNING,
        "" if enough else "two checkpoints of Llama3-8B take 224 GB: use another checkpoint_path, or a smaller model",
    )


def _network(where: str, ip: str) -> Finding:
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == ip for address in addresses):
            speed = psutil.net_if_stats()[name].speed
            return Finding(where, "network", f"{ip} on {name}" + (f", {speed / 1000:g} Gbit/s" if speed else ""))
    remedy = "no interface has Ray's address for this node: behind a translation gloo and NCCL cannot be reached"
    return Finding(where, "network", f"{ip} on no interface", Verdict.BAD, remedy)
