"""A run cut in two is the same run."""

from __future__ import annotations

from pathlib import Path

import pytest
from training import Records, Workers, plan

from raytrain_llama3.checkpoint.store import CheckpointStore
from raytrain_llama3.config.plan import RunPlan
from raytrain_llama3.messages import ResumePoint


def publish(run_plan: RunPlan, records: Records) -> ResumePoint:
    store = CheckpointStore(run_plan.paths.checkpoints, keep=None)
    with store.lock():
        for save in records.saves:
            store.publish(save)
    resume = store.resume_point()
    assert resume is not None
    return resume


def test_ten_steps_and_ten_more_are_bit_equal_to_twenty(workers: Workers, tmp_path: Path) -> None:
    flags = ("--dtype", "fp32", "--lr-decay-samples", "160")
    whole = workers.run(plan(tmp_path / "whole", *flags, "--train-iters", "20"))[1]
    first_plan = plan(tmp_path / "halves", *flags, "--train-iters", "10")
    first = workers.run(first_plan)[1]
    second_workers = Workers(1, tmp_path / "logs")
    second_plan = plan(tmp_path / "halves", *flags, "--train-iters", "20")
    second = second_workers.run(second_plan, publish(first_plan, first))[1]
    halves = first.steps + second.steps
    assert [s.step for s in halves] == list(range(1, 21))
    for field in ("loss", "grad_norm", "learning_rate", "samples", "tokens"):
        assert [getattr(s, field) for s in halves] == [getattr(s, field) for s in whole.steps], field


@pytest.mark.parametrize("load_with", [("--tp-size", "2"), ("--pp-size", "2"), ()], ids=["tp2", "pp2", "dp2"])
def test_a_checkpoint_goes_on_in_another_layout(workers: Workers, tmp_path: Path, load_with: tuple[str, ...]) -> None:
    flags = ("--dtype", "fp32")
    whole = workers.run(plan(tmp_path / "whole", *flags, "--train-iters", "8"))[1]
    first_plan = plan(tmp_path / "halves", *flags, "--train-iters", "4", "--tp-size", "2", world=2)
    resume = publish(first_plan, workers.run(first_plan)[1])
    second_plan = plan(tmp_path / "halves", *flags, "--train-iters", "8", *load_with, world=2)
    losses = workers.run(second_plan, resume)[1].losses
    assert losses == pytest.approx(whole.losses[4:], abs=1e-4)


def test_weights_are_gathered_before_they_are_saved(workers: Workers, tmp_path: Path) -> None:
    # bf16 weights are loaded as they were saved, not made from masters: a stale shard would change the next loss.
    flags = ("--dtype", "bf16", "--micro-batch-size", "1", "--learning-rate", "1e-2")
    whole = workers.run(plan(tmp_path / "whole", *flags, "--train-iters", "8", world=2))[1]
    first_plan = plan(tmp_path / "halves", *flags, "--train-iters", "4", world=2)
    resume = publish(first_plan, workers.run(first_plan)[1])
    second = workers.run(plan(tmp_path / "halves", *flags, "--train-iters", "8", world=2), resume)[1]
    assert second.losses == whole.losses[4:]


def test_a_resumed_run_may_change_its_learning_rate_and_says_so(workers: Workers, tmp_path: Path) -> None:
    flags = ("--dtype", "fp32", "--lr-warmup-samples", "0", "--lr-decay-style", "constant")
    first_plan = plan(tmp_path, *flags, "--train-iters", "2")
    resume = publish(first_plan, workers.run(first_plan)[1])
    changed = plan(tmp_path, *flags, "--train-iters", "4", "--learning-rate", "5e-4", "--seed", "7")
    records = workers.run(changed, resume)[1]
    assert [s.learning_rate for s in records.steps] == [5e-4, 5e-4]
    told = "\n".join(records.warnings)
    assert "learning_rate was 0.001, is 0.0005" in told
    assert "seed was 1234, is 7" in told


def test_another_global_batch_ends_at_the_same_sample(workers: Workers, tmp_path: Path) -> None:
    flags = ("--dtype", "fp32", "--train-samples", "64")
    first_plan = plan(tmp_path, "--dtype", "fp32", "--train-iters", "4")
    resume = publish(first_plan, workers.run(first_plan)[1])
    records = workers.run(plan(tmp_path, *flags, "--global-batch-size", "16"), resume)[1]
    assert [s.samples for s in records.steps] == [48, 64]
