import pickle

import numpy as np
import pytest

from raytrain_llama3.data.mock import MockSource


def entropy(counts: np.ndarray) -> float:
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def test_a_window_is_a_pure_function_of_seed_and_index():
    source = MockSource(3, 1000, 65, 1 << 31)
    indices = np.random.default_rng(0).integers(0, 1 << 31, 40)
    windows = source.windows(indices)
    assert windows.shape == (40, 66)
    assert windows.dtype == np.int32
    for index, window in zip(indices, windows, strict=True):
        assert np.array_equal(MockSource(3, 1000, 65, 1 << 31).windows(np.array([index]))[0], window)
    assert len({window.tobytes() for window in windows}) == 40
    assert not np.array_equal(windows, MockSource(4, 1000, 65, 1 << 31).windows(indices))
    assert source.windows(np.array([], dtype=np.int64)).shape == (0, 66)


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 255, 256, 257, 128_256])
def test_ids_fit_the_vocabulary_and_use_it(vocab_size):
    tokens = MockSource(0, vocab_size, 1024, 4000).windows(np.arange(400))
    assert tokens.min() >= 0
    assert tokens.max() < vocab_size
    assert tokens.max() >= vocab_size * 0.9 - 1
    assert len(np.unique(tokens)) > min(vocab_size * 0.9, 5000) - 1


def test_there_is_something_to_learn_and_it_is_the_same_for_every_seed():
    for seed in (0, 77):
        tokens = MockSource(seed, 256, 511, 4000).windows(np.arange(1000))
        single = entropy(np.bincount(tokens.ravel(), minlength=256))
        assert single < np.log(256) - 0.5
        # Every other token follows from the one before.
        assert np.array_equal(tokens[:, 1::2], (tokens[:, 0::2] + 1) % 256)


def test_the_tokens_of_earlier_versions_stay():
    windows = MockSource(1234, 256, 32, 1000).windows(np.array([0, 5]))
    assert windows[:, :8].tolist() == [[11, 12, 1, 2, 0, 1, 0, 1], [0, 1, 79, 80, 203, 204, 174, 175]]


def test_fingerprint_follows_every_value():
    told = {
        str(MockSource(*values).fingerprint())
        for values in [(1, 256, 8, 10), (2, 256, 8, 10), (1, 257, 8, 10), (1, 256, 9, 10), (1, 256, 8, 11)]
    }
    assert len(told) == 5
    assert str(MockSource(1, 256, 8, 10).fingerprint()) in told


def test_length_and_pickle():
    source = pickle.loads(pickle.dumps(MockSource(1, 256, 8, 10)))
    assert (len(source), source.seq_length) == (10, 8)


@pytest.mark.parametrize("index", [-1, 10])
def test_no_such_window(index):
    with pytest.raises(IndexError, match=str(index)):
        MockSource(1, 256, 8, 10).windows(np.array([0, index]))


@pytest.mark.parametrize(("values", "name"), [((0, 8, 1), "vocab_size"), ((1, 0, 1), "seq_length"), ((1, 8, 0), "win")])
def test_sizes_below_one(values, name):
    with pytest.raises(ValueError, match=name):
        MockSource(0, *values)
