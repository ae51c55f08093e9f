"""What Ray's own errors become. They are Ray's classes, made as Ray makes them; no Ray runs."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ray import exceptions
from ray.core.generated.common_pb2 import ActorDiedErrorContext

from raytrain_llama3.config.plan import LOG_HEADER
from raytrain_llama3.errors import RankError
from raytrain_llama3.host import log_tail
from raytrain_llama3.launch.failures import from_error, rank_of_evidence
from raytrain_llama3.messages import Failure, FailureKind, RankSpec

SPEC = RankSpec(2, 4, 1, 0, 2, 0, "ab12", "10.0.0.7", attempt=1)
NO_LOG = Path("/nowhere/rank_2.log")

BROKEN_CONNECTION = (
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker "
    "unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process was "
    "killed by the OOM killer due to high memory usage, (2) ray stop --force was called, or (3) the worker crashed "
    "unexpectedly due to SIGSEGV or another unexpected error."
)
"""What Ray says of a process that was killed: causes that are possible, not known."""


def raised(cause: Exception) -> Exception:
    """What `ray.get` raises where a task raised `cause`."""
    text = f'Traceback (most recent call last):\n  File "worker.py", line 1, in run\n{type(cause).__name__}: {cause}\n'
    error = exceptions.RayTaskError("run", text, cause, ip="10.0.0.7")
    return pickle.loads(pickle.dumps(error)).as_instanceof_cause()


def died(message: str) -> Exception:
    context = ActorDiedErrorContext(
        error_message=message,
        class_name="TrainWorker",
        actor_id=b"0123456789abcdef",
        pid=33,
        node_ip_address="10.0.0.7",
    )
    return exceptions.ActorDiedError(context)


def failure_of(error: Exception, log: Path = NO_LOG, pid: int | None = 33) -> Failure:
    failure = from_error(SPEC, log, error, pid)
    assert pickle.loads(pickle.dumps(failure)) == failure
    return failure


def test_a_failure_says_who_and_where() -> None:
    before = time.time()
    failure = failure_of(raised(RuntimeError("boom")))
    assert (failure.rank, failure.attempt, failure.node_id, failure.node_ip) == (2, 1, "ab12", "10.0.0.7")
    assert (failure.log_path, failure.log_tail, failure.exit_code) == (str(NO_LOG), (), None)
    assert before <= failure.at <= time.time()
    assert failure.detect_s == 0.0


@pytest.mark.parametrize("kind", FailureKind)
def test_what_a_rank_says_itself_is_kept(kind: FailureKind) -> None:
    said = RankError(kind.value, "ValueError: no such shard", 2, None, time.time() - 3)
    failure = failure_of(raised(said))
    assert (failure.kind, failure.error, failure.exit_code) == (kind, "ValueError: no such shard", 2)
    assert (failure.rank, failure.at) == (2, said.at)
    assert failure.detect_s == pytest.approx(3, abs=1)


def test_a_rank_may_name_another_as_the_culprit_even_rank_0() -> None:
    for culprit in (0, 3):
        said = RankError(FailureKind.CORRUPTED.value, "rank differs", 138, culprit, time.time())
        assert failure_of(raised(said)).rank == culprit


def test_a_rank_whose_clock_is_ahead_was_seen_at_once() -> None:
    said = RankError(FailureKind.EXCEPTION.value, "x", None, None, time.time() + 60)
    assert failure_of(raised(said)).detect_s == 0.0


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (lambda: raised(RuntimeError("boom")), FailureKind.EXCEPTION, "RuntimeError: boom"),
        (lambda: raised(ModuleNotFoundError("No module named 'torch'")), FailureKind.EXCEPTION,
         "ModuleNotFoundError: No module named 'torch'"),
        (lambda: exceptions.GetTimeoutError("Get timed out:\nsome objects are not ready"), FailureKind.EXCEPTION,
         "GetTimeoutError: some objects are not ready"),
        (lambda: RuntimeError(""), FailureKind.EXCEPTION, "RuntimeError: no message"),
        (lambda: RuntimeError("first\nsecond"), FailureKind.EXCEPTION, "RuntimeError: first"),
        (lambda: exceptions.NodeDiedError("Task failed.\nThe node is dead."), FailureKind.NODE_DIED,
         "NodeDiedError: The node is dead."),
        (lambda: died("The actor died because its node has died. Node Id: ab12"), FailureKind.NODE_DIED,
         "node 10.0.0.7 is gone: Ray says that it died"),
        (lambda: died(BROKEN_CONNECTION), FailureKind.DIED,
         "process 33 ended without a word: it was killed (for want of memory?), or left by itself"),
        (lambda: died("The process exited with exit code 0"), FailureKind.DIED,
         "process 33 ended without a word: it was killed (for want of memory?), or left by itself"),
        (lambda: died("The actor died because of an error raised in its creation task, ray::X\n  ^^^\n"
                      "ModuleNotFoundError: No module named 'raytrain_llama3'"), FailureKind.EXCEPTION,
         "no rank can start on 10.0.0.7: ModuleNotFoundError: No module named 'raytrain_llama3'; every node needs this "
         "package, where its Ray finds it"),
        (lambda: exceptions.ActorDiedError(), FailureKind.DIED,
         "process 33 ended without a word: it was killed (for want of memory?), or left by itself"),
        (lambda: exceptions.ActorUnavailableError("connection lost", b"0123456789abcdef"), FailureKind.DIED,
         "process 33 ended without a word: it was killed (for want of memory?), or left by itself"),
    ],
)  # fmt: skip
def test_what_rays_errors_say(error: Callable[[], Exception], kind: FailureKind, said: str) -> None:
    failure = failure_of(error())
    assert (failure.kind, failure.error) == (kind, said)


@pytest.mark.parametrize(
    "error",
    [
        exceptions.OutOfMemoryError("Task was killed.\nThe node was running low on memory."),
        died("Worker exit detail: 1 worker(s) were killed due to the node running low on memory. Top: 33"),
    ],
    ids=["error", "actor"],
)
def test_want_of_memory_comes_with_its_remedy(error: Exception) -> None:
    failure = failure_of(error)
    assert failure.kind is FailureKind.OUT_OF_MEMORY
    assert "the node's own memory, not a GPU's" in failure.error
    assert "standby_processes" in failure.error


def test_a_process_whose_number_is_not_known() -> None:
    assert failure_of(died(BROKEN_CONNECTION), pid=None).error.startswith("the process ended without a word")


CRASH = 'Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f (most recent call first):\n  File "x.py"\n'


@pytest.mark.parametrize(
    ("log", "kind", "said"),
    [
        (f"step 1\n{CRASH}", FailureKind.CRASHED, "process 33 crashed: Segmentation fault"),
        ("Fatal Python error: Aborted\n", FailureKind.CRASHED, "process 33 crashed: Aborted"),
        # Above the stacks of many threads.
        (CRASH + "  File\n" * 50, FailureKind.CRASHED, "process 33 crashed: Segmentation fault"),
        (f"{CRASH}Fatal Python error: Bus error\n", FailureKind.CRASHED, "process 33 crashed: Bus error"),
        ("step 1\nstep 2\n", FailureKind.DIED, "process 33 ended without a word"),
        # That of an earlier run, which wrote into the same file.
        (
            f"{CRASH}{LOG_HEADER} 0, rank-2\nstep 1\n",
            FailureKind.DIED,
            "process 33 ended without a word",
        ),
    ],
)
def test_the_log_tells_a_crash_from_a_kill(tmp_path: Path, log: str, kind: FailureKind, said: str) -> None:
    path = tmp_path / "rank_2.log"
    path.write_text(log)
    failure = failure_of(died(BROKEN_CONNECTION), path)
    assert failure.kind is kind
    assert failure.error.startswith(said)
    assert failure.log_path == str(path)
    assert failure.log_tail == tuple(log.splitlines()[-20:])


def test_a_crash_in_the_log_says_nothing_of_an_error_that_was_raised(tmp_path: Path) -> None:
    path = tmp_path / "rank_2.log"
    path.write_text(CRASH)
    assert failure_of(raised(RuntimeError("boom")), path).kind is FailureKind.EXCEPTION


@pytest.mark.parametrize(
    ("content", "tail"),
    [
        (b"", ()),
        (b"one\ntwo", ("one", "two")),
        (b"one\n\ntwo\n", ("one", "", "two")),
        (b"".join(b"%d\n" % i for i in range(50)), tuple(str(i) for i in range(30, 50))),
        (b"\xff broken\n", ("\N{REPLACEMENT CHARACTER} broken",)),
    ],
)
def test_the_last_lines_of_a_log(tmp_path: Path, content: bytes, tail: tuple[str, ...]) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    assert log_tail(path) == tail


def test_of_a_line_that_goes_on_for_ever_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 100_000 + b"end\n")
    (line,) = log_tail(path)
    assert line.endswith("xend")
    assert len(line) < 100_000


def test_a_log_that_cannot_be_read_is_no_error(tmp_path: Path) -> None:
    assert log_tail(tmp_path / "none") == ()
    assert log_tail(tmp_path) == ()


CAUSE_FIRST = [
    FailureKind.NON_FINITE, FailureKind.CORRUPTED, FailureKind.OUT_OF_MEMORY, FailureKind.EXCEPTION,
    FailureKind.NODE_DIED, FailureKind.CRASHED, FailureKind.DIED, FailureKind.HANG, FailureKind.TIMED_OUT,
    FailureKind.PEER_LOST,
]  # fmt: skip


def test_of_the_failures_of_one_attempt_the_cause_comes_first() -> None:
    fallen = [Failure(rank, "10.0.0.7", kind, "", 0, 0) for rank, kind in enumerate(FailureKind)]
    assert [failure.kind for failure in sorted(fallen, key=rank_of_evidence)] == CAUSE_FIRST
