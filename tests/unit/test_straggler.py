from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from raytrain_llama3.launch.watchdog import StragglerWatch
from raytrain_llama3.messages import Work

STEP_S = 0.4


class Ranks:
    """Ranks that report every 5 steps; `own_s` is the seconds of own work a step of each."""

    def __init__(self, *own_s: float, stages: Sequence[int] = (), factor: float = 1.5, step_s: float = STEP_S) -> None:
        self.own_s, self.step_s = list(own_s), step_s
        stage_of = dict(enumerate(stages or [0] * len(own_s)))
        self.watch = StragglerWatch(factor, stage_of, {rank: f"10.0.0.{rank + 4}" for rank in stage_of})

    def train(self, steps: int, slow: Mapping[int, float] | None = None) -> list[str]:
        own_s = [(slow or {}).get(rank, usual) for rank, usual in enumerate(self.own_s)]
        warnings = []
        for _ in range(steps // 5):
            for rank, seconds in enumerate(own_s):
                warnings += self.watch.hear(rank, Work(5, 5 * seconds, 5 * self.step_s))
                warnings += self.watch.hear(rank, None)
        return warnings


def test_the_sentence() -> None:
    assert Ranks(0.2, 0.2, 0.2, 0.31).train(200) == [
        "rank 3 on 10.0.0.7 falls behind: its own work takes 0.31 s of each 0.40 s step (78 %), "
        "the median rank's 0.20 s"
    ]


def test_small_times_keep_their_digits() -> None:
    (text,) = Ranks(0.0021, 0.002, 0.0062, step_s=0.008).train(200)
    assert "takes 0.0062 s of each 0.008 s step (78 %), the median rank's 0.002" in text


@pytest.mark.parametrize(
    ("own_s", "stages", "behind"),
    [
        ((0.2, 0.2, 0.2, 0.2), (), []),
        ((0.2, 0.2, 0.2, 0.29), (), []),
        ((0.2, 0.31, 0.2, 0.31, 0.2), (), [1, 3]),
        # a fast rank makes no slow ones
        ((0.1, 0.3, 0.3, 0.3), (), []),
        # stages differ in their work, ranks of one stage do not
        ((0.2, 0.2, 0.2, 0.4, 0.4, 0.4), (0, 0, 0, 1, 1, 1), []),
        ((0.2, 0.2, 0.31, 0.4, 0.4, 0.4), (0, 0, 0, 1, 1, 1), [2]),
        ((0.2, 0.2, 0.2, 0.4, 0.8, 0.4), (0, 0, 0, 1, 1, 1), [4]),
        # in a stage of its own a rank has nobody to be compared with
        ((0.2, 0.9), (0, 1), []),
        ((0.9,), (), []),
        ((0.0, 0.0, 0.0), (), []),
    ],
)
def test_who_is_behind(own_s: tuple[float, ...], stages: tuple[int, ...], behind: list[int]) -> None:
    warnings = Ranks(*own_s, stages=stages).train(200)
    assert [text.split(" on ")[0] for text in warnings] == [f"rank {rank}" for rank in behind]


def test_the_factor_decides() -> None:
    assert len(Ranks(0.2, 0.2, 0.31, factor=1.5).train(200)) == 1
    assert Ranks(0.2, 0.2, 0.31, factor=1.6).train(200) == []


def test_of_two_the_slower_is_named_with_care() -> None:
    assert Ranks(0.31, 0.2).train(200) == [
        "rank 0 on 10.0.0.4 is the slower of two: its own work takes 0.31 s of each 0.40 s step (78 %), rank 1's on "
        "10.0.0.5 0.20 s; there is no third rank to say which of them is as it should be"
    ]


def test_only_three_windows_in_a_row_are_steady() -> None:
    ranks = Ranks(0.2, 0.2, 0.2)
    slow = {1: 0.5}
    for _ in range(5):
        assert ranks.train(40, slow) == []
        assert ranks.train(20) == []
    assert ranks.train(55, slow) == []
    assert len(ranks.train(5, slow)) == 1


def test_one_slow_step_in_a_window_is_nothing() -> None:
    ranks = Ranks(0.2, 0.2, 0.2)
    for _ in range(10):
        # 5 of 20 steps take twice as long: 1.25 times the median over the window.
        assert ranks.train(5, {1: 0.4}) == []
        assert ranks.train(15) == []


def test_it_is_said_once_and_again_only_after_a_recovery() -> None:
    ranks = Ranks(0.2, 0.2, 0.2)
    slow = {1: 0.5}
    assert len(ranks.train(60, slow)) == 1
    assert ranks.train(200, slow) == []
    # A short relief is no recovery.
    assert ranks.train(40) == []
    assert ranks.train(200, slow) == []
    assert ranks.train(60) == []
    assert len(ranks.train(60, slow)) == 1


def test_ranks_are_compared_over_steps_that_all_have_done() -> None:
    watch = StragglerWatch(1.5, {0: 0, 1: 0, 2: 0}, {0: "a", 1: "b", 2: "c"})
    for _ in range(30):
        assert watch.hear(0, Work(20, 4.0, 8.0)) == []
        assert watch.hear(2, Work(20, 10.0, 8.0)) == []
    # Rank 1 is heard late, all at once: that is one window.
    assert watch.hear(1, Work(600, 120.0, 240.0)) == []
