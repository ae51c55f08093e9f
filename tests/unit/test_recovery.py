from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace

import pytest

from raytrain_llama3.config.schema import Faults
from raytrain_llama3.errors import (
    ClusterFormationError,
    NonFiniteError,
    NoSafeStateError,
    RaytrainError,
    RepeatedFaultError,
    RestartBudgetError,
)
from raytrain_llama3.launch.history import History
from raytrain_llama3.launch.recovery import Decision, Restart, Shrink, Situation, Stop, Wait, decide
from raytrain_llama3.messages import Failure, FailureKind

DIED, NODE, HANG, CRASHED = FailureKind.DIED, FailureKind.NODE_DIED, FailureKind.HANG, FailureKind.CRASHED
RAISED, NAN, LOST = FailureKind.EXCEPTION, FailureKind.NON_FINITE, FailureKind.PEER_LOST
OOM, LATE, CORRUPTED = FailureKind.OUT_OF_MEMORY, FailureKind.TIMED_OUT, FailureKind.CORRUPTED

LIMITS = Faults(max_restarts=3, max_preemptions=5, restart_window_s=1000, node_strikes=3, node_rejoin_timeout_s=300)
ELASTIC = LIMITS.model_copy(update={"elastic_min_nodes": 2})
NOW = 5000.0
PLENTY = Situation(wanted=2, usable=2, waited_s=0.0, has_checkpoint=True)
PROGRESS = "progress"


def fault(
    kind: FailureKind,
    step: int = 10,
    error: str = "RuntimeError: lost",
    exit_code: int | None = None,
    node: str = "",
    at: float = NOW,
) -> Failure:
    return Failure(2, "10.0.0.7", kind, error, step, attempt=0, node_id=node, exit_code=exit_code, at=at)


def history(items: Sequence[Failure | str]) -> History:
    made = History()
    for item in items:
        if isinstance(item, Failure):
            made.add(item)
        else:
            made.progressed()
    return made


def decided(
    failure: Failure,
    earlier: Sequence[Failure | str] = (),
    situation: Situation = PLENTY,
    limits: Faults = LIMITS,
) -> Decision:
    decision = decide(failure, history(earlier), situation, limits)
    assert repr(pickle.loads(pickle.dumps(decision))) == repr(decision)
    return decision


def stopped(decision: Decision) -> RaytrainError:
    assert isinstance(decision, Stop)
    return decision.error


