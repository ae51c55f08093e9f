"""A fast keyed scramble of 64-bit numbers, the same on every machine and with every numpy.

Not `numpy.random`: what a sample number stands for must never change, or a resumed run would read other data.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

GOLDEN = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: splitmix64's step from one input to the next."""
MASK = (1 << 64) - 1


def mix64(words: Words) -> Words:
    """Scramble each word one-to-one, every input bit reaching every output bit.

    This is the output function of splitmix64 (Steele, Lea and Flood, 2014), the variant in java.util.SplittableRandom.
    """
    mixed = words ^ (words >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def seed_word(seed: int) -> int:
    """Any integer seed as a well-mixed 64-bit number; neighbouring seeds come out unrelated."""
    return int(mix64(np.array([(seed * GOLDEN + 1) & MASK], dtype=np.uint64))[0])
