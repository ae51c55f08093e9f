"""Files that are on the disk when the call returns, and seen whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path


def sync(path: Path) -> None:
    """Flush one file, or one folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush every file below `folder`, then the folders from the inside out."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(parent, name))
        sync(Path(parent))


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Put `value` at `path` by a rename: a crash leaves the former file, or none."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)


def read_json(path: Path) -> dict[str, object] | None:
    """The object in `path`; None when there is no file, or no JSON object in it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def nearest_folder(path: Path) -> Path:
    """`path`, or the folder above it that is there already and will hold it."""
    return next((p for p in (path, *path.parents) if p.is_dir()), Path("/"))


def free_space(path: Path) -> str:
    """How much room there is on the disk of `path`, or of what will hold it."""
    return f"{shutil.disk_usage(nearest_folder(path)).free / 2**30:.2f} GiB are free there"
