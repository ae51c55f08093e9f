"""Tokenizing under Ray: however many processes, and however often it is killed, the same shards."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from sandbox import Sandbox
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

SHARDS = "8"


def write_text(folder: Path) -> None:
    """JSON lines of a few words over and over, and a tokenizer.json: slow enough to be killed in the middle."""
    words = [f"{a}{b}" for a in ("be", "of", "trou", "slings") for b in ("ing", "ed", "s", "er", "est")]
    lines = [" ".join(words[(i * k) % len(words)] for k in range(1, 400)) for i in range(5000)]
    (folder / "in.jsonl").write_text(
        "".join(json.dumps({"text": f"{i} {line}"}) + "\n" for i, line in enumerate(lines))
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(lines[:20], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_killed_and_gone_on_with_by_other_processes_it_writes_the_same_shards(sandbox: Sandbox) -> None:
    write_text(sandbox.work)
    made = ("data", "tokenize", "--input", "in.jsonl", "--tokenizer", "tokenizer.json", "--shards", SHARDS)
    one = sandbox.run(*made, "--output", "one", "--workers", "1")
    assert one.process.returncode == 0, one.output
    assert f"8 of {SHARDS} shards: 5,000 documents" in one.output
    killed = sandbox.start(*made, "--output", "four", "--workers", "4")
    killed.wait_for(rf"^1 of {SHARDS} shards")
    killed.signal(signal.SIGKILL)
    killed.wait()
    assert not (sandbox.work / "four").exists()
    again = sandbox.run(*made, "--output", "four", "--workers", "2")
    assert again.process.returncode == 0, again.output
    assert f"of {SHARDS} shards are there from a run that did not end; going on" in again.output
    assert contents(sandbox.work / "one") == contents(sandbox.work / "four")
    assert len(contents(sandbox.work / "one")) == int(SHARDS) + 1
    assert [p for p in sandbox.leftovers(90) if "/" not in p.split()[0]] == []
