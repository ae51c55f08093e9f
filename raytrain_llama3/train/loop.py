"""The training loop of one rank: step, report, evaluate, save, until the target or a request to stop."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from megatron.core.utils import get_model_config

from raytrain_llama3.checkpoint import torch_dist
from raytrain_llama3.checkpoint.folder import differences, iteration_path, read_sidecar
from raytrain_llama3.checkpoint.kept import KeptSource
from raytrain_llama3.checkpoint.reading import FolderSource
from raytrain_llama3.checkpoint.torch_dist import Progress
from raytrain_llama3.config.plan import RunPlan
from raytrain_llama3.data.feed import RankFeed
from raytrain_llama3.errors import CheckpointError, NonFiniteError
from raytrain_llama3.messages import EndReason, EvalRecord, Phase, PlannedFault, RankResult, ResumePoint, StepRecord
from raytrain_llama3.train.gauge import Gauge
from raytrain_llama3.train.model import build_model, forget_tables
from raytrain_llama3.train.optimizer import build_optimizer, build_schedule
from raytrain_llama3.train.process import Process, reseed
from raytrain_llama3.train.profiler import Profiler
from raytrain_llama3.train.rehearsal import Rehearsal
from raytrain_llama3.train.replicas import Replicas
from raytrain_llama3.train.reporter import Reporter
from raytrain_llama3.train.saving import open_kept_saves, open_saves, sidecar_of
from raytrain_llama3.train.step import StepOutcome, Stepper
from raytrain_llama3.train.stop import StopRequest, Votes

_GC_INTERVAL_STEPS = 100


def train(
    plan: RunPlan,
    process: Process,
    resume: ResumePoint | None,
    reporter: Reporter,
    stop: StopRequest,
    versions: dict[str, str],
    feed: RankFeed,
    planned: Sequence[PlannedFault] = (),
) -> RankResult:
    """Build the model, load `resume` if there is one, and train to the end. Collective over all ranks.

    `feed` is closed at the end. `planned` are the faults that this rank is to suffer in this attempt.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(forget_tables)
        stack.callback(feed.close)
        # Read while the model is built.
        feed.begin("train", resume.samples if resume is not None else 0)
        reporter.enter(Phase.MODEL)
        loop = TrainingLoop(plan, process, resume, reporter, stop, versions, feed)
        stack.callback(loop.untie)
        stack.callback(loop.close_saves)
        if resume is not None:
            reporter.enter(Phase.LOAD)
            loop.load(resume)
        reporter.enter(Phase.FIRST_STEP)
        if planned:
            stack.enter_context(loop.rehearsing(planned))
        result = loop.run()
        reporter.enter(Phase.DONE)
        return result


