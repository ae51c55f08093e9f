"""Where the token of pods comes from, and what is said where there is none."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from raytrain_llama3.errors import CheckpointError
from raytrain_llama3.launch import token

WHOM = "10.0.0.1:20000"


def test_the_users_token_is_used_as_it_is_and_never_shown() -> None:
    access = token.given({"RAY_AUTH_TOKEN": "secret-of-the-user"}, WHOM)
    assert access is not None
    assert access.environment == {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "secret-of-the-user"}
    assert "secret" not in f"{access!r}{access.told}{access.warning}"
    path = token.given({"RAY_AUTH_TOKEN_PATH": "/a/file", "RAY_AUTH_MODE": "token"}, WHOM)
    assert path is not None
    assert path.environment["RAY_AUTH_TOKEN_PATH"] == "/a/file"
    assert token.given({}, WHOM) is None


def test_pod_0_makes_one_for_its_owner_alone_and_the_others_find_it(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "checkpoints"
    with pytest.raises(token.NoToken, match="is not there yet"):
        token.find(folder, WHOM)
    made = token.make(folder, WHOM)
    path = folder / token.NAME
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(path.read_text()) == 64
    assert made.environment == {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}
    assert made == token.find(folder, WHOM)
    assert made.warning == ""


def test_a_new_head_uses_the_former_ones_token_unless_others_could_have_read_it(tmp_path: Path) -> None:
    token.make(tmp_path, WHOM)
    path = tmp_path / token.NAME
    first = path.read_text()
    token.make(tmp_path, WHOM)
    assert path.read_text() == first
    path.chmod(0o644)
    token.make(tmp_path, WHOM)
    assert path.read_text() != first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_mount_without_modes_leaves_the_cluster_open_and_all_pods_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token, "_is_private", lambda _path: False)
    for access in (token.make(tmp_path, WHOM), token.find(tmp_path, WHOM)):
        assert access.environment == {"RAY_AUTH_MODE": "disabled"}
        assert "whoever reaches 10.0.0.1:20000 can run code here" in access.warning
        assert "RAY_AUTH_TOKEN" in access.warning


def test_who_switches_authentication_off_is_told_what_is_open() -> None:
    access = token.given({"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "x"}, WHOM)
    assert access is not None
    assert access.environment == {"RAY_AUTH_MODE": "disabled"}
    assert "RAY_AUTH_TOKEN" in access.remove
    assert WHOM in access.warning


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        token.make(tmp_path / "file", WHOM)
