"""What containers give too little of: shared memory and open files."""

from __future__ import annotations

import resource
import shutil

_OBJECT_STORE_BYTES = 256 * 2**20
_LEAST_STORE_BYTES = 80 * 2**20
_STORE_SHARE = 0.4
_ENOUGH_SHM_BYTES = 2**30
_ENOUGH_FILES = 65_536
_SHM = "/dev/shm"


def object_store_bytes() -> int:
    """Ray's object store: small, as little goes through it, and no more than its part of /dev/shm."""
    return max(_LEAST_STORE_BYTES, min(_OBJECT_STORE_BYTES, int(shm_bytes() * _STORE_SHARE)))


def raise_open_files() -> None:
    """As many open files as the kernel lets this process have; its children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def shortages(device: str) -> list[str]:
    """A line for each limit that is too low, with the flag of a container that raises it."""
    lines, shm = [], shm_bytes()
    if shm < (_ENOUGH_SHM_BYTES if device == "cuda" else _LEAST_STORE_BYTES):
        lines.append(
            f"/dev/shm has {shm / 2**20:.0f} MiB, which NCCL and Ray share: start the container with --shm-size=16g "
            "(in Kubernetes: an emptyDir of medium Memory mounted there)"
        )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY and files < _ENOUGH_FILES:
        lines.append(
            f"{files} files may be open, and a large run needs more: start the container with --ulimit nofile=1048576"
        )
    return lines


def shm_bytes() -> int:
    """Size of /dev/shm."""
    try:
        return shutil.disk_usage(_SHM).total
    except OSError:
        return 0
