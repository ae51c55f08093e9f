"""The cuDNN that torch was built with, loaded before the dynamic loader finds an older one."""

from __future__ import annotations

import contextlib
import ctypes
import os
from importlib.util import find_spec
from pathlib import Path

_LIBRARIES = ("graph", "ops", "cnn", "adv", "heuristic", "engines_precompiled", "engines_runtime_compiled")
"""Each after those that it needs."""


def load_torchs_own(search_path: str | None = None) -> None:
    """Load what torch's wheel brings, where `LD_LIBRARY_PATH` (`search_path`) would put another cuDNN in its place.

    torch finds cuDNN's first library beside itself, but that one has the loader look for the others, and they do the
    work: with 9.14's instead of 9.19's the backward pass of attention takes 6 % longer on an H200. To be called before
    torch is imported: what is loaded by then stays.
    """
    own = _of_torch()
    other = _on(os.environ.get("LD_LIBRARY_PATH", "") if search_path is None else search_path)
    if own is None or other is None or other.samefile(own):
        return
    for library in _LIBRARIES:
        # A release that divides itself otherwise loads what it needs by itself, as without this.
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(own / _file(library)), mode=ctypes.RTLD_GLOBAL)


def _file(library: str) -> str:
    return f"libcudnn_{library}.so.9"


def _of_torch() -> Path | None:
    """The folder of the wheel that torch's wheel asks for; a torch built with a system's cuDNN has none."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    folder = Path(torch.origin).parents[1] / "nvidia" / "cudnn" / "lib"
    return folder if (folder / _file("graph")).exists() else None


def _on(search_path: str) -> Path | None:
    folders = (Path(name) for name in search_path.split(os.pathsep) if name)
    return next((folder for folder in folders if (folder / _file("graph")).exists()), None)
