"""One checkpoint's folder: what is in it, whether it is complete, and whether its bytes are those that were written.

A folder `iter_0000100` holds Megatron's files, a sidecar that lists each of them with size and digest, and a commit
marker. The marker is written last, after everything else is on the disk: without it the folder is the wreck of a save
that did not finish.
"""

from __future__ import annotations

import errno
import hashlib
import math
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from raytrain_llama3.checkpoint.durable import read_json
from raytrain_llama3.errors import CheckpointError
from raytrain_llama3.messages import FileFacts

MARKER_NAME = "COMMITTED"
SIDECAR_NAME = "sidecar.json"
INDEX_NAMES = (".metadata", "metadata.json")
"""torch's index of the data files, and Megatron's own: a save writes them after the data."""

_CLEARINGS, _CLEARING_S = 10, 0.1
_READERS = 4
_PIECE_BYTES = 1 << 22


def iteration_path(root: Path, step: int) -> Path:
    """The folder of the checkpoint after `step` steps."""
    return root / f"iter_{step:07d}"


def clear_partial(path: Path) -> None:
    """Remove what an interrupted save left in `path`, if anything.

    Raises `CheckpointError` when `path` carries a commit marker, or cannot be removed.
    """
    if (path / MARKER_NAME).exists():
        raise CheckpointError(
            f"{path}: holds a committed checkpoint, which a save would overwrite. Move it away, or give this run "
            f"another folder (checkpoint_path)"
        )
    for left in reversed(range(_CLEARINGS)):
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            return
        except OSError as error:
            # The writer of a rank that was killed ends by itself, a moment later, and may begin a file until then.
            if error.errno == errno.ENOTEMPTY and left:
                time.sleep(_CLEARING_S)
                continue
            raise CheckpointError(f"{path}: cannot be cleared of an interrupted save: {error}") from error
        return


_CONTINUITY = {
    "seed": "samples come in another order: some twice, some never",
    "seq_length": "samples are cut anew: some tokens come twice, some never",
    "tokenizer": "token ids may mean something else",
    "learning_rate": "the learning rate jumps: lr_decay_samples, lr_warmup_samples or a rate was changed",
}
"""What must be equal for a resumed run to be the same run, and what it means if not."""


def read_sidecar(path: Path) -> dict[str, object]:
    """What was written beside the weights in `path`; empty where it cannot be read."""
    return read_json(path / SIDECAR_NAME) or {}


def differences(saved: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """A line for each thing that was one way when `saved` was written and is another `now`."""
    return [
        f"{name} was {saved[name]}, is {now[name]}: {meaning}"
        for name, meaning in _CONTINUITY.items()
        if name in saved and name in now and not _equal(saved[name], now[name])
    ]


def _equal(a: object, b: object) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-6)
    return a == b


def listed_files(sidecar: Mapping[str, object]) -> dict[str, FileFacts] | None:
    """The files that a sidecar lists; None where it lists none, or not as it should."""
    files = sidecar.get("files")
    if not isinstance(files, dict) or not files:
        return None
    try:
        return {name: FileFacts(int(facts["bytes"]), str(facts["sha256"])) for name, facts in files.items()}
    except (KeyError, TypeError, ValueError):
        return None


def missing_files(path: Path, files: Mapping[str, FileFacts]) -> str | None:
    """Which of `files` is not in `path`, or has another size; None when all are there."""
    for name in INDEX_NAMES:
        if name not in files:
            return f"{name} is not among the files that were saved"
    faults = []
    for name, facts in sorted(files.items()):
        try:
            size = (path / name).stat().st_size
        except FileNotFoundError:
            faults.append(f"{name} is missing")
            continue
        if size != facts.bytes:
            faults.append(f"{name} has {size} of {facts.bytes} bytes")
    if not faults:
        return None
    return faults[0] + (f", and {len(faults) - 1} other files are damaged" if len(faults) > 1 else "")


def damaged_files(path: Path) -> list[str]:
    """A line for each file of the checkpoint in `path` whose bytes are not those that were written; reads all of it."""
    files = listed_files(read_sidecar(path))
    if files is None:
        return [f"{SIDECAR_NAME} is missing or damaged, or has no digests"]

    def look(name: str) -> str | None:
        try:
            found = digest(path / name)
        except OSError as error:
            return f"{name} cannot be read: {error}"
        if found == files[name].sha256:
            return None
        return f"{name} is not as it was written (SHA-256 {found[:12]}…, was {files[name].sha256[:12]}…)"

    with ThreadPoolExecutor(_READERS) as readers:
        return [line for line in readers.map(look, sorted(files)) if line is not None]


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            found.update(piece)
    return found.hexdigest()
