"""What a rank trained on, written down sample by sample: proof that each came once, and where to look after a NaN."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

from raytrain_llama3.data.feed import Request
from raytrain_llama3.data.source import Tokens


class SampleTrace:
    """Appends a line of JSON for each share that a rank took: its sample numbers and a CRC-32 of each one's tokens."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def __call__(self, request: Request, share: Tokens) -> None:
        """Note `share`, `[num_micro_batches, micro_batch_size, seq_length + 1]`."""
        digests = [zlib.crc32(window.tobytes()) for window in share.reshape(-1, share.shape[-1])]
        line = {"part": request.part, "samples": request.numbers().tolist(), "crc32": digests}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
