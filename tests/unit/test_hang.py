from __future__ import annotations

import math

import pytest

from raytrain_llama3.config.schema import Faults
from raytrain_llama3.launch.watchdog import Hang, HangWatch
from raytrain_llama3.messages import Phase, WorkerReport

LIMITS = Faults(hang_timeout_s=60, slow_phase_timeout_s=180)
START = 1_000_000.0
LOOK_S = 0.5
TRAIN, SAVE, IMPORT, LOAD, DONE = Phase.TRAIN, Phase.SAVE, Phase.IMPORT, Phase.LOAD, Phase.DONE
Place = tuple[Phase, int, int]
"""Phase, step and moves of a rank."""


class Polls:
    """Ranks that are polled twice a second, each where it was put last or silent (None)."""

    def __init__(self, *ranks: Place | None, limits: Faults = LIMITS) -> None:
        self.ranks = list(ranks)
        self.waiting: dict[int, str] = {}
        self.now = START
        self.watch = HangWatch(limits, range(len(ranks)), START)

    def look(self, gap_s: float = LOOK_S) -> Hang | None:
        self.now += gap_s
        found = [
            WorkerReport(rank, place[0], place[1], moves=place[2], waits_for=self.waiting.get(rank, ""))
            for rank, place in enumerate(self.ranks)
            if place is not None
        ]
        return self.watch.look(self.now, found)

    def wait(self, seconds: float, gap_s: float = LOOK_S) -> Hang | None:
        """Look for so long; the hang, if one was found."""
        for _ in range(math.ceil(seconds / gap_s)):
            if hang := self.look(gap_s):
                return hang
        return None

    def all_at(self, phase: Phase, step: int, moves: int) -> None:
        self.ranks = [(phase, step, moves)] * len(self.ranks)


def test_ranks_that_move_never_hang() -> None:
    polls = Polls(*[(TRAIN, 0, 5)] * 3)
    for step in range(1, 8):
        polls.all_at(TRAIN, step, 5 + step)
        assert polls.wait(50) is None


@pytest.mark.parametrize(
    ("phase", "limit", "option"),
    [(TRAIN, 60, "hang_timeout_s")]
    + [(phase, 180, "slow_phase_timeout_s") for phase in Phase if phase not in (Phase.TRAIN, Phase.DONE)],
)
def test_each_phase_has_its_time_and_names_what_to_raise(phase: Phase, limit: int, option: str) -> None:
    polls = Polls(*[(phase, 3, 9)] * 2)
    polls.look()
    assert polls.wait(limit - 1) is None
    hang = polls.wait(3)
    assert hang is not None
    assert hang.phase is phase
    assert hang.text.startswith(f"rank 0 stood still for {limit} s in phase {phase} at step 3")
    assert hang.text.endswith(f"if that can be its work, raise {option} (now {limit})")


def test_a_rank_that_is_done_does_not_hang() -> None:
    assert Polls(*[(DONE, 3, 9)] * 2).wait(1000) is None


@pytest.mark.parametrize("timeout_s", [0.5, 1, 3, 20, 60, 600])
def test_a_stopped_process_is_seen_two_seconds_after_its_time_at_the_latest(timeout_s: float) -> None:
    limits = Faults(hang_timeout_s=timeout_s)
    polls = Polls(*[(TRAIN, 1, 1)] * 4, limits=limits)
    for step in range(2, 7):
        polls.all_at(TRAIN, step, step)
        assert polls.look() is None
    last_answer = polls.now
    polls.ranks[2] = None
    hang = polls.wait(timeout_s + 2)
    assert hang is not None
    assert hang.rank == 2
    assert timeout_s <= polls.now - last_answer <= timeout_s + 2
    assert hang.since == last_answer
    assert "and does not answer" in hang.text


CULPRITS = [
    # where each rank stands at last, and the rank that is named
    # one that does not answer, whoever stands behind it
    ([(TRAIN, 5, 9), None, (TRAIN, 5, 9)], 1, ()),
    ([(TRAIN, 5, 8), (TRAIN, 5, 9), None], 2, ()),
    # two that do not: a node that went, say
    ([(TRAIN, 5, 9), (TRAIN, 5, 9), None, None], 2, (3,)),
    # nobody answers: no more than an order of ranks
    ([None, None], 0, (1,)),
    # the one with the fewest steps or moves, when all answer
    ([(TRAIN, 5, 9), (TRAIN, 4, 8), (TRAIN, 5, 9)], 1, ()),
    ([(TRAIN, 5, 9), (TRAIN, 5, 9), (TRAIN, 5, 8)], 2, ()),
    # all alike: said so
    ([(TRAIN, 5, 9), (TRAIN, 5, 9), (TRAIN, 5, 9)], 0, (1, 2)),
    # one that is done hangs no more
    ([(DONE, 5, 5), (TRAIN, 5, 8)], 1, ()),
]


@pytest.mark.parametrize(("places", "culprit", "alike"), CULPRITS)
def test_who_is_named(places: list[Place | None], culprit: int, alike: tuple[int, ...]) -> None:
    polls = Polls(*[(TRAIN, 4, 7)] * len(places))
    polls.look()
    polls.ranks = places
    hang = polls.wait(63)
    assert hang is not None
    assert (hang.rank, hang.alike) == (culprit, alike)
    assert hang.text.startswith(f"rank {culprit} stood still for 60 s in phase train")
    assert ("and does not answer" in hang.text) == (places[culprit] is None)
    assert (
        all(f"{rank}" in hang.text.split("so did ranks")[1] for rank in alike) if alike else "so did" not in hang.text
    )


