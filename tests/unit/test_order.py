import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_llama3.data.order import SampleOrder


def epoch(order: SampleOrder, windows: int, number: int) -> np.ndarray:
    return order.locate(np.arange(number * windows, (number + 1) * windows, dtype=np.int64))


@pytest.mark.parametrize("windows", [1, 2, 3, 4, 5, 7, 8, 9, 63, 64, 65, 1000, 4097, 100_003])
def test_each_epoch_visits_each_window_once(windows):
    order = SampleOrder(7, windows)
    for number in (0, 1, 5):
        assert np.array_equal(np.sort(epoch(order, windows, number)), np.arange(windows))


def test_epochs_and_seeds_differ_as_random_orders_do():
    windows = 5000
    orders = [
        np.arange(windows),
        *(epoch(SampleOrder(seed, windows), windows, number) for seed in (0, 1, -1) for number in (0, 1)),
    ]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            # Two random orders agree in one place on average.
            assert (one == other).sum() < 12
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.06


@pytest.mark.parametrize("windows", [3, 4, 5])
def test_every_permutation_of_a_few_windows_comes_up_about_as_often(windows):
    epochs = 3000
    rows = SampleOrder(3, windows).locate(np.arange(epochs * windows)).reshape(epochs, windows)
    expected = epochs / windows
    for place in range(windows):
        counts = np.bincount(rows[:, place], minlength=windows)
        assert (abs(counts - expected) < 6 * np.sqrt(expected)).all()


def test_neighbours_are_scattered():
    windows = 1 << 20
    located = SampleOrder(1, windows).locate(np.arange(4096, dtype=np.int64))
    steps = np.abs(np.diff(located))
    assert windows * 0.3 < steps.mean() < windows * 0.37
    assert abs(located.mean() / windows - 0.5) < 0.03


def test_a_sample_does_not_depend_on_what_else_is_asked():
    order, samples = SampleOrder(5, 1237), np.random.default_rng(0).integers(0, 1237 * 9, 500)
    together = order.locate(samples)
    assert together.tolist() == [int(order.locate(np.array([s]))[0]) for s in samples]
    assert together.tolist() == SampleOrder(5, 1237).locate(samples).tolist()
    assert order.locate(np.array([], dtype=np.int64)).shape == (0,)


@pytest.mark.parametrize("windows", [(1 << 31) + 11, 3 * 10**9, 1 << 41])
def test_billions_of_windows(windows):
    samples = np.arange(0, windows * 3, windows // 5000, dtype=np.int64)
    located = SampleOrder(9, windows).locate(samples)
    assert located.min() >= 0
    assert located.max() < windows
    for number in range(3):
        of_epoch = located[samples // windows == number]
        assert len(np.unique(of_epoch)) == len(of_epoch)


def test_the_order_of_earlier_versions_stays():
    # A run resumes with the version of the day; other numbers here would mean other data.
    samples = np.array([0, 1, 2, 999, 1000, 10**12])
    assert SampleOrder(1234, 1000).locate(samples).tolist() == [
        223,
        301,
        386,
        46,
        662,
        917,
    ]
    assert SampleOrder(0, 1 << 31).locate(np.array([0, 1])).tolist() == [1827537860, 210337852]


def test_the_arguments_of_a_caller_stay_as_they_are():
    samples = np.arange(100, dtype=np.int64)
    SampleOrder(1, 10).locate(samples)
    assert samples.tolist() == list(range(100))


@pytest.mark.parametrize("windows", [0, -5])
def test_no_windows(windows):
    with pytest.raises(ValueError, match=str(windows)):
        SampleOrder(1, windows)


def test_negative_sample():
    with pytest.raises(ValueError, match="-3"):
        SampleOrder(1, 10).locate(np.array([4, -3]))


BLOCKED = st.tuples(st.integers(0, 2**63), st.integers(1, 3000), st.integers(1, 200), st.integers(0, 3))


@given(BLOCKED)
def test_blocks_too_visit_each_window_once(drawn):
    seed, windows, block, number = drawn
    order = SampleOrder(seed, windows, block)
    assert np.array_equal(np.sort(epoch(order, windows, number)), np.arange(windows))


@given(BLOCKED, st.integers(0, 10**12))
def test_a_sample_in_blocks_does_not_depend_on_what_else_is_asked(drawn, first):
    seed, windows, block, _ = drawn
    samples = np.arange(first, first + 50)
    together = SampleOrder(seed, windows, block).locate(samples)
    alone = [int(SampleOrder(seed, windows, block).locate(samples[i : i + 1])[0]) for i in (0, 7, 49)]
    assert [together[0], together[7], together[49]] == alone


def test_blocks_keep_reads_near_each_other_and_still_mix():
    windows, block = 100_000, 100
    located = epoch(SampleOrder(11, windows, block), windows, 0)
    for first in range(0, windows - 800, 800):
        places = np.unique(located[first : first + 800] // block)
        # Eight blocks, and those of the group next to it where the tail moved the border.
        assert len(places) <= 17
    batches = located[:80_000].reshape(-1, 32) // block
    assert np.mean([len(set(row)) for row in batches.tolist()]) > 6
    other = epoch(SampleOrder(11, windows, block), windows, 1)
    assert (located == other).mean() < 0.01


def test_the_order_in_blocks_of_earlier_versions_stays():
    samples = np.array([0, 1, 2, 99, 1233, 1234, 5 * 10**9])
    assert SampleOrder(1234, 1234, 10).locate(samples).tolist() == [8, 467, 664, 915, 817, 549, 334]


def test_without_shuffling_windows_come_as_they_lie():
    assert SampleOrder(1, 10, 2, shuffle=False).locate(np.arange(25)).tolist() == [i % 10 for i in range(25)]
