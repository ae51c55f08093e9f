"""The command line: what each command does, and the exit code that it ends with."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from raytrain_llama3 import __version__
from raytrain_llama3.commands import cluster
from raytrain_llama3.config import env, estimate, flags, machine, rules
from raytrain_llama3.config.load import Loaded, load, table
from raytrain_llama3.config.plan import DeviceSupply, RunPlan
from raytrain_llama3.config.summary import summary
from raytrain_llama3.errors import ConfigError, RaytrainError
from raytrain_llama3.launch.signals import StopSignal

if TYPE_CHECKING:
    from raytrain_llama3.launch.pod import Pod
    from raytrain_llama3.launch.session import Session
    from raytrain_llama3.messages import RunResult
    from raytrain_llama3.metrics import RunFacts, Summary

PROGRAM = "raytrain-llama3"

_COMMANDS_HELP = f"""commands:
  {PROGRAM} [train] …       train (the default command)
  {PROGRAM} plan …          check the same options and show every value, without training
  {PROGRAM} check …         look at every node and try every device
  {PROGRAM} submit … -- …   train as a job of a Ray cluster, and follow it
  {PROGRAM} data …          tokenize text into Arrow shards, look at data, convert it
  {PROGRAM} checkpoint …    list, verify and show checkpoints; export to and import from Hugging Face
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    items = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Lines appear at once, also through a pipe or in a job's log.
        sys.stdout.reconfigure(line_buffering=True)
    command: Callable[[list[str]], int] = _train
    if items and items[0] in _COMMANDS:
        command = _COMMANDS[items.pop(0)]
    try:
        return command(items)
    except RaytrainError as error:
        _complain(error)
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


def _train(argv: list[str]) -> int:
    if _wants_help(argv):
        return 0
    began = time.monotonic()
    loaded = load(argv, env.snapshot())
    env.set_defaults(loaded.environ)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopSignal())
        stack.enter_context(stop.unwrapped())
        pod = cluster.introduce(loaded, _say)
        if pod is not None and not pod.pods.is_head:
            return _serve(pod, stop)
        session, plan, supply = _connect(loaded, stack, stop, pod)
        _introduce(loaded, plan, supply)
        try:
            code, end, numbers = _supervise(plan, session, stack, stop)
        except RaytrainError as error:
            code, end, numbers = *_ended_badly(error), None
        if session is not None and session.farewell is not None:
            session.farewell.tell(code)
    from raytrain_llama3.launch import result

    saved = result.saved_step(plan.paths)
    result.leave(plan.paths, code, end, saved)
    _say(_closing(plan, code, end, saved, numbers, time.monotonic() - began))
    return code


def _introduce(loaded: Loaded, plan: RunPlan, supply: DeviceSupply) -> None:
    _say(summary(loaded, plan, supply))
    for line in (
        *loaded.warnings,
        *rules.adjustments(plan.config, supply),
        *rules.tight_memory(plan, supply),
        *_folders_note(loaded, plan),
    ):
        _say(f"note: {line}")


def _folders_note(loaded: Loaded, plan: RunPlan) -> list[str]:
    here = Path.cwd()
    inside = [path for path in (plan.paths.checkpoints, plan.paths.tensorboard) if path.is_relative_to(here)]
    if not inside or env.IN_A_JOB not in loaded.environ:
        return []
    return [
        f"{' and '.join(map(str, inside))}: inside Ray's copy of the working folder, which goes with the cluster; give "
        "absolute paths to keep them"
    ]


def _serve(pod: Pod, stop: StopSignal) -> int:
    from raytrain_llama3.launch import joiner

    rules.check_anywhere(pod.loaded)
    code = joiner.serve(pod, stop)
    _say(f"pod {pod.pods.rank} ends as pod 0 did: exit code {code}")
    return code


def _connect(
    loaded: Loaded, stack: contextlib.ExitStack, stop: StopSignal, pod: Pod | None = None
) -> tuple[Session | None, RunPlan, DeviceSupply]:
    """The plan, checked before Ray starts; and the cluster, already joined where one was named or pods form it."""
    if loaded.config.ray_address is None and pod is None:
        supply = machine.local_supply(loaded.config, loaded.environ)
        return None, rules.plan_run(loaded, supply, machine.cores()), supply
    from raytrain_llama3.launch.supply import cluster_supply

    rules.check_anywhere(loaded)
    joined = cluster.joined(loaded, pod, stack, stop)
    assert joined is not None
    supply, cores = cluster_supply(joined, loaded.config)
    return joined, rules.plan_run(loaded, supply, cores), supply


