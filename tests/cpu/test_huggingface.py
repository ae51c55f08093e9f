"""Weights to Hugging Face and back: the same logits, the same bits."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from checkpoints import numbers
from megatron.core.utils import unwrap_model
from training import TINY, Workers, plan, spec

from raytrain_llama3 import cli
from raytrain_llama3.checkpoint.store import CheckpointStore
from raytrain_llama3.messages import ProcessFacts, Rendezvous
from raytrain_llama3.train.process import host_store, open_process

# Not a multiple of 128, so that padding has to be taken off and put on.
FLAGS = ("--dtype", "fp32", "--vocab-size", "250", "--init-method-std", "0.05")


@pytest.fixture(scope="module")
def checkpoint(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model saved at TP 2."""
    run_plan = plan(tmp_path_factory.mktemp("run"), *FLAGS, "--train-iters", "2", "--tp-size", "2", world=2)
    records = workers.run(run_plan)[1]
    store = CheckpointStore(run_plan.paths.checkpoints, None)
    with store.lock():
        for save in records.saves:
            store.publish(save)
    return run_plan.paths.checkpoints


@pytest.fixture(scope="module")
def exported(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("safetensors")
    output = tmp_path_factory.mktemp("hf") / "llama"
    assert cli.main(["checkpoint", "export-hf", str(checkpoint), "--output", str(output)]) == 0
    return output


def our_logits(folder: Path, source: Path, tokens: torch.Tensor) -> torch.Tensor:
    """[batch, seq, padded vocabulary], by Megatron-core's model."""
    from raytrain_llama3.checkpoint import torch_dist
    from raytrain_llama3.checkpoint.reading import FolderSource
    from raytrain_llama3.train.model import build_model
    from raytrain_llama3.train.optimizer import build_optimizer

    run_plan = plan(folder, *FLAGS)
    store = host_store("127.0.0.1", 0, 1)
    rendezvous, facts = Rendezvous("127.0.0.1", store.port, "logits"), ProcessFacts(0, "here", {}, 0.0, 0.0)
    with open_process(run_plan, spec(0, 1), rendezvous, facts, store) as process:
        chunks = build_model(run_plan, process)
        torch_dist.load_weights(FolderSource(source), chunks, build_optimizer(run_plan, chunks))
        with torch.no_grad():
            return unwrap_model(chunks[0])(tokens, torch.arange(tokens.shape[1])[None], attention_mask=None)


def test_transformers_computes_the_same_logits(checkpoint: Path, exported: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM.from_pretrained(exported, dtype=torch.float32)
    tokens = torch.randint(0, 250, (2, 32), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        theirs = model(tokens).logits
    ours = our_logits(tmp_path, checkpoint / "iter_0000002", tokens)[..., :250]
    assert theirs.std() > 0.1, "a model that says nothing would prove nothing"
    assert torch.allclose(ours, theirs, atol=1e-5, rtol=0)


def test_import_then_export_gives_the_same_bits_and_training_starts_from_it(
    workers: Workers, checkpoint: Path, exported: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    brought, again = tmp_path / "brought", tmp_path / "again"
    assert cli.main(["checkpoint", "import-hf", "--input", str(exported), "--output", str(brought)]) == 0
    assert cli.main(["checkpoint", "export-hf", str(brought), "--output", str(again)]) == 0
    files = sorted(exported.glob("*.safetensors"))
    assert [file.name for file in files] == sorted(file.name for file in again.glob("*.safetensors"))
    for file in files:
        before, after = load_file(file), load_file(again / file.name)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((exported / "config.json").read_text()) == json.loads((again / "config.json").read_text())
    assert cli.main(["checkpoint", "verify", str(brought)]) == 0

    # The same weights, so the same first loss; a rank that has stepped on would not be at step 1 again.
    first = plan(tmp_path / "whole", *FLAGS, "--train-iters", "3")
    start = CheckpointStore(checkpoint, None).resume_point()
    expected = workers.run(first, start)[1].losses[0]
    resume = CheckpointStore(brought, None).resume_point()
    assert resume is not None
    assert resume.weights_only
    for flags in (("--tp-size", "2"), ("--pp-size", "2")):
        tuned = plan(tmp_path / flags[0], *FLAGS, "--train-iters", "1", *flags, world=2)
        steps = workers.run(tuned, resume)[1].steps
        assert [step.step for step in steps] == [1]
        assert steps[0].loss != expected, "other samples"
    assert (brought / "model.toml").is_file()


def test_the_imported_shape_is_a_configuration(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    brought = tmp_path / "brought"
    assert cli.main(["checkpoint", "import-hf", "--input", str(exported), "--output", str(brought)]) == 0
    said = re.search(r"train on from it: (.*)", capsys.readouterr().out)
    assert said is not None
    flags = said[1].split()
    rest = [*TINY[:2], "--seq-length", "32", "--global-batch-size", "8", "--fast-test-mode", "1"]
    assert cli.main(["plan", *flags, *rest]) == 0
    out = capsys.readouterr().out
    assert re.search(r"num_layers +4\b", out)


def test_what_cannot_be_converted_is_refused(
    exported: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["checkpoint", "export-hf", str(checkpoint), "--output", str(exported)]) == 3
    assert "is not empty" in capsys.readouterr().err
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((exported / "config.json").read_text())
    for change, said in (
        ({"model_type": "mistral"}, "model_type mistral is not llama"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rotary positions of type llama3"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({}, "model.safetensors: is missing"),
    ):
        (other / "config.json").write_text(json.dumps(config | change))
        assert cli.main(["checkpoint", "import-hf", "--input", str(other), "--output", str(tmp_path / "new")]) == 3
        assert said in capsys.readouterr().err
    assert CheckpointStore(tmp_path / "new", None).states() == {}


def test_padded_rows_are_no_tokens(checkpoint: Path, exported: Path) -> None:
    from safetensors.torch import load_file

    head = load_file(next(exported.glob("*.safetensors")))["lm_head.weight"]
    assert head.shape == (250, 64)
    whole = numbers(checkpoint / "iter_0000002")["output_layer.weight"]
    assert whole.shape == (256, 64)
    assert torch.equal(whole[:250], head)
