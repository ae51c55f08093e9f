"""Made-up tokens for runs without data: cheap, the same on every machine, and with something to learn in them."""

from __future__ import annotations

from typing import Any

import numpy as np

from raytrain_llama3.data.mixing import GOLDEN, Words, mix64, seed_word
from raytrain_llama3.data.source import Indices, Tokens


class MockSource:
    """A `TokenSource` whose window i is a pure function of (`seed`, i).

    Tokens come in pairs. The first of a pair is drawn, small ids far more often than large ones (roughly 1 / id,
    like words); the second is the first plus one. A model learns the skew at once and the pairs soon after, and both
    hold for every seed, so the loss falls on training and on validation windows.

    Ids lie in [0, `vocab_size`); an epoch is `windows` windows. Raises `ValueError` when a size is below 1.
    """

    def __init__(self, seed: int, vocab_size: int, seq_length: int, windows: int) -> None:
        for name, size in (("vocab_size", vocab_size), ("seq_length", seq_length), ("windows", windows)):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        self.seq_length = seq_length
        self._seed, self._vocab_size, self._windows = seed, vocab_size, windows

    def __len__(self) -> int:
        """Windows in one epoch."""
        return self._windows

    def windows(self, indices: Indices, out: Tokens | None = None) -> Tokens:
        """Make windows: `[len(indices), seq_length + 1]`, int32. Raises `IndexError` outside [0, windows)."""
        if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < self._windows:
            raise IndexError(f"window indices must lie in [0, {self._windows}), got {indices.min()} to {indices.max()}")
        pairs = self.seq_length // 2 + 1
        keys = mix64(indices.astype(np.uint64) * np.uint64(GOLDEN) + np.uint64(seed_word(self._seed)))
        firsts = self._skewed(mix64(keys[:, None] + np.arange(pairs, dtype=np.uint64) * np.uint64(GOLDEN)))
        tokens = np.empty((len(indices), 2 * pairs), dtype=np.int32)
        tokens[:, 0::2] = firsts
        tokens[:, 1::2] = (firsts + np.uint64(1)) % np.uint64(self._vocab_size)
        if out is None:
            return tokens[:, : self.seq_length + 1]
        out[:] = tokens[:, : self.seq_length + 1]
        return out

    def warm(self, indices: Indices) -> None:
        """Nothing to do: tokens are made when they are asked for."""

    def fingerprint(self) -> dict[str, Any]:
        """Every value that the tokens follow from, and the version of the recipe."""
        return {
            "kind": "mock-1",
            "seed": self._seed,
            "vocab_size": self._vocab_size,
            "seq_length": self.seq_length,
            "windows": self._windows,
        }

    def _skewed(self, words: Words) -> Words:
        """Uniform words to ids: a uniform id, shifted right by a uniform number of bits."""
        # Whole numbers only: logarithms in floating point differ in the last bit between processors.
        shifts = np.uint64(self._vocab_size.bit_length())
        return (words >> np.uint64(16)) % np.uint64(self._vocab_size) >> (words & np.uint64(0xFFFF)) % shifts