def _supervise(
    plan: RunPlan, joined: Session | None, stack: contextlib.ExitStack, stop: StopSignal
) -> tuple[int, str, Summary]:
    from raytrain_llama3 import data, metrics
    from raytrain_llama3.checkpoint.store import CheckpointStore
    from raytrain_llama3.launch import session
    from raytrain_llama3.launch.checkpoints import changes_since, starting_point
    from raytrain_llama3.launch.ray_metrics import RayMetricsSink
    from raytrain_llama3.launch.supervisor import Supervisor
    from raytrain_llama3.train.worker import TrainWorker

    sources = data.prepare(plan, _say)
    began = time.monotonic()
    store = CheckpointStore(plan.paths.checkpoints, plan.config.max_checkpoints, plan.config.keep_every)
    stack.enter_context(store.lock())
    # Before Ray starts: with only wrecks there, nothing is to be started.
    resume = starting_point(store, plan)
    for line in changes_since(resume, sources.fingerprint(), accept=plan.config.data_changed == "accept"):
        _say(f"note: data changed: {line}")
    here = joined or stack.enter_context(session.start(plan.config, plan.device, plan.layout.world_size, stop))
    if here.dashboard_url:
        _say(f"Ray dashboard: http://{here.dashboard_url}{session.token_hint()}")
    c = plan.config
    board = stack.enter_context(
        metrics.open_metrics(
            _facts(plan),
            plan.paths.tensorboard,
            sys.stdout,
            c.wandb_project,
            c.wandb_run_name or c.exp_name,
            c.model_dump(mode="json"),
            also=[RayMetricsSink(c.exp_name)],
        )
    )
    ray_s = time.monotonic() - began
    try:
        with stop.unwrapped():
            result = Supervisor(plan, TrainWorker, here, store, board, stop, sources).run()
        code, end = 0, _ended_well(plan, result, ray_s)
    except RaytrainError as error:
        code, end = _ended_badly(error)
    return code, end, board.ended(code)


def _ended_badly(error: RaytrainError) -> tuple[int, str]:
    _complain(error)
    return error.exit_code, f"ended by {type(error).__name__}: {str(error).splitlines()[0]}"


def _ended_well(plan: RunPlan, result: RunResult, ray_s: float) -> str:
    seconds = {"ray": ray_s} | result.phase_seconds
    spent = ", ".join(f"{name} {value:.1f}" for name, value in seconds.items() if value >= 0.05)
    target = "" if result.step >= plan.train_steps else f" (the target was step {plan.train_steps})"
    return f"{result.reason.value}: step {result.step}, {result.samples} samples{target}\n  seconds      {spent}"


def _closing(plan: RunPlan, code: int, end: str, saved: int | None, numbers: Summary | None, seconds: float) -> str:
    from raytrain_llama3.metrics.console import summary_lines

    rows = [end, *(f"  {line}" for line in (summary_lines(numbers) if numbers is not None else ()))]
    rows += [
        f"  exit code    {code}, after {seconds:.1f} s",
        f"  checkpoints  {plan.paths.checkpoints}",
        f"  tensorboard  {plan.paths.tensorboard}",
        "  saved        " + ("no complete checkpoint" if saved is None else f"up to step {saved}"),
    ]
    return "\n".join(rows)


def _facts(plan: RunPlan) -> RunFacts:
    from raytrain_llama3.metrics import RunFacts

    return RunFacts(
        train_steps=plan.train_steps,
        global_batch_size=plan.layout.global_batch_size,
        devices=plan.layout.world_size,
        flops_per_token=estimate.flops_per_token(plan.config),
        peak_flops=plan.peak_flops,
        log_interval=plan.config.log_interval,
        log_throughput=plan.config.log_throughput,
        device=plan.device,
    )


def _plan(argv: list[str]) -> int:
    if _wants_help(argv):
        return 0
    loaded = load(argv, env.snapshot())
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopSignal())
        stack.enter_context(stop.unwrapped())
        _, plan, supply = _connect(loaded, stack, stop)
        _introduce(loaded, plan, supply)
        _say("\nevery option:\n" + table(loaded))
    return 0


def _data(argv: list[str]) -> int:
    from raytrain_llama3.commands import data

    return data.run(PROGRAM, argv, _say)


def _checkpoint(argv: list[str]) -> int:
    from raytrain_llama3.checkpoint import command

    return command.run(argv, PROGRAM, _say)


def _check(argv: list[str]) -> int:
    from raytrain_llama3.commands import check

    return check.run(PROGRAM, argv, sys.stdout.write)


def _submit(argv: list[str]) -> int:
    from raytrain_llama3.commands import submit

    return submit.run(PROGRAM, argv, sys.stdout.write)


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "plan": _plan,
    "data": _data,
    "checkpoint": _checkpoint,
    "check": _check,
    "submit": _submit,
}


def _wants_help(argv: Sequence[str]) -> bool:
    if "--version" in argv:
        _say(__version__)
        return True
    if "--help" in argv or "-h" in argv:
        _say(_COMMANDS_HELP + "\n" + flags.help_text(PROGRAM))
        return True
    return False


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def _complain(error: RaytrainError) -> None:
    problems = error.problems if isinstance(error, ConfigError) else (str(error),)
    for problem in problems:
        sys.stderr.write(f"error: {problem}\n")
