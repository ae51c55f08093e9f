"""Where a run starts: its own newest checkpoint, else that of another folder, else step 0."""

from __future__ import annotations

import json
from pathlib import Path

import planning
import pytest
from test_store import DATA_NAMES, flip_a_byte, publish

from raytrain_llama3.checkpoint.store import CheckpointStore
from raytrain_llama3.config.plan import RunPlan
from raytrain_llama3.errors import ConfigError, DataChangedError, NoSafeStateError
from raytrain_llama3.launch.checkpoints import changes_since, starting_point
from raytrain_llama3.messages import ResumePoint


def planned(folder: Path, *flags: str) -> RunPlan:
    return planning.planned([*planning.TINY, "--save", str(folder / "own"), *flags], planning.cpu())


def start(folder: Path, *flags: str) -> ResumePoint | None:
    return starting_point(CheckpointStore(folder / "own", None), planned(folder, *flags))


def test_without_anything_it_starts_at_step_0(tmp_path: Path) -> None:
    assert start(tmp_path) is None
    assert start(tmp_path, "--load", str(tmp_path / "own")) is None


def test_another_folder_counts_until_there_is_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    publish(tmp_path / "other", 10, 20)
    load_flags = ("--load", str(tmp_path / "other"))
    assert start(tmp_path, *load_flags) == ResumePoint(str(tmp_path / "other" / "iter_0000020"), 20, 160)
    one = ("--load", str(tmp_path / "other" / "iter_0000010"))
    assert start(tmp_path, *one) == ResumePoint(str(tmp_path / "other" / "iter_0000010"), 10, 80)
    weights = start(tmp_path, *load_flags, "--load-weights-only")
    assert weights == ResumePoint(str(tmp_path / "other" / "iter_0000020"), 0, 0, weights_only=True)
    # The same command again, after it has saved once.
    publish(tmp_path / "own", 5)
    assert start(tmp_path, *load_flags, "--load-weights-only") == ResumePoint(
        str(tmp_path / "own" / "iter_0000005"), 5, 40
    )


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoSafeStateError, match="there is no checkpoint"):
        start(tmp_path, "--load", str(tmp_path / "other"))
    publish(tmp_path / "other", 10)
    (tmp_path / "other" / "iter_0000010" / DATA_NAMES[0]).unlink()
    with pytest.raises(NoSafeStateError, match="none of the 1 checkpoints here is complete"):
        start(tmp_path, "--load", str(tmp_path / "other"))
    with pytest.raises(NoSafeStateError, match="the checkpoint is damaged"):
        start(tmp_path, "--load", str(tmp_path / "other" / "iter_0000010"))


def test_verifying_takes_the_newest_whose_bytes_are_right(tmp_path: Path) -> None:
    publish(tmp_path / "own", 10, 20)
    flip_a_byte(tmp_path / "own" / "iter_0000020" / DATA_NAMES[0])
    unverified, verified = start(tmp_path), start(tmp_path, "--verify")
    assert unverified is not None
    assert verified is not None
    assert (unverified.step, verified.step) == (20, 10)


DATA = {"seed": 1, "weights": ["1"], "sources": [{"kind": "mock-1", "seed": 1}]}


@pytest.mark.parametrize("own", [True, False])
def test_other_data_is_refused_wherever_the_checkpoint_is(tmp_path: Path, own: bool) -> None:
    folder = tmp_path / ("own" if own else "other")
    publish(folder, 10)
    sidecar = folder / "iter_0000010" / "sidecar.json"
    sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | {"data": DATA}))
    flags = () if own else ("--load", str(folder))
    resume = start(tmp_path, *flags)
    assert changes_since(resume, DATA, accept=False) == []
    with pytest.raises(DataChangedError, match=r"checkpoint at step 10.*\n.*seed was 1, is 7.*(\n.*)*--data-changed"):
        changes_since(resume, DATA | {"seed": 7}, accept=False)
    assert changes_since(resume, DATA | {"seed": 7}, accept=True) == ["seed was 1, is 7: samples come in another order"]
    # Weights alone begin anew, with any data; so does a run without a checkpoint.
    if not own:
        assert changes_since(start(tmp_path, *flags, "--load-weights-only"), {"seed": 7}, accept=False) == []
    assert changes_since(None, {"seed": 7}, accept=False) == []


def test_weights_alone_need_a_folder_that_says_whose(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="load_weights_only needs a load_path"):
        planned(tmp_path, "--load-weights-only")