TABLE = [
    # the failure, those before it, and the exit code that the run ends with, or None for a restart
    *((fault(kind), [], None) for kind in (RAISED, DIED, NODE, HANG, CRASHED, OOM, LATE, CORRUPTED, LOST)),
    # never again: numbers that are not finite, and errors whose exit code is below 128
    (fault(NAN, exit_code=4), [], 4),
    (fault(NAN), [], 4),
    (fault(RAISED, exit_code=2), [], 2),
    (fault(RAISED, exit_code=3), [], 3),
    (fault(RAISED, exit_code=127), [], 127),
    (fault(RAISED, exit_code=128), [], None),
    (fault(RAISED, exit_code=139), [], None),
    # the same fault at the same step twice
    *((fault(kind), [fault(kind)], 4) for kind in (RAISED, OOM, LATE, CRASHED, CORRUPTED, HANG)),
    (fault(RAISED), [fault(RAISED), fault(DIED, step=12)], 4),
    (fault(HANG, error="rank 1 stood still"), [fault(HANG, error="rank 2 stood still")], 4),
    # in another process, which is all that the words of a crash differ in
    (fault(CRASHED, error="process 7 crashed: Aborted"), [fault(CRASHED, error="process 12 crashed: Aborted")], 4),
    # however long ago, and whatever was saved in between
    (fault(RAISED), [fault(RAISED, at=0.0), PROGRESS], 4),
    # another step, other words, another kind, or what says nothing about why
    *((fault(kind, step=11), [fault(kind, step=10)], None) for kind in (RAISED, OOM, LATE, CRASHED, CORRUPTED, HANG)),
    *((fault(kind, error="other"), [fault(kind)], None) for kind in (RAISED, OOM, LATE, CRASHED, CORRUPTED)),
    (fault(RAISED), [fault(DIED)], None),
    (fault(HANG), [fault(RAISED)], None),
    *((fault(kind), [fault(kind)], None) for kind in (DIED, NODE, LOST)),
    # the budget of three for faults
    (fault(DIED), [fault(DIED)] * 2, None),
    (fault(DIED), [fault(DIED)] * 3, 138),
    (fault(DIED), [fault(DIED)] * 4, 138),
    (fault(LOST), [fault(DIED), fault(RAISED), fault(HANG)], 138),
    # of five for nodes that went away, and neither spends the other's
    (fault(NODE), [fault(NODE)] * 4, None),
    (fault(NODE), [fault(NODE)] * 5, 138),
    (fault(DIED), [fault(NODE)] * 5, None),
    (fault(NODE), [fault(DIED)] * 3, None),
    (fault(NODE), [fault(DIED)] * 3 + [fault(NODE)] * 4, None),
    # progress gives both back
    (fault(DIED), [fault(DIED)] * 3 + [PROGRESS], None),
    (fault(DIED), [fault(DIED)] * 3 + [PROGRESS] + [fault(DIED)] * 3, 138),
    (fault(NODE), [fault(NODE)] * 5 + [PROGRESS, fault(NODE)], None),
    # only the window counts, up to the present fault
    (fault(DIED), [fault(DIED, at=NOW - 1000)] * 3, 138),
    (fault(DIED), [fault(DIED, at=NOW - 1001), fault(DIED), fault(DIED)], None),
    (fault(NODE), [fault(NODE, at=NOW - 1001)] * 5, None),
    # what is permanent stays so when the budget is spent, and so does what came back
    (fault(RAISED, exit_code=2), [fault(DIED)] * 3, 2),
    (fault(RAISED), [fault(DIED), fault(DIED), fault(RAISED)], 4),
]


@pytest.mark.parametrize(("failure", "earlier", "exit_code"), TABLE)
def test_restart_or_the_exit_code_that_the_run_ends_with(
    failure: Failure, earlier: list[Failure | str], exit_code: int | None
) -> None:
    decision = decided(failure, earlier)
    assert isinstance(decision, Restart) == (exit_code is None)
    if isinstance(decision, Stop):
        assert decision.error.exit_code == exit_code
        assert failure.error in str(decision.error)


@pytest.mark.parametrize(
    ("failure", "earlier", "error", "said"),
    [
        (fault(NAN), [], NonFiniteError, ["RuntimeError: lost"]),
        (fault(RAISED, step=17), [fault(RAISED, step=17)], RepeatedFaultError, ["step 17", "exception"]),
        (fault(DIED), [fault(DIED)] * 3, RestartBudgetError, ["max_restarts 3", "1000 s", "RuntimeError: lost"]),
        (fault(NODE), [fault(NODE)] * 5, RestartBudgetError, ["max_preemptions 5", "RuntimeError: lost"]),
    ],
)
def test_the_run_ends_with_the_error_that_says_why(
    failure: Failure, earlier: list[Failure | str], error: type[RaytrainError], said: list[str]
) -> None:
    end = stopped(decided(failure, earlier))
    assert type(end) is error
    assert [words for words in said if words not in str(end)] == []


def test_a_repeated_fault_without_a_checkpoint_says_both() -> None:
    end = stopped(decided(fault(OOM, step=3), [fault(OOM, step=3)], replace(PLENTY, has_checkpoint=False)))
    assert type(end) is NoSafeStateError
    assert "step 3 (out of memory): RuntimeError: lost" in str(end)
    assert "no complete checkpoint" in str(end)


