from __future__ import annotations

import pickle
import sys
import time

import pytest
from planning import TINY, cpu, planned

from raytrain_llama3.config import env
from raytrain_llama3.errors import CheckpointError, CorruptionError, HardwareError, NonFiniteError, RankError
from raytrain_llama3.messages import FailureKind, Phase, Work
from raytrain_llama3.train.faults import PlainWords, rank_error
from raytrain_llama3.train.reporter import Reporter
from raytrain_llama3.train.stop import StopRequest, Votes

OOM, LATE, LOST, RAISED = (
    FailureKind.OUT_OF_MEMORY,
    FailureKind.TIMED_OUT,
    FailureKind.PEER_LOST,
    FailureKind.EXCEPTION,
)


def of_torch(name: str, *bases: str) -> type[RuntimeError]:
    """A class that is called as torch's own, which is not here."""
    made: type[RuntimeError] = RuntimeError
    for each in (*bases, name):
        made = type(each, (made,), {"__module__": "torch.distributed" if each.startswith("Dist") else "torch"})
    return made


BACKEND, NETWORK, STORE = (of_torch(f"Dist{kind}Error", "DistError") for kind in ("Backend", "Network", "Store"))

TABLE = [
    # words as torch 2.11 writes them
    (of_torch("OutOfMemoryError")("CUDA out of memory. Tried to allocate 2.00 GiB."), OOM),
    (of_torch("AcceleratorError")("CUDA error: out of memory\nCUDA kernel errors might be"), OOM),
    (MemoryError(), OOM),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"), OOM),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), OOM),
    (RuntimeError("[/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation"), LATE),
    (BACKEND("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8, OpType=ALLREDUCE) ran for 60"), LATE),
    (STORE("wait timeout after 4000ms, keys: /nothing"), LATE),
    (NETWORK("The client socket has timed out after 2000ms while trying to connect to (127.0.0.1, 1)."), LATE),
    (RuntimeError("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:36559"), LOST),
    (RuntimeError("[/gloo/transport/tcp/pair.cc:525] Read error [127.0.0.1]:1: Connection reset by peer"), LOST),
    (BACKEND("NCCL error in: NCCLUtils.cpp:42, remote process exited or there was a network error"), LOST),
    (NETWORK("failed to recv, got 0 bytes"), LOST),
    (RuntimeError("the tokenizer's server: Connection closed by peer"), RAISED),
    (RuntimeError("shape '[2, 3]' is invalid for input of size 5"), RAISED),
    (of_torch("AcceleratorError")("CUDA error: an illegal memory access was encountered"), RAISED),
    (TimeoutError("timed out"), RAISED),
    (NotImplementedError("gloo: timed out"), RAISED),
    (SystemExit(3), RAISED),
]


@pytest.mark.parametrize(("error", "kind"), TABLE, ids=lambda value: str(value)[:40])
def test_errors_are_told_apart(error: BaseException, kind: FailureKind) -> None:
    said = rank_error(error)
    assert (said.kind, said.code, said.culprit) == (kind, None, None)
    assert "\n" not in str(said)
    assert str(said).startswith(f"{type(error).__name__}: ")
    assert said.at == pytest.approx(time.time(), abs=60)


def caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


OURS = [
    (NonFiniteError("loss nan"), FailureKind.NON_FINITE, 4, None),
    (CorruptionError("rank 3 differs", 3), FailureKind.CORRUPTED, 138, 3),
    (CorruptionError("nobody knows", -1), FailureKind.CORRUPTED, 138, None),
    (HardwareError("one device twice"), RAISED, 2, None),
    (caused(CheckpointError("iter_1: no space"), OSError("No space left on device")), RAISED, 3, None),
    (caused(CheckpointError("iter_1: cannot be written"), TABLE[9][0]), LOST, None, None),
]


@pytest.mark.parametrize(("error", "kind", "code", "culprit"), OURS, ids=lambda value: str(value)[:40])
def test_errors_of_ours_keep_their_words_and_code(
    error: Exception, kind: FailureKind, code: int | None, culprit: int | None
) -> None:
    said = rank_error(error)
    assert (said.kind, said.code, said.culprit) == (kind, code, culprit)
    assert str(error) in str(said)


def test_remedies_name_the_options_present_values(monkeypatch: pytest.MonkeyPatch) -> None:
    run_plan = planned([*TINY, "--micro-batch-size", "4", "--distributed-timeout-minutes", "7"], cpu())
    assert "micro_batch_size (now 4), raise tp_size (now 1)" in str(rank_error(MemoryError(), run_plan))
    monkeypatch.setattr(env, "snapshot", lambda: {"GLOO_SOCKET_IFNAME": "eth7"})
    late = str(rank_error(TABLE[5][0], run_plan))
    assert "distributed_timeout_minutes (now 7)" in late
    assert "GLOO_SOCKET_IFNAME (now eth7)" in late


def test_what_leaves_a_block_is_plain_and_the_frames_are_empty(capsys: pytest.CaptureFixture[str]) -> None:
    class Heavy:
        pass

    class Raised(RuntimeError):
        """Cannot be pickled, as some of torch's."""

        def __reduce__(self) -> str:
            raise TypeError

    frames = []

    def fail() -> None:
        heavy = Heavy()
        frames.append(sys._getframe())
        raise Raised(f"of {type(heavy).__name__}\nsecond line")

    with pytest.raises(RankError) as caught, PlainWords():
        fail()
    assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args
    assert str(caught.value) == "Raised: of Heavy"
    assert frames[0].f_locals == {}
    assert "in fail" in capsys.readouterr().err


def test_a_rank_error_passes_as_it_is() -> None:
    error = RankError("hang", "words", None, 3, 1.0)
    assert rank_error(error) is error


def test_moves_count_phases_steps_and_rounds() -> None:
    reporter = Reporter()
    seen = [reporter.poll().moves]
    for move in (
        lambda: reporter.enter(Phase.MODEL),
        lambda: reporter.at_step(1),
        lambda: reporter.at_step(1),
        reporter.at_round,
        lambda: reporter.add("a warning"),
        lambda: reporter.begin(0),
    ):
        move()
        seen.append(reporter.poll().moves)
    assert seen == [0, 1, 2, 3, 4, 4, 4], "never back, also for another attempt"


def test_work_adds_up_until_it_is_polled() -> None:
    reporter = Reporter()
    reporter.worked(0.25, 1.0)
    reporter.worked(0.5, 2.0)
    assert reporter.poll().work == Work(2, 0.75, 3.0)
    assert reporter.poll().work is None
    reporter.worked(0.25, 1.0)
    reporter.begin(1)
    assert reporter.poll().work is None


def test_not_to_save_is_not_taken_back() -> None:
    stop = StopRequest()
    assert stop.votes(late=True) == Votes(0, 1, 0)
    stop.ask(save=True)
    assert stop.votes() == Votes(1, 0, 0)
    stop.ask(save=False)
    stop.ask(save=True)
    assert stop.votes() == Votes(1, 0, 1)
    stop.clear()
    assert stop.votes() == Votes()
