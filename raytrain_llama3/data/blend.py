"""Which source a sample of a blend is from: a pattern of exact proportions, repeated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from raytrain_llama3.errors import DataError

_LONGEST_PATTERN = 1 << 20

Numbers = npt.NDArray[np.int64]


class Blend:
    """Sample number to (source, the source's own sample number), a pure function of `weights`.

    Of every `period` samples each source gives exactly its share, and of any number of samples to within less than one
    a source: the next sample is from the source that is furthest behind. `weights` are decimal texts, one a source,
    on any scale. Raises `DataError` when one is not above 0, or their proportions need a longer pattern than a
    million samples.
    """

    def __init__(self, weights: Sequence[str]) -> None:
        shares = _shares(weights)
        self.period = math.lcm(*(share.denominator for share in shares))
        if self.period > _LONGEST_PATTERN:
            raise DataError(
                f"the weights {' '.join(weights)} come out even only after {self.period} samples; round them, so that "
                f"{_LONGEST_PATTERN} samples will do"
            )
        self._counts = np.array([int(share * self.period) for share in shares], dtype=np.int64)
        self._pattern, self._places = _pattern(self._counts, self.period)

    def locate(self, samples: Numbers) -> tuple[Numbers, Numbers]:
        """Source of each sample and its number among the source's own samples; all `[n]`."""
        rounds, places = np.divmod(samples, np.int64(self.period))
        sources = self._pattern[places]
        return sources, rounds * self._counts[sources] + self._places[places]


def _shares(weights: Sequence[str]) -> list[Fraction]:
    try:
        given = [Fraction(weight) for weight in weights]
    except (ValueError, ZeroDivisionError) as error:
        raise DataError(f"the weights {' '.join(weights)} of a blend must be numbers ({error})") from error
    if min(given) <= 0:
        raise DataError(f"the weights {' '.join(weights)} of a blend must all be above 0: leave such a source out")
    return [weight / sum(given) for weight in given]


def _pattern(counts: Numbers, period: int) -> tuple[Numbers, Numbers]:
    """The source of each of `period` samples, and how many of the source's come before it in the pattern.

    The k-th of a source's n samples is due by (k + 1/2) / n of the way: sorted by that, ties by source, none is ever
    one sample early or late.
    """
    due = np.concatenate([(2 * np.arange(count, dtype=np.float64) + 1) / (2 * count) for count in counts.tolist()])
    sources = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    order = np.lexsort((sources, due))
    places = np.concatenate([np.arange(count, dtype=np.int64) for count in counts.tolist()])
    return sources[order], places[order]