@pytest.mark.parametrize(("kind", "option"), [(DIED, "max_restarts"), (NODE, "max_preemptions")])
def test_without_a_budget_the_first_fault_ends_the_run(kind: FailureKind, option: str) -> None:
    end = stopped(decided(fault(kind), limits=Faults(max_restarts=0, max_preemptions=0)))
    assert f"{option} 0" in str(end)


@pytest.mark.parametrize(
    ("failure", "earlier", "why"),
    [
        (fault(DIED), [fault(DIED)], "restart 2 of 3"),
        (fault(NODE), [fault(DIED), fault(NODE)], "preemption 2 of 5"),
        (fault(DIED), [fault(DIED), PROGRESS], "restart 1 of 3"),
    ],
)
def test_a_restart_says_which_of_how_many_it_is(failure: Failure, earlier: list[Failure | str], why: str) -> None:
    assert decided(failure, earlier) == Restart(why)


@pytest.mark.parametrize("exit_code", [3, 127])
def test_an_error_with_a_ranks_exit_code_survives_pickling(exit_code: int) -> None:
    end = stopped(decided(fault(RAISED, exit_code=exit_code)))
    copy = pickle.loads(pickle.dumps(end))
    assert (copy.exit_code, str(copy)) == (exit_code, "RuntimeError: lost")


def nodes(usable: int, waited_s: float = 0.0, wanted: int = 4) -> Situation:
    return Situation(wanted, usable, waited_s, has_checkpoint=True)


@pytest.mark.parametrize(
    ("situation", "limits", "expected"),
    [
        # a node is gone and a spare is there
        (nodes(4), LIMITS, Restart("preemption 1 of 5")),
        (nodes(5), ELASTIC, Restart("preemption 1 of 5")),
        # none is there: wait, with or without leave to shrink
        *(
            (
                nodes(usable, waited_s),
                limits,
                Wait(
                    f"preemption 1 of 5; {usable} of 4 nodes are usable: waiting {for_s} s at most for another", for_s
                ),
            )
            for usable, waited_s, limits, for_s in [
                (3, 0, LIMITS, 300),
                (3, 0, ELASTIC, 300),
                (3, 299, LIMITS, 1),
                (0, 60, LIMITS, 240),
            ]
        ),
        # one came while waiting
        (nodes(4, 120), LIMITS, Restart("preemption 1 of 5")),
        (nodes(4, 301), ELASTIC, Restart("preemption 1 of 5")),
        # none came, and fewer will do
        *(
            (
                nodes(usable, waited_s),
                ELASTIC,
                Shrink(
                    f"preemption 1 of 5; going on with {usable} of 4 nodes, no other came within "
                    "node_rejoin_timeout_s 300",
                    usable,
                ),
            )
            for usable, waited_s in [(3, 300), (2, 300), (2, 999)]
        ),
    ],
)
def test_after_a_node_died(situation: Situation, limits: Faults, expected: Decision) -> None:
    assert decided(fault(NODE), situation=situation, limits=limits) == expected


@pytest.mark.parametrize(
    ("usable", "limits", "said"),
    [
        (3, LIMITS, ["3 of 4 nodes", "node_rejoin_timeout_s 300", "set elastic_min_nodes"]),
        (1, ELASTIC, ["1 of 4 nodes", "elastic_min_nodes 2 does not allow so few"]),
        (0, LIMITS, ["0 of 4 nodes", "spare_nodes"]),
    ],
)
def test_too_few_nodes_for_too_long_end_the_run_for_another_try(usable: int, limits: Faults, said: list[str]) -> None:
    end = stopped(decided(fault(NODE), situation=nodes(usable, 300), limits=limits))
    assert type(end) is ClusterFormationError
    assert end.exit_code == 139
    assert [words for words in [*said, "RuntimeError: lost"] if words not in str(end)] == []


def test_a_spent_budget_is_not_waited_for() -> None:
    assert type(stopped(decided(fault(NODE), [fault(NODE)] * 5, nodes(3)))) is RestartBudgetError


def strike(node: str, kind: FailureKind = DIED, at: float = NOW) -> Failure:
    return fault(kind, node=node, at=at)


