"""Every example runs, as its first lines say."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sandbox import ROOT, Sandbox, records

NO_STANDBY = {"STANDBY_PROCESSES": "0"}
SMALL = {**NO_STANDBY, "TRAIN_ITERS": "4", "LR_DECAY_SAMPLES": "4800", "EVAL_INTERVAL": "0", "SEQ_LENGTH": "32"}


def example(name: str, *arguments: str) -> list[str]:
    return ["bash", str(ROOT / "examples" / name), *arguments]


def test_the_tutorials_script_takes_its_variables_and_arguments(sandbox: Sandbox) -> None:
    shape = {"NUM_LAYERS": "2", "HIDDEN_SIZE": "64", "FFN_HIDDEN_SIZE": "128", "NUM_ATTENTION_HEADS": "4"}
    shape |= {"NUM_QUERY_GROUPS": "2", "KV_CHANNELS": "16", "VOCAB_SIZE": "512"}
    run = {"DEVICE": "cpu", "GPUS_PER_NODE": "2", "TP_SIZE": "2", "FAST_TEST_MODE": "1", "EXP_NAME": "from-the-script"}
    run |= {"EXIT_DURATION_IN_MINS": "0.05", "PRETRAIN_SCRIPT_PATH": "pretrain_gpt.py", "RANK": "0", "WORLD_SIZE": "1"}
    arguments = ("saved/here", "board/there", "MOCK", "MOCK")
    command = sandbox.start_program(example("train_llama3_8b_dynamic.sh", *arguments), **(SMALL | shape | run))
    assert command.wait() == 0, command.output
    for text in ("fast_test_mode: train_samples 1000", "PRETRAIN_SCRIPT_PATH=pretrain_gpt.py is not used", "TP 2"):
        assert text in command.output
    assert list((sandbox.work / "saved" / "here").glob("iter_*/COMMITTED"))
    assert records(sandbox.work / "board" / "there", "step")[0]["step"] == 1


def test_train_on_your_text(sandbox: Sandbox) -> None:
    text = sandbox.work / "texts"
    text.mkdir()
    for i in range(50):
        (text / f"{i}.txt").write_text(f"{i} green bottles on the wall, and if one should fall, {i - 1}.\n" * 20)
    command = sandbox.start_program(example("train_on_your_text.sh", str(text), "out"), **SMALL)
    assert command.wait() == 0, command.output
    assert "50 documents" in command.output
    assert list((sandbox.work / "out" / "checkpoints").glob("iter_0000004/COMMITTED"))


def test_wikitext(sandbox: Sandbox) -> None:
    """Files of the same form as WikiText-103's: a line of an article a row, headings and empty rows among them."""
    rows = ["", " = Robert Boulter = \n", ""] + [
        f" Line {i} of an article , with words @-@ like these . \n" for i in range(400)
    ]
    (sandbox.work / "parquet").mkdir()
    for part in range(2):
        table = pa.table({"text": rows[part::2]})
        pq.write_table(table, sandbox.work / "parquet" / f"train-0000{part}-of-00002.parquet", row_group_size=100)
    # Two workers: tokenizing goes through Ray.
    command = sandbox.start_program(example("wikitext.sh", "parquet", "out"), WORKERS="2", **SMALL)
    assert command.wait() == 0, command.output
    assert "401 documents" in command.output
    assert "begins with  ' Line" in command.output
    assert list((sandbox.work / "out" / "checkpoints").glob("iter_0000004/COMMITTED"))
    # With no worker at all: the same bytes.
    here = sandbox.run("data", "tokenize", "--input", "parquet", "--output", "here")
    assert here.process.returncode == 0, here.output
    first, second = ({f.name: f.read_bytes() for f in (sandbox.work / n).iterdir()} for n in ("out/data", "here"))
    assert first == second
    assert sandbox.leftovers() == []


def test_change_layout(sandbox: Sandbox) -> None:
    environment = {**NO_STANDBY, "SEQ_LENGTH": "32"}
    command = sandbox.start_program(example("change_layout.sh", "out"), **environment)
    assert command.wait() == 0, command.output
    assert "DP 2" in command.output
    assert "TP 2" in command.output
    steps = records(sandbox.work / "out" / "tensorboard", "step")
    assert [s["step"] for s in steps] == list(range(1, 41))
    assert steps[20]["loss"] == pytest.approx(steps[19]["loss"], abs=0.5)


def test_the_demo_ends_with_a_table_and_a_picture(sandbox: Sandbox) -> None:
    command = sandbox.start_program(
        [str(sandbox.environment()["PYTHON"]), str(ROOT / "examples" / "demo.py"), "--train-iters", "20"],
        **NO_STANDBY,
        **{"LR_DECAY_SAMPLES": "4800"},
    )
    assert command.wait() == 0, command.output
    for name in ("first loss", "last loss", "validation", "tokens/s", "iter_0000020", "tensorboard --logdir"):
        assert name in command.output
    [picture] = (sandbox.work / "demo").glob("run-*/loss.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    # matplotlib keeps its fonts in the home folder.
    assert [left for left in sandbox.leftovers() if not left.endswith((".cache", ".config"))] == []
