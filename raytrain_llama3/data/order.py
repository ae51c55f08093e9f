"""Which window a sample is: keyed permutations, computed and not stored, new for each epoch.

Windows are taken in blocks, which are permuted; then the windows of `_TOGETHER` neighbouring places' blocks are
permuted among themselves. So reads stay within a few places of the data for a while, and samples of one batch still
come from several.

A permutation is a Feistel network on the numbers of `b` bits, `b` just large enough: the number is cut into two
halves, and each round changes one half by a keyed scramble of the other, which can always be undone, so no two inputs
meet. Results that are too large (fewer than half) are put through again until they are not: walking along a cycle
keeps the map one-to-one ("cycle walking", Black and Rogaway, 2002). Any process finds any sample without memory,
without state and without asking another.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from raytrain_llama3.data.mixing import GOLDEN, MASK, Words, mix64, seed_word

ORDER_VERSION = 2
"""Part of the data's fingerprint: another one reads the same windows in another order."""

_ROUNDS = 8
_BLOCK_TOKENS = 1 << 20
_TOGETHER = 8
_BLOCKS, _WITHIN, _TAIL, _TAIL_PLACE = 1, 2, 3, 4
"""What a permutation's key is for; the same numbers mean the same order for ever."""


def block_windows(seq_length: int) -> int:
    """Windows of one block: a million tokens."""
    return max(1, _BLOCK_TOKENS // seq_length)


class SampleOrder:
    """Sample number, counted from 0 over the whole run, to window index: a pure function of the arguments.

    `seed` is any integer; `windows` are those of one epoch, and may be billions; `block` is how many neighbouring
    windows stay together. With `shuffle` off windows come as they lie. Raises `ValueError` when `windows` or
    `block` is below 1.
    """

    def __init__(self, seed: int, windows: int, block: int = 1, *, shuffle: bool = True) -> None:
        if windows < 1 or block < 1:
            raise ValueError(f"windows and block must be at least 1, got {windows} and {block}")
        self._seed, self._windows, self._block, self._shuffle = seed_word(seed), windows, block, shuffle
        # One window a block, or blocks that do not fill one group, are one permutation of all.
        whole = windows if block == 1 or windows <= block * _TOGETHER else windows // block * block
        self._whole, self._blocks = whole, max(whole // block, 1)
        self._group = block * _TOGETHER

    def locate(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Window indices of `samples`, both `[n]`, int64. Raises `ValueError` when a sample number is negative."""
        if samples.size and int(samples.min()) < 0:
            raise ValueError(f"sample numbers count from 0, got {int(samples.min())}")
        epochs, indices = np.divmod(samples.astype(np.int64), np.int64(self._windows))
        if not self._shuffle:
            return indices
        keys = mix64(epochs.astype(np.uint64) * np.uint64(GOLDEN) + np.uint64(self._seed))
        if self._block == 1 or self._whole <= self._group:
            return permuted(indices.astype(np.uint64), self._windows, keys).astype(np.int64)
        return self._in_blocks(indices, keys)

    def _in_blocks(self, indices: npt.NDArray[np.int64], keys: Words) -> npt.NDArray[np.int64]:
        """The windows after the last whole block come all together, between two groups or at either end."""
        tail = self._windows - self._whole
        groups = -(-self._whole // self._group)
        starts = (_keyed(keys, _TAIL_PLACE) % np.uint64(groups + 1)).astype(np.int64) * self._group
        starts = np.minimum(starts, self._whole)
        in_tail = (indices >= starts) & (indices < starts + tail)
        located = np.empty(len(indices), dtype=np.int64)
        if in_tail.any():
            number = (indices - starts)[in_tail].astype(np.uint64)
            located[in_tail] = self._whole + permuted(number, tail, _keyed(keys[in_tail], _TAIL)).astype(np.int64)
        others = ~in_tail
        places = (indices - np.where(indices >= starts + tail, tail, 0))[others]
        located[others] = self._whole_blocks(places, keys[others])
        return located

    def _whole_blocks(self, places: npt.NDArray[np.int64], keys: Words) -> npt.NDArray[np.int64]:
        groups, within = np.divmod(places, np.int64(self._group))
        sizes = np.minimum(self._group, self._whole - groups * self._group)
        mine = mix64(_keyed(keys, _WITHIN) + groups.astype(np.uint64) * np.uint64(GOLDEN))
        slots = np.empty(len(places), dtype=np.int64)
        # Two sizes at most: that of all groups but the last, and the last one's.
        for size in np.unique(sizes).tolist():
            chosen = sizes == size
            slots[chosen] = permuted(within[chosen].astype(np.uint64), size, mine[chosen]).astype(np.int64)
        slots += groups * self._group
        numbers, rest = np.divmod(slots, np.int64(self._block))
        blocks = permuted(numbers.astype(np.uint64), self._blocks, _keyed(keys, _BLOCKS)).astype(np.int64)
        return blocks * self._block + rest


def permuted(numbers: Words, size: int, keys: Words) -> Words:
    """Permute `numbers`, each in [0, size), by the permutation of its key; all `[n]`."""
    bits = (size - 1).bit_length()
    located = _feistel(numbers, bits, keys)
    outside = np.flatnonzero(located >= size)
    while outside.size:
        located[outside] = _feistel(located[outside], bits, keys[outside])
        outside = outside[located[outside] >= size]
    return located


def _feistel(numbers: Words, bits: int, keys: Words) -> Words:
    low_bits = np.uint64((bits + 1) // 2)
    low_mask, high_mask = np.uint64((1 << (bits + 1) // 2) - 1), np.uint64((1 << bits // 2) - 1)
    high, low = numbers >> low_bits, numbers & low_mask
    for i in range(0, _ROUNDS, 2):
        high = high ^ (mix64(low ^ (keys + _round_constant(i))) & high_mask)
        low = low ^ (mix64(high ^ (keys + _round_constant(i + 1))) & low_mask)
    return (high << low_bits) | low


def _keyed(keys: Words, purpose: int) -> Words:
    return mix64(keys + np.uint64(purpose * GOLDEN & MASK))


def _round_constant(i: int) -> np.uint64:
    return np.uint64((i + 1) * GOLDEN & MASK)