LEFT_OUT = "; 10.0.0.7 has failed 3 times (node_strikes 3): left out"
STAYS = "; 10.0.0.7 has failed 3 times and there is no other node: it stays"


@pytest.mark.parametrize(
    ("earlier", "situation", "limits", "without", "remark"),
    [
        ([strike("a")] * 2, nodes(5), LIMITS, "a", LEFT_OUT),
        ([strike("a")], nodes(5), LIMITS, None, ""),
        # others' faults, and what is not the node's own
        ([strike("a"), strike("b")], nodes(5), LIMITS, None, ""),
        ([strike("a"), strike("a", LOST)], nodes(5), LIMITS, None, ""),
        ([strike("a"), strike("a", NODE)], nodes(5), LIMITS, None, ""),
        ([strike("a"), strike("a", HANG)], nodes(5), LIMITS, "a", LEFT_OUT),
        # progress does not forgive, the window does
        ([strike("a"), strike("a"), PROGRESS], nodes(5), LIMITS, "a", LEFT_OUT),
        ([strike("a"), strike("a", at=NOW - 1001)], nodes(5), LIMITS, None, ""),
        # there is no other node
        ([strike("a")] * 2, nodes(4), LIMITS, None, STAYS),
        ([strike("a")] * 2, nodes(1, wanted=1), LIMITS, None, STAYS),
        ([strike("a")] * 2, nodes(2, wanted=2), ELASTIC, None, STAYS),
    ],
)
def test_a_node_that_fails_again_and_again(
    earlier: list[Failure | str], situation: Situation, limits: Faults, without: str | None, remark: str
) -> None:
    decision = decided(strike("a"), earlier, situation, limits)
    assert isinstance(decision, Restart)
    assert decision.without == without
    assert decision.why.removeprefix("restart ")[len("3 of 3") :] == remark


def test_a_victim_is_not_left_out() -> None:
    assert decided(strike("a", LOST), [strike("a")] * 2, nodes(5)) == Restart("restart 3 of 3")


def test_a_fault_whose_node_is_not_known_strikes_none() -> None:
    assert decided(strike(""), [strike("")] * 2, nodes(5)) == Restart("restart 3 of 3")


def test_one_strike_can_be_enough() -> None:
    limits = LIMITS.model_copy(update={"node_strikes": 1})
    why = "restart 1 of 3; 10.0.0.7 has failed once (node_strikes 1): left out"
    assert decided(strike("a"), [], nodes(5), limits) == Restart(why, "a")


def test_a_node_is_left_out_of_an_elastic_run_that_waits_and_then_shrinks() -> None:
    earlier = [strike("a")] * 2
    waiting = decided(strike("a"), earlier, nodes(4), ELASTIC)
    assert isinstance(waiting, Wait)
    assert waiting.why.startswith(f"restart 3 of 3{LEFT_OUT}; 3 of 4 nodes are usable")
    # Another came, the bad one still being there; or none.
    assert decided(strike("a"), earlier, nodes(5, 40), ELASTIC) == Restart(f"restart 3 of 3{LEFT_OUT}", "a")
    shrunk = decided(strike("a"), earlier, nodes(4, 300), ELASTIC)
    assert isinstance(shrunk, Shrink)
    assert (shrunk.nodes, shrunk.without) == (3, "a")


def test_a_history_counts_apart_and_keeps_everything() -> None:
    kept = history([strike("a"), fault(NODE, node="b"), PROGRESS, strike("a"), fault(DIED, node="c", at=10.0)])
    assert [kept.counted(preemptions=p, now=NOW, window_s=1000) for p in (False, True)] == [1, 0]
    assert kept.counted(preemptions=False, now=NOW, window_s=NOW) == 2
    assert kept.strikes(NOW, 1000) == {"a": 2}
    assert kept.strikes(NOW, NOW) == {"a": 2, "c": 1}
    assert [failure.node_id for failure in kept.failures] == ["a", "b", "a", "c"]
