"""Who may talk to the Ray that the pods form: the token, where it comes from, and what is open without one."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from raytrain_llama3.errors import CheckpointError

NAME = ".ray-token"
_OPEN = "open"
_LEAST_CHARACTERS = 16


@dataclass(frozen=True, slots=True)
class Access:
    """What every process of the cluster gets in its environment. `token_path` is none of those where it is not ours."""

    environment: dict[str, str] = field(repr=False)
    remove: tuple[str, ...] = ()
    told: str = ""
    warning: str = ""


class NoToken(Exception):
    """The token is not there yet, or not for us."""


def given(environ: Mapping[str, str], whom: str) -> Access | None:
    """What the user decided: a token of theirs, or none at all. `whom` can reach the cluster."""
    if environ.get("RAY_AUTH_MODE") == "disabled":
        return Access({"RAY_AUTH_MODE": "disabled"}, ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"), warning=_warning(whom))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        if environ.get(name):
            return Access({"RAY_AUTH_MODE": "token", name: environ[name]}, told=f"the one in {name}")
    return None


def make(folder: Path, whom: str) -> Access:
    """Pod 0: the run's own token in `folder`, made if it is not there; where it cannot be kept, none and a warning.

    A token that is there is used again: pods that a former head left behind may still hold it. Raises
    `CheckpointError` where nothing can be written.
    """
    path = folder / NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not _is_ours(path):
            _write(path, secrets.token_hex(32))
        if not _is_private(path):
            # A mount that knows no modes: a token that everyone can read is none, and the pods must know.
            path.write_text(_OPEN)
            return _open(whom)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from error
    return _from_file(path)


def find(folder: Path, whom: str) -> Access:
    """Another pod: what pod 0 left in `folder`. Raises `NoToken` as long as there is nothing that we may read."""
    path = folder / NAME
    try:
        text = path.read_text().strip()
    except FileNotFoundError as error:
        raise NoToken(f"{path} is not there yet") from error
    except OSError as error:
        raise NoToken(
            f"{path}: cannot be read here ({error.strerror}): let all pods run as one user, or set RAY_AUTH_TOKEN"
        ) from error
    if text == _OPEN:
        return _open(whom)
    if len(text) < _LEAST_CHARACTERS:
        raise NoToken(f"{path} is not written yet")
    return _from_file(path)


def _from_file(path: Path) -> Access:
    return Access({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}, ("RAY_AUTH_TOKEN",), told=str(path))


def _open(whom: str) -> Access:
    return Access({"RAY_AUTH_MODE": "disabled"}, ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"), warning=_warning(whom))


def _warning(whom: str) -> str:
    return (
        f"Ray asks for no token: whoever reaches {whom} can run code here as this user. Set RAY_AUTH_TOKEN to one "
        "secret in every pod, or give a checkpoint_path on a shared filesystem that keeps file modes"
    )


def _is_private(path: Path) -> bool:
    found = path.stat()
    return not stat.S_IMODE(found.st_mode) & 0o077 and found.st_uid == os.geteuid()


def _is_ours(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return _is_private(path) and len(path.read_text().strip()) >= _LEAST_CHARACTERS
    return False


def _write(path: Path, token: str) -> None:
    """Whole or not at all, and never readable by others in between."""
    temporary = path.with_name(f"{NAME}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(descriptor, token.encode())
    finally:
        os.close(descriptor)
    temporary.rename(path)
