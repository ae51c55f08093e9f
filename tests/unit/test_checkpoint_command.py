from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_store import DATA_NAMES, flip_a_byte, publish, save

from raytrain_llama3 import cli
from raytrain_llama3.checkpoint.hf_config import LlamaShape
from raytrain_llama3.errors import CheckpointError


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = cli.main(["checkpoint", *map(str, argv)])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_list_names_every_iteration_and_what_is_wrong_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(tmp_path, 10, 20)
    save(tmp_path, 30)
    (tmp_path / "iter_0000010" / DATA_NAMES[0]).unlink()
    code, out, _ = run(capsys, "list", tmp_path)
    first, second, third = out.splitlines()
    assert code == 0
    assert first == f"iter_0000010  not complete: {DATA_NAMES[0]} is missing"
    assert second.startswith("iter_0000020  160 samples  bf16  0.00 GiB in 5 files  20")
    assert third == "iter_0000030  not complete: no COMMITTED, the save did not finish"


def test_verify_reads_every_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(tmp_path, 10, 20)
    assert run(capsys, "verify", tmp_path)[:2] == (0, "iter_0000020: every file is as it was written\n")
    flip_a_byte(tmp_path / "iter_0000020" / DATA_NAMES[1])
    code, out, err = run(capsys, "verify", tmp_path)
    assert code == 3
    assert out.startswith(f"iter_0000020: {DATA_NAMES[1]} is not as it was written (SHA-256 ")
    assert "1 files are not as they were written; do not train on from it" in err
    assert run(capsys, "verify", tmp_path / "iter_0000010")[0] == 0


def test_show_says_what_the_sidecar_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(tmp_path, 10)
    code, out, _ = run(capsys, "show", tmp_path)
    shown = json.loads(out)
    assert code == 0
    assert (shown["step"], shown["samples"], shown["dtype"], shown["files"]) == (10, 80, "bf16", 5)
    files = [tmp_path / "iter_0000010" / name for name in (*DATA_NAMES, ".metadata", "metadata.json")]
    assert shown["bytes"] == sum(file.stat().st_size for file in files)


@pytest.mark.parametrize("command", ["verify", "show"])
def test_where_there_is_no_checkpoint_it_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    code, _, err = run(capsys, command, tmp_path / "nothing")
    assert code == 3
    assert "there is no checkpoint" in err


SHAPE = LlamaShape(4, 64, 176, 4, 2, 16, 250, 32, 500_000, 1e-5)


def test_a_shape_survives_hugging_faces_words() -> None:
    assert LlamaShape.of_json(SHAPE.to_json("float32"), "x") == SHAPE


def test_what_llama_has_not_is_refused() -> None:
    model = SHAPE.options() | {"normalization": "LayerNorm", "apply_layernorm_1p": False, "rotary_percent": 1.0}
    with pytest.raises(CheckpointError, match="normalization LayerNorm has no place"):
        LlamaShape.of_sidecar({"model": model, "vocab_size": 250, "seq_length": 32}, "x")
    with pytest.raises(CheckpointError, match="does not say what model it is"):
        LlamaShape.of_sidecar({}, "x")
