"""Which window a sample is: a keyed permutation of all windows, new for each epoch.

The permutation is computed, not stored. A Feistel network permutes the numbers of `b` bits, `b` just large enough
for all windows: the number is cut into two halves, and each round changes one half by a keyed scramble of the other,
which can always be undone, so no two inputs meet. Results that are not windows (fewer than half of the
numbers) are put through again until they are: walking along a cycle keeps the map one-to-one ("cycle walking",
Black and Rogaway, 2002). Any rank finds any sample without memory, without state and without asking another.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from raytrain_llama3.data.mixing import GOLDEN, MASK, Words, mix64, seed_word

_ROUNDS = 8


class SampleOrder:
    """Sample number, counted from 0 over the whole run, to window index: a pure function of `seed` and `windows`.

    `seed` is any integer; `windows` are those of one epoch, and may be billions. Raises `ValueError` when `windows`
    is below 1.
    """

    def __init__(self, seed: int, windows: int) -> None:
        if windows < 1:
            raise ValueError(f"windows must be at least 1, got {windows}")
        self._seed, self._windows = seed_word(seed), windows
        bits = (windows - 1).bit_length()
        self._low_bits = np.uint64((bits + 1) // 2)
        self._low_mask = np.uint64((1 << (bits + 1) // 2) - 1)
        self._high_mask = np.uint64((1 << bits // 2) - 1)

    def locate(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Window indices of `samples`, both `[n]`, int64. Raises `ValueError` when a sample number is negative."""
        if samples.size and int(samples.min()) < 0:
            raise ValueError(f"sample numbers count from 0, got {int(samples.min())}")
        epochs, indices = np.divmod(samples.astype(np.int64), np.int64(self._windows))
        keys = mix64(epochs.astype(np.uint64) * np.uint64(GOLDEN) + np.uint64(self._seed))
        located = self._permute(indices.astype(np.uint64), keys)
        outside = np.flatnonzero(located >= self._windows)
        while outside.size:
            located[outside] = self._permute(located[outside], keys[outside])
            outside = outside[located[outside] >= self._windows]
        return located.astype(np.int64)

    def _permute(self, numbers: Words, keys: Words) -> Words:
        high, low = numbers >> self._low_bits, numbers & self._low_mask
        for i in range(0, _ROUNDS, 2):
            high = high ^ (mix64(low ^ (keys + _round_constant(i))) & self._high_mask)
            low = low ^ (mix64(high ^ (keys + _round_constant(i + 1))) & self._low_mask)
        return (high << self._low_bits) | low


def _round_constant(i: int) -> np.uint64:
    return np.uint64((i + 1) * GOLDEN & MASK)
