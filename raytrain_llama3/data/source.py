"""What training data must answer, whether mock tokens, shards or a blend of both."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
"""Token ids. int32 holds every vocabulary and is half of what travels as int64, which the device makes of it."""

Indices = npt.NDArray[np.int64]


class TokenSource(Protocol):
    """Windows of token ids, packed in the manifest's order.

    Implementations open files on first use, never at construction, so that one can be sent to another process.
    """

    seq_length: int

    def __len__(self) -> int:
        """Windows in one epoch."""
        ...

    def windows(self, indices: Indices, out: Tokens | None = None) -> Tokens:
        """Read windows into `out`, or a new array: `[len(indices), seq_length + 1]`, int32.

        Raises `DataError` naming file and row.
        """
        ...

    def warm(self, indices: Indices) -> None:
        """Begin to read what these windows need, where reading is slow; does not wait."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """Changes when another sequence of windows would be read (shards, sizes, packing, tokenizer); plain JSON."""
        ...
