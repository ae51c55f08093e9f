"""What a rank does for faults, in real workers: its errors told, its weights compared, its planned faults suffered."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from training import Workers, plan

from raytrain_llama3.checkpoint.store import CheckpointStore
from raytrain_llama3.config.plan import RunPlan
from raytrain_llama3.data.feed import Link
from raytrain_llama3.errors import RankError
from raytrain_llama3.launch.process import CONTROL
from raytrain_llama3.messages import EndReason, FailureKind, Phase, RankResult, RankSpec, Rendezvous, ResumePoint
from raytrain_llama3.train.worker import TrainWorker

PATIENCE_S = 120


class Watched(TrainWorker):
    """A real worker that can also be looked into, and whose process can be used again after an error."""

    def run(
        self,
        plan: RunPlan,
        spec: RankSpec,
        rendezvous: Rendezvous,
        resume: ResumePoint | None,
        link: Link | None = None,
    ) -> RankResult:
        self.error: BaseException | None = None
        try:
            return super().run(plan, spec, rendezvous, resume, link)
        except BaseException as error:
            self.error = error  # What it holds must not keep the attempt alive.
            self._leave()
            raise

    def held_numbers(self) -> int:
        """How many numbers the tensors of this process hold."""
        import torch

        gc.collect()
        return sum(t.numel() for t in gc.get_objects() if isinstance(t, torch.Tensor))

    def _leave(self) -> None:
        """Leave the attempt's groups: a rank that waits for this one, not for the lost one, then sees it go."""
        import torch.distributed as dist
        from megatron.core import parallel_state, tensor_parallel

        if dist.is_initialized():
            parallel_state.destroy_model_parallel()
            tensor_parallel.random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False
            dist.destroy_process_group()
            gc.collect()

    def stop_in(self, phase: Phase, save: bool) -> None:
        """Have `request_stop` called the next time that this rank enters `phase`."""
        enter = self._reporter.enter

        def enter_and_ask(entered: Phase) -> None:
            enter(entered)
            if entered is phase:
                self._reporter.enter = enter  # type: ignore[method-assign]
                self.request_stop(save)

        self._reporter.enter = enter_and_ask  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def four(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Workers:
    return Workers(4, Path(tmp_path_factory.mktemp("logs")), Watched)


@pytest.fixture
def mortals(local_ray: None, tmp_path: Path) -> Iterator[Callable[[int], Workers]]:
    """Workers of a test's own, for faults that end processes."""
    made: list[Workers] = []

    def make(count: int) -> Workers:
        made.append(Workers(count, tmp_path / "logs", Watched))
        return made[-1]

    yield make
    for workers in made:
        workers.close()


def errors(refs: list[Any]) -> list[Any]:
    """What each rank was ended by, in rank order: a `RankError`, or Ray's error for a process that is gone."""
    found = []
    for ref in refs:
        with pytest.raises((RankError, ray.exceptions.RayError)) as caught:
            ray.get(ref, timeout=PATIENCE_S)
        found.append(getattr(caught.value, "cause", None) or caught.value)
    return found


def failed_alike(workers: Workers, run_plan: RunPlan, resume: ResumePoint | None = None, attempt: int = 0) -> RankError:
    """The error of an attempt that ends all its ranks in the same way."""
    found = errors(workers.start(run_plan, resume, attempt))
    assert all(isinstance(error, RankError) for error in found)
    assert len({(e.kind, str(e), e.code, e.culprit) for e in found}) == 1
    return found[0]


# What a rank raises, told in words


def test_an_exception_is_told_in_one_line_and_its_traceback_is_in_the_log(four: Workers, tmp_path: Path) -> None:
    run_plan = plan(tmp_path, "--train-iters", "3", "--rehearse-faults", "0:0:2:exception")
    error = failed_alike(four, run_plan)
    assert (error.kind, error.code, error.culprit) == (FailureKind.EXCEPTION, None, None)
    assert str(error) == "RuntimeError: rehearsed: an exception in rank 0 at step 2"
    assert [s.step for s in four.poll(0).steps] == [1]
    assert "Traceback (most recent call last)" in run_plan.paths.rank_log(0, 0).read_text()


def test_memory_that_is_not_there_comes_with_its_remedies(four: Workers, tmp_path: Path) -> None:
    error = failed_alike(four, plan(tmp_path, "--train-iters", "1", "--ffn-hidden-size", str(10**12)))
    assert (error.kind, error.code) == (FailureKind.OUT_OF_MEMORY, None)
    for remedy in ("micro_batch_size (now 2)", "tp_size (now 1)", "pp_size (now 1)", "recompute_activations (now "):
        assert remedy in str(error)


def test_numbers_that_stay_nan_end_with_their_exit_code(four: Workers, tmp_path: Path) -> None:
    flags = ("--train-iters", "9", "--max-nonfinite-steps", "2", "--tp-size", "2", "--pp-size", "2")
    error = failed_alike(four, plan(tmp_path, *flags, "--rehearse-faults", "0:1:2:nan", world=4))
    assert (error.kind, error.code) == (FailureKind.NON_FINITE, 4)
    assert "loss nan" in str(error)
    assert [s.skipped for s in four.poll(0).steps] == [False, True, True]


def test_an_error_of_ours_keeps_its_code_and_words(four: Workers, tmp_path: Path) -> None:
    nowhere = ResumePoint(str(tmp_path / "nowhere"), 1, 8)
    error = failed_alike(four, plan(tmp_path, "--train-iters", "3"), nowhere)
    assert (error.kind, error.code) == (FailureKind.EXCEPTION, 3)
    assert str(error).startswith(f"{nowhere.path}: does not load into this model")


def test_errors_before_an_attempt_are_told_in_the_same_words(four: Workers) -> None:
    (error,) = errors([four.actors[0].open_store.remote("127.0.0.1", 10**6)])
    assert isinstance(error, RankError)
    assert error.kind == FailureKind.EXCEPTION


def test_nothing_of_a_failed_attempt_is_held(four: Workers, tmp_path: Path) -> None:
    before = ray.get(four.actors[0].held_numbers.remote())
    run_plan = plan(tmp_path, "--train-iters", "3", "--rehearse-faults", "0:0:2:exception")
    failed_alike(four, run_plan)
    # The model alone has four times as many.
    assert ray.get(four.actors[0].held_numbers.remote()) < before + 50_000


# A rank that dies, and those that are left


def test_a_rank_that_is_killed_in_an_all_reduce_is_missed_by_another(
    mortals: Callable[[int], Workers], tmp_path: Path
) -> None:
    workers = mortals(4)
    run_plan = plan(
        tmp_path, "--train-iters", "5", "--micro-batch-size", "1", "--rehearse-faults", "1:2:3:kill", world=4
    )
    first = workers.run(run_plan)[1]
    assert [s.step for s in first.steps] == [1, 2, 3, 4, 5], "the fault is another attempt's"
    refs = workers.start(run_plan, attempt=1)
    killed = refs.pop(2)
    assert isinstance(errors([killed])[0], ray.exceptions.RayActorError)
    # A rank further along the ring may wait for one of these until its time is over.
    (missed,), _ = ray.wait(refs, timeout=PATIENCE_S)
    (found,) = errors([missed])
    assert (found.kind, found.code, found.culprit) == (FailureKind.PEER_LOST, None, None)
    assert [s.step for s in workers.poll(0).steps] == [1, 2]


def test_a_rank_that_crashes_leaves_its_stacks_in_its_log(mortals: Callable[[int], Workers], tmp_path: Path) -> None:
    workers = mortals(2)
    run_plan = plan(
        tmp_path, "--train-iters", "3", "--micro-batch-size", "1", "--rehearse-faults", "0:1:2:segfault", world=2
    )
    found = errors(workers.start(run_plan))
    assert isinstance(found[1], ray.exceptions.RayActorError)
    assert found[0].kind == FailureKind.PEER_LOST
    log = run_plan.paths.rank_log(0, 1).read_text()
    assert "Fatal Python error: Segmentation fault" in log
    assert "rehearsal.py" in log
    assert log.count("(most recent call first)") > 1, "the stacks of all threads"


def test_a_rank_that_leaves_says_nothing(mortals: Callable[[int], Workers], tmp_path: Path) -> None:
    workers = mortals(1)
    run_plan = plan(tmp_path, "--train-iters", "3", "--rehearse-faults", "0:0:2:exit")
    (found,) = errors(workers.start(run_plan))
    assert isinstance(found, ray.exceptions.RayActorError)
    assert "Traceback" not in run_plan.paths.rank_log(0, 0).read_text()


def test_a_rank_that_stops_is_waited_for_until_the_time_is_over(
    mortals: Callable[[int], Workers], tmp_path: Path
) -> None:
    workers = mortals(2)
    flags = ("--train-iters", "3", "--micro-batch-size", "1", "--distributed-timeout-minutes", "1")
    waiting, _ = workers.start(plan(tmp_path, *flags, "--rehearse-faults", "0:1:2:stop", world=2))
    (found,) = errors([waiting])
    assert (found.kind, found.code) == (FailureKind.TIMED_OUT, None)
    assert "distributed_timeout_minutes (now 1)" in str(found)
    assert "GLOO_SOCKET_IFNAME (now lo)" in str(found)
    with pytest.raises(ray.exceptions.GetTimeoutError):
        ray.get(workers.actors[1].poll.options(concurrency_group=CONTROL).remote(), timeout=1)


def test_a_rank_killed_while_it_saves_leaves_a_wreck_and_no_error_of_the_folder(
    mortals: Callable[[int], Workers], tmp_path: Path
) -> None:
    workers = mortals(2)
    flags = ("--train-iters", "4", "--micro-batch-size", "1", "--save-interval", "2")
    run_plan = plan(tmp_path, *flags, "--rehearse-faults", "0:1:1:kill_saving", world=2)
    refs = workers.start(run_plan)
    ray.wait(refs, timeout=PATIENCE_S)
    # As the driver does when a rank falls: no collective is under way in a save that would tell of it.
    workers.actors[0].let_go.options(concurrency_group=CONTROL).remote()
    found = errors(refs)
    assert isinstance(found[1], ray.exceptions.RayActorError)
    assert (found[0].kind, found[0].code) == (FailureKind.PEER_LOST, None)
    store = CheckpointStore(run_plan.paths.checkpoints, keep=None)
    assert (store.complete(), store.wrecks()) == ([], [2])
    assert list((run_plan.paths.checkpoints / "iter_0000002").glob("__1_*.distcp")) != []


# Weights that differ


COMPARED = ("--train-iters", "4", "--micro-batch-size", "1", "--replica-check-interval", "1")
LAYOUTS = {
    "dp4": (4, 2, ()),
    "dp4-whole-optimizer": (4, 1, ("--use-distributed-optimizer", "0", "--overlap-param-gather", "0")),
    "tp2": (4, 3, ("--tp-size", "2")),
    "pp2": (4, 2, ("--pp-size", "2")),
    "dp2-first": (2, 0, ()),
    "dp2-second": (2, 1, ()),
    "dp2-not-overlapped": (2, 1, ("--overlap-param-gather", "0")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_flipped_bit_is_found_and_its_rank_named(four: Workers, tmp_path: Path, layout: str) -> None:
    world, rank, flags = LAYOUTS[layout]
    fault = f"0:{rank}:3:bit_flip"
    flags = ("--dtype", "bf16", "--overlap-param-gather", "1", "--overlap-grad-reduce", "1", *flags)
    error = failed_alike(four, plan(tmp_path, *COMPARED, *flags, "--rehearse-faults", fault, world=world))
    assert (error.kind, error.code, error.culprit) == (FailureKind.CORRUPTED, 138, rank)
    assert f"rank {rank} holds other weights at step 3" in str(error)
    assert "linear_fc1.weight" in str(error)
    assert [s.step for s in four.poll(0).steps] == [1, 2]


def test_two_fp32_replicas_have_no_witness(four: Workers, tmp_path: Path) -> None:
    flags = (*COMPARED, "--dtype", "fp32", "--rehearse-faults", "0:1:3:bit_flip")
    error = failed_alike(four, plan(tmp_path, *flags, world=2))
    assert (error.kind, error.culprit) == (FailureKind.CORRUPTED, None)
    assert "ranks 0, 1 should hold the same weights and do not at step 3" in str(error)


def test_a_step_that_is_saved_is_compared_too(four: Workers, tmp_path: Path) -> None:
    flags = ("--train-iters", "4", "--micro-batch-size", "1", "--replica-check-interval", "100", "--dtype", "bf16")
    rehearsed = ("--save-interval", "3", "--rehearse-faults", "0:1:3:bit_flip")
    run_plan = plan(tmp_path, *flags, *rehearsed, world=4)
    error = failed_alike(four, run_plan)
    assert (error.kind, error.culprit) == (FailureKind.CORRUPTED, 1)
    assert not run_plan.paths.checkpoints.exists() or list(run_plan.paths.checkpoints.glob("iter_*")) == []


@pytest.mark.parametrize("layout", ["dp4", "tp2", "pp2"])
def test_replicas_that_are_alike_are_let_be(four: Workers, tmp_path: Path, layout: str) -> None:
    world, _, flags = LAYOUTS[layout]
    # A shard that had not been gathered yet would differ from its owner's after the first step.
    flags = ("--dtype", "bf16", "--overlap-param-gather", "1", "--overlap-grad-reduce", "1", *flags)
    plain = four.run(plan(tmp_path / "plain", *COMPARED[:-2], *flags, world=world))[1]
    compared = four.run(plan(tmp_path / "compared", *COMPARED, *flags, "--save-interval", "2", world=world))[1]
    assert [s.step for s in compared.saves] == [2, 4]
    assert compared.losses == plain.losses
    assert len(set(plain.losses)) == 4


# The wish to stop


@pytest.mark.parametrize(("phase", "stopped_at"), [(Phase.TRAIN, 2), (Phase.SAVE, 3)])
@pytest.mark.parametrize("save", [True, False])
def test_one_rank_asked_to_stop_stops_all_at_one_step(
    four: Workers, tmp_path: Path, phase: Phase, stopped_at: int, save: bool
) -> None:
    ray.get(four.actors[2].stop_in.remote(phase, save))
    flags = ("--train-iters", "9", "--micro-batch-size", "1", "--save-interval", "3", "--save-at-end", "1")
    run_plan = plan(tmp_path, *flags, world=4)
    results = four.run(run_plan)[0]
    assert {(r.reason, r.step) for r in results} == {(EndReason.STOP, stopped_at)}
    is_saved = save or phase is Phase.SAVE
    assert {r.saved_step for r in results} == {stopped_at if is_saved else None}
    assert (run_plan.paths.checkpoints / f"iter_{stopped_at:07d}").exists() == is_saved


def test_asked_not_to_save_in_an_evaluation_no_rank_saves(four: Workers, tmp_path: Path) -> None:
    ray.get(four.actors[1].stop_in.remote(Phase.EVALUATE, False))
    flags = ("--train-iters", "9", "--micro-batch-size", "1", "--eval-interval", "2", "--save-at-end", "1")
    results = four.run(plan(tmp_path, *flags, world=4))[0]
    assert {(r.reason, r.step, r.saved_step) for r in results} == {(EndReason.STOP, 2, None)}


# What a rank tells of its progress


def test_every_phase_step_and_evaluation_round_is_a_move(four: Workers, tmp_path: Path) -> None:
    before = four.poll(0).moves
    flags = ("--train-iters", "4", "--eval-interval", "2", "--eval-iters", "3", "--save-interval", "2")
    four.run(plan(tmp_path, *flags))
    phases = ["process_group", "model", "first_step", "train", *["evaluate", "train", "save", "train"] * 2, "done"]
    assert four.poll(0).moves - before == len(phases) + 4 + 2 * 3


def test_a_slow_rank_stands_out_by_its_own_work(four: Workers, tmp_path: Path) -> None:
    flags = ("--train-iters", "12", "--micro-batch-size", "1", "--rehearse-faults", "0:1:1:slow")
    ray.get(four.start(plan(tmp_path, *flags, world=2)))
    fast, slow = (four.poll(rank).work for rank in (0, 1))
    assert fast is not None
    assert slow is not None
    assert fast.steps == slow.steps == 12
    assert slow.own_s > 1.5 * fast.own_s
    assert slow.step_s < 1.2 * fast.step_s
    assert 0 < fast.own_s < fast.step_s
    assert four.poll(1).work is None, "handed out once"