def test_of_ranks_at_the_same_place_the_one_that_stopped_first_is_named() -> None:
    polls = Polls((TRAIN, 4, 7), (TRAIN, 4, 7))
    polls.ranks = [(TRAIN, 4, 7), (TRAIN, 5, 8)]
    polls.look()
    polls.ranks = [(TRAIN, 5, 8), (TRAIN, 5, 8)]
    polls.look()
    hang = polls.wait(63)
    assert hang is not None
    assert (hang.rank, hang.since) == (1, START + LOOK_S)


def test_one_late_answer_does_not_make_a_culprit() -> None:
    polls = Polls(*[(TRAIN, 4, 7)] * 3)
    polls.ranks[1] = (TRAIN, 4, 6)
    polls.look()
    assert polls.wait(58) is None
    polls.ranks[2] = None
    hang = polls.wait(3)
    assert hang is not None
    assert hang.rank == 1


def test_ranks_that_wait_for_one_in_a_slow_phase_have_its_time() -> None:
    # Rank 0 has saved and waits in its next step for rank 1, whose disk is slow.
    polls = Polls((TRAIN, 10, 22), (SAVE, 10, 21))
    polls.look()
    assert polls.wait(178) is None
    hang = polls.wait(3)
    assert hang is not None
    assert (hang.rank, hang.phase) == (1, SAVE)
    assert "raise slow_phase_timeout_s (now 180)" in hang.text


def test_evaluation_rounds_are_moves() -> None:
    polls = Polls(*[(Phase.EVALUATE, 10, 20)] * 2)
    for moves in range(21, 25):
        polls.all_at(Phase.EVALUATE, 10, moves)
        assert polls.wait(150) is None


def test_a_rank_that_never_answers_has_the_time_of_a_start() -> None:
    polls = Polls((LOAD, 0, 5), None)
    assert polls.wait(179) is None
    hang = polls.wait(3)
    assert hang is not None
    assert (hang.rank, hang.phase, hang.since) == (1, Phase.START, START)


@pytest.mark.parametrize("timeout_s", [1, 60])
def test_a_driver_that_slept_knows_nothing_of_the_time_between(timeout_s: float) -> None:
    polls = Polls(*[(TRAIN, 4, 7)] * 2, limits=Faults(hang_timeout_s=timeout_s))
    polls.look()
    polls.look()
    assert polls.look(gap_s=8 * 3600) is None
    # The ranks slept with it: they go on.
    polls.all_at(TRAIN, 5, 8)
    assert polls.look() is None
    assert polls.look(gap_s=8 * 3600) is None
    # Two sleeps are no more than one.
    polls.all_at(TRAIN, 6, 9)
    assert polls.look(gap_s=8 * 3600) is None


def test_slow_polls_do_not_stretch_the_time() -> None:
    polls = Polls(*[(TRAIN, 4, 7)] * 2)
    polls.look()
    hang = polls.wait(70, gap_s=5)
    assert hang is not None
    assert polls.now - START == pytest.approx(60.5)


def test_a_clock_that_is_set_back_counts_as_no_time() -> None:
    polls = Polls(*[(TRAIN, 4, 7)] * 2)
    polls.look()
    assert polls.wait(50) is None
    assert polls.look(gap_s=-3600) is None
    assert polls.wait(8) is None
    assert polls.wait(3) is not None


def test_a_rank_that_ended_is_watched_no_longer() -> None:
    polls = Polls((TRAIN, 4, 7), (TRAIN, 4, 7))
    polls.look()
    polls.watch.ended(1)
    polls.ranks[1] = None
    hang = polls.wait(63)
    assert hang is not None
    assert (hang.rank, hang.alike) == (0, ())
    polls.watch.ended(0)
    assert polls.wait(63) is None


def test_a_rank_that_others_have_left_behind_is_not_in_the_slow_phase_it_last_told_of() -> None:
    polls = Polls(*[(SAVE, 5, 9)] * 4)
    polls.look()
    # A step takes all ranks: the silent one has trained since, too, and stopped before the next poll.
    polls.ranks = [(TRAIN, 6, 11)] * 3 + [None]
    hang = polls.wait(70)
    assert hang is not None
    assert (hang.rank, hang.phase) == (3, TRAIN)
    assert "raise hang_timeout_s (now 60)" in hang.text


def test_a_rank_that_still_saves_while_others_have_saved_has_the_time_of_a_save() -> None:
    polls = Polls(*[(SAVE, 5, 9)] * 4)
    polls.look()
    polls.ranks = [(TRAIN, 5, 10)] * 3 + [None]
    assert polls.wait(170) is None
    assert polls.wait(20) is not None


def test_a_rank_that_waits_for_data_has_the_longer_time_and_is_the_one_that_is_named() -> None:
    polls = Polls(*[(TRAIN, 4, 12)] * 4)
    assert polls.wait(20) is None
    polls.waiting = {2: "samples 32 to 39, asked of the feeder on 10.0.0.2"}
    assert polls.wait(140) is None
    hang = polls.wait(30)
    assert hang is not None
    assert (hang.rank, hang.alike) == (2, ())
    assert "waiting for data (samples 32 to 39, asked of the feeder on 10.0.0.2)" in hang.text
    assert "raise slow_phase_timeout_s (now 180)" in hang.text


def test_once_the_data_is_there_the_time_is_the_usual_one_again() -> None:
    polls = Polls(*[(TRAIN, 4, 12)] * 2)
    polls.waiting = {0: "samples 32 to 39"}
    assert polls.wait(100) is None
    polls.waiting = {}
    polls.all_at(TRAIN, 5, 13)
    assert polls.wait(50) is None
    hang = polls.wait(20)
    assert hang is not None
    assert hang.alike == (1,)
    assert "hang_timeout_s" in hang.text