class TrainingLoop:
    """State of a run in progress: the model, and how many steps and samples it has seen."""

    def __init__(
        self,
        plan: RunPlan,
        process: Process,
        resume: ResumePoint | None,
        reporter: Reporter,
        stop: StopRequest,
        versions: dict[str, str],
        feed: RankFeed,
    ) -> None:
        self._plan, self._process, self._reporter, self._stop = plan, process, reporter, stop
        self._versions, self._feed = versions, feed
        self._chunks = build_model(plan, process)
        self._optimizer = build_optimizer(plan, self._chunks)
        self._own_state = torch_dist.OwnState(process.rank, self._chunks, self._optimizer)
        self._stepper = Stepper(plan, process, self._chunks, self._optimizer, feed.end_of_document)
        self._step, self._samples = 0, 0
        self._schedule = build_schedule(plan, self._optimizer, 0)
        self._saved_step: int | None = None
        self._loaded: int | None = None
        self._evaluated_step: int | None = None
        self._nonfinite_steps = 0
        self._agreed = Votes()
        self._first = True
        self._replicas = self._replicas_to_compare()
        self._rehearsal: Rehearsal | None = None
        self._profiler = Profiler(plan, process)
        self._gauge = Gauge(plan, process)
        self.saves = open_saves(plan, process, reporter, stop)
        self.kept_saves = open_kept_saves(plan, process, resume, reporter, stop)
        for warning in process.warnings:
            reporter.add(warning)

    def untie(self) -> None:
        """Let the model go without the optimizer, once it has trained.

        Megatron-core's configuration holds the optimizer. In fp32 the optimizer's shards are views of the weights,
        whose graph holds the hooks that hold the model: a ring through C++ that Python's collector cannot see.
        """
        for chunk in self._chunks:
            get_model_config(chunk).grad_scale_func = None

    def load(self, resume: ResumePoint) -> None:
        """Continue from a checkpoint, or start from its weights."""
        path = Path(resume.path)
        source = KeptSource(resume.kept, (resume.kept_in_attempt, resume.step)) if resume.kept else FolderSource(path)
        if resume.weights_only:
            torch_dist.load_weights(source, self._chunks, self._optimizer)
            return
        progress = torch_dist.load(source, self._chunks, self._optimizer)
        # Loading may have given the optimizer other tensors.
        self._own_state = torch_dist.OwnState(self._process.rank, self._chunks, self._optimizer)
        self._step, self._samples = progress.step, progress.samples
        self._schedule = build_schedule(self._plan, self._optimizer, self._samples)
        self._reporter.at_step(self._step)
        if resume.kept:
            return
        self._saved_step = self._loaded = self._step
        if self._process.rank == 0:
            for line in differences(read_sidecar(path), self._sidecar()):
                self._reporter.add(f"resuming {path.name}: {line}")

    def close_saves(self) -> None:
        """Drop saves that are under way, if any."""
        for saves in (self.saves, self.kept_saves):
            if saves is not None:
                saves.close()

    def rehearsing(self, planned: Sequence[PlannedFault]) -> Rehearsal:
        """Let `planned` strike while `run` is in the block."""
        self._rehearsal = Rehearsal(planned, self._chunks)
        return self._rehearsal

    def run(self) -> RankResult:
        """Train until the target, the time limit or a request to stop; evaluate and save on the way and at the end."""
        if self._plan.config.manual_gc:
            gc.disable()
        reason = EndReason.TARGET
        while not self._is_at_target():
            self._one_step()
            self._keep_if_due()
            if not self._agreed.end_reason:
                self._evaluate_if_due(self._plan.config.eval_interval)
            if not self._agreed.end_reason and self._save_if_due(self._plan.config.save_interval):
                # Asked to stop while it saved: another step would only be lost.
                self._agreed = self._stepper.agree(self._stop.votes())
            if ended := self._agreed.end_reason:
                reason = ended
                break
        if reason is EndReason.TARGET and self._plan.config.eval_interval:
            self._evaluate_if_due(1)
        if self._plan.config.save_at_end and not self._agreed.unsaved:
            self._save_if_due(1)
        return RankResult(self._process.rank, self._step, self._samples, reason, self._settled(reason))

    def _is_at_target(self) -> bool:
        """Counted in samples, which lets a run go on with another global batch; or in steps, if they were asked for."""
        if self._plan.config.train_iters is not None:
            return self._step >= self._plan.config.train_iters
        return self._samples + self._plan.layout.global_batch_size > self._plan.config.train_samples

    def _one_step(self) -> None:
        self._profiler.before_step(self._step + 1)
        if self._rehearsal is not None:
            self._rehearsal.before_step(self._step + 1)
        started = time.perf_counter()
        if self._plan.config.hidden_dropout or self._plan.config.attention_dropout:
            reseed(self._plan.config.seed, self._step)
        learning_rate = float(self._optimizer.param_groups[0]["lr"])
        ends_at = self._plan.ends_at
        late = self._process.rank == 0 and ends_at is not None and time.time() > ends_at
        outcome = self._stepper.train(
            self._feed.micro_batches("train", self._samples),
            self._stop.votes(late=late),
            self._compare_in_step if self._replicas else None,
        )
        self._agreed = outcome.votes
        self._step += 1
        self._samples += self._plan.layout.global_batch_size
        # Also after a step that left the weights alone: the learning rate is a function of the samples seen.
        self._schedule.step(increment=self._plan.layout.global_batch_size)
        self._report(outcome, learning_rate, time.perf_counter() - started)
        self._check_finite(outcome)
        for line in self._profiler.after_step(self._step):
            self._reporter.add(line)
        self._empty_cache(2)
        if self._plan.config.manual_gc and self._step % _GC_INTERVAL_STEPS == 0:
            gc.collect()

    def _replicas_to_compare(self) -> Replicas | None:
        has_replicas = self._plan.layout.dp * self._plan.layout.cp > 1
        if not (self._plan.config.replica_check_interval and has_replicas):
            return None
        return Replicas(self._process, self._chunks, self._optimizer)

    def _compare_in_step(self, loss_is_finite: bool) -> None:
        """Where it is due; before a step that is saved; and where a flipped bit may be why there is no finite loss."""
        c, step = self._plan.config, self._step + 1
        intervals = (c.replica_check_interval, c.save_interval, c.memory_checkpoint_interval)
        if self._replicas and (not loss_is_finite or any(i and step % i == 0 for i in intervals)):
            self._replicas.compare(step)

    def _empty_cache(self, level: int) -> None:
        if self._plan.device == "cuda" and self._plan.config.empty_unused_memory_level >= level:
            torch.cuda.empty_cache()

    def _report(self, outcome: StepOutcome, learning_rate: float, seconds: float) -> None:
        if self._first:
            self._reporter.enter(Phase.TRAIN)
            self._first = False
        self._reporter.at_step(self._step)
        self._reporter.worked(outcome.own_s, seconds)
        if self._process.rank == 0:
            self._reporter.add(
                StepRecord(
                    step=self._step,
                    samples=self._samples,
                    tokens=outcome.tokens,
                    loss=outcome.loss,
                    learning_rate=learning_rate,
                    grad_norm=outcome.grad_norm,
                    step_s=seconds,
                    finished_at=time.time(),
                    peak_memory_bytes=torch.cuda.max_memory_allocated() if self._plan.device == "cuda" else 0,
                    skipped=not outcome.applied,
                    product_flops=self._gauge.product_flops,
                    power_w=self._gauge.power_w(),
                )
            )

    def _check_finite(self, outcome: StepOutcome) -> None:
        if math.isfinite(outcome.loss) and (math.isfinite(outcome.grad_norm) or self._plan.config.dtype == "fp16"):
            self._nonfinite_steps = 0
            return
        self._nonfinite_steps += 1
        limit, first_sample = self._plan.config.max_nonfinite_steps, self._samples - self._plan.layout.global_batch_size
        if self._nonfinite_steps >= limit:
            raise NonFiniteError(
                f"loss {outcome.loss}, gradient norm {outcome.grad_norm} at step {self._step}, not finite for {limit} "
                f"steps in a row (max_nonfinite_steps); the weights were left alone. Lower learning_rate, lengthen "
                f"lr_warmup_samples, or look at the data of samples {first_sample} to "
                f"{self._samples}"
            )

    def _evaluate_if_due(self, interval: int) -> None:
        if interval and self._step % interval == 0 and self._evaluated_step != self._step:
            self._evaluate()

    def _evaluate(self) -> None:
        self._reporter.enter(Phase.EVALUATE)
        started, total, tokens = time.perf_counter(), 0.0, 0
        batch_size = self._plan.layout.global_batch_size
        # The same windows every time, so that losses compare.
        rounds = max(1, min(self._plan.config.eval_iters, self._feed.valid_samples // batch_size))
        self._feed.begin("valid", 0, rounds * batch_size)
        for i in range(rounds):
            batches = self._feed.micro_batches("valid", i * batch_size)
            batch_total, batch_tokens, self._agreed = self._stepper.evaluate(batches, self._stop.votes())
            self._reporter.at_round()
            if self._agreed.stop:
                # What is asked for now is a checkpoint, in little time: half an evaluation is worth nothing.
                self._feed.end("valid")
                self._reporter.enter(Phase.TRAIN)
                return
            total, tokens = total + batch_total, tokens + batch_tokens
        self._feed.end("valid")
        if self._process.rank == 0:
            self._reporter.add(
                EvalRecord(self._step, total / max(tokens, 1), tokens, time.perf_counter() - started, time.time())
            )
        self._evaluated_step = self._step
        self._empty_cache(1)
        self._reporter.enter(Phase.TRAIN)

    def _keep_if_due(self) -> None:
        """Send this step's numbers to the keepers: the copy is all that training waits for."""
        interval = self._plan.config.memory_checkpoint_interval
        if self.kept_saves is None or self._step % interval or self._nonfinite_steps:
            return
        progress = Progress(self._step, self._samples)
        files = self._own_state.files(progress)
        self.kept_saves.begin(Path(str(self._step)), self._step, self._samples, files, {})

    def _save_if_due(self, interval: int) -> bool:
        """Whether it was due and there is now a checkpoint of this step that was not there before."""
        if not interval or self._step % interval or self._step in (0, self._saved_step):
            return False
        if self._nonfinite_steps:
            # Weights that give no finite loss must not take the place of a good checkpoint.
            self._reporter.add(f"step {self._step} is not saved: its loss or gradient norm was not finite")
            return False
        self._save()
        return True

    def _save(self) -> None:
        """Returns when the weights may change again: saved, or copied to be written while training goes on."""
        self._reporter.enter(Phase.SAVE)
        path = iteration_path(self._plan.paths.checkpoints, self._step)
        if self._replicas:
            # Also after the update: any replica's copy may be the one that is written.
            torch_dist.gather_weights(self._chunks)
            self._replicas.compare(self._step)
        progress = Progress(self._step, self._samples)
        files = self._own_state.files(progress)
        self.saves.begin(path, self._step, self._samples, files, self._sidecar())
        self._saved_step = self._step
        self._reporter.enter(Phase.TRAIN)

    def _settled(self, reason: EndReason) -> int | None:
        """Wait for the save that is under way; the step of the newest one.

        Raises `CheckpointError` when the run has reached its end and that is not saved.
        """
        if self.saves.is_under_way:
            self._reporter.enter(Phase.SAVE)
            self.saves.settle()
        saved = self.saves.saved_step
        if reason is not EndReason.STOP and self._saved_step == self._step and self._step not in (saved, self._loaded):
            raise CheckpointError(
                f"step {self._step}, the last one, {self.saves.last_failure}; make room and start the same command "
                "again: it goes on from the newest checkpoint"
            )
        return self._loaded if saved is None else saved

    def _sidecar(self) -> dict[str, object]:
        rate = float(self._optimizer.param_groups[0]["lr"])
        return sidecar_of(self._plan, self._versions, self._samples, rate, self._feed.fingerprint)
