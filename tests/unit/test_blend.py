import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_llama3.data.blend import Blend
from raytrain_llama3.data.mock import MockSource
from raytrain_llama3.data.samples import Samples
from raytrain_llama3.data.sources import parse_blend
from raytrain_llama3.errors import DataError

WEIGHTS = st.lists(st.integers(1, 60), min_size=2, max_size=6)


@given(WEIGHTS, st.integers(0, 10**9))
def test_each_source_gives_its_own_samples_one_after_another(weights, first):
    blend = Blend([str(w) for w in weights])
    first -= first % blend.period
    sources, numbers = blend.locate(np.arange(first, first + 3 * blend.period))
    for source, weight in enumerate(weights):
        mine = numbers[sources == source]
        start = first * weight // sum(weights)
        assert mine.tolist() == list(range(start, start + len(mine)))
        assert len(mine) == 3 * blend.period * weight // sum(weights)


@given(WEIGHTS)
def test_no_source_is_ever_a_sample_early_or_late(weights):
    blend = Blend([str(w) for w in weights])
    sources, _ = blend.locate(np.arange(2 * blend.period))
    for source, weight in enumerate(weights):
        given_so_far = np.cumsum(sources == source)
        due = np.arange(1, len(sources) + 1) * weight / sum(weights)
        assert abs(given_so_far - due).max() < len(weights)


def test_decimal_weights_are_exact():
    blend = Blend(["0.7", "0.3"])
    assert blend.period == 10
    sources, _ = blend.locate(np.arange(10_000))
    assert (sources == 0).sum() == 7000
    thirds = Blend(["0.3333", "0.6667"])
    assert Fraction(int((thirds.locate(np.arange(10_000))[0] == 0).sum()), 10_000) == Fraction("0.3333")


@pytest.mark.parametrize("weights", [["0", "1"], ["-1", "2"], ["x", "1"], ["nan", "1"], ["0.123456789", "0.9"]])
def test_weights_that_will_not_do(weights):
    with pytest.raises(DataError, match=re.escape(" ".join(weights))):
        Blend(weights)


def test_sources_of_equal_length_are_walked_in_orders_of_their_own():
    sources = [MockSource(seed, 500, 8, 64) for seed in (1, 2)]
    samples = Samples(sources, ["1", "1"], 5)
    located = samples.windows_of(np.arange(128))
    first, second = ([w for s, w in located if s == i] for i in (0, 1))
    assert sorted(first) == sorted(second) == list(range(64))
    assert first != second
    tokens = samples.read(np.arange(128))
    for row, (source, window) in zip(tokens, located, strict=True):
        assert np.array_equal(row, sources[source].windows(np.array([window]))[0])


@pytest.mark.parametrize("weights", [["1"], ["0.7", "0.2", "0.1"]])
def test_a_sample_is_the_same_whatever_is_asked_with_it(weights):
    sources = [MockSource(seed, 500, 8, 640 + seed) for seed in range(len(weights))]
    numbers = np.array([0, 4095, 4096, 5, 8191, 8192, 10**6, 10**12, 3])
    alone = [Samples(sources, weights, 5).windows_of(numbers[i : i + 1])[0] for i in range(len(numbers))]
    samples = Samples(sources, weights, 5)
    for asked in (numbers[:6], numbers, numbers[:1], np.arange(60_000, dtype=np.int64), numbers[::-1]):
        found = dict(zip(asked.tolist(), samples.windows_of(asked), strict=True))
        assert all(found.get(n, place) == place for n, place in zip(numbers.tolist(), alone, strict=True))
    assert samples.windows_of(numbers[:0]) == []
    assert samples.read(numbers[:0]).shape == (0, 9)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("a", (["1"], [["a"]])),
        ("0.7 a 0.3 b", (["0.7", "0.3"], [["a"], ["b"]])),
        (" 30 s3://x/y 70 b/*.arrow ", (["30", "70"], [["s3://x/y"], ["b/*.arrow"]])),
        ("a b", (["1"], [["a", "b"]])),
    ],
)
def test_how_a_blend_is_written(text, parsed):
    assert parse_blend(text) == parsed


@pytest.mark.parametrize("text", ["0.7 a 0.3", "a 0.7 b 0.3", "0.7 0.3 a b", "0.5 a b 0.5"])
def test_how_it_is_not(text):
    with pytest.raises(DataError, match="WEIGHT PLACE WEIGHT PLACE"):
        parse_blend(text)


def test_a_folder_with_a_blank_in_its_name_is_no_blend(tmp_path):
    (tmp_path / "1 a").mkdir()
    assert parse_blend(str(tmp_path / "1 a")) == (["1"], [[str(tmp_path / "1 a")]])
