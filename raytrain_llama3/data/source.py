"""What training data must answer, whether mock, Arrow shards or a stream through Ray."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]


class TokenSource(Protocol):
    """Windows of token ids, packed in the manifest's order.

    Implementations open files on first use, never at construction, so that one can be sent to another process.
    """

    seq_length: int

    def __len__(self) -> int:
        """Windows in one epoch."""
        ...

    def windows(self, indices: npt.NDArray[np.int64]) -> Tokens:
        """Read windows: `[len(indices), seq_length + 1]`, int64. Raises `DataError` naming file and row."""
        ...

    def fingerprint(self) -> str:
        """Changes when another sequence of windows would be read (shards, sizes, packing, tokenizer)."""
        ...
