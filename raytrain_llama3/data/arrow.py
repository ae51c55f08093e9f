"""Windows of token ids from Arrow shards.

A dataset folder is `manifest.json` and `shard-00000.arrow`, `shard-00001.arrow`, …: Arrow IPC files with one column
`tokens: list<uint16 or uint32>`, a row a document, several record batches a shard. They are mapped into memory, so
that all ranks of a node share one copy in the page cache.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raytrain_llama3.data.manifest import Documents, Manifest, Shard, read_manifest, split_documents
from raytrain_llama3.data.shard import OpenShard
from raytrain_llama3.data.source import Tokens
from raytrain_llama3.errors import DataError

__all__ = ["ArrowSource", "Documents", "Manifest", "Shard", "read_manifest", "split_documents"]

_MAX_OPEN_SHARDS = 256
"""Each open shard costs a file descriptor, of which containers often allow 1,024."""


class ArrowSource:
    """A `TokenSource` over a range of a dataset's documents.

    The documents, in manifest order, are one stream of tokens. Window i is tokens
    [i * seq_length, (i + 1) * seq_length + 1): neighbours share one token, which is target here and input there.

    `documents` is a half-open range of document numbers, in manifest order; every id must be below `vocab_size`.

    Nothing is opened before the first use, then the manifest and, as they are needed, shards, which stay open.
    Pickling leaves the open files behind. Raises `DataError` at first use when the folder or a shard is damaged, or
    the range holds less than one window.
    """

    def __init__(self, folder: Path, documents: Documents, seq_length: int, vocab_size: int) -> None:
        self.seq_length = seq_length
        self._folder, self._documents, self._vocab_size = folder, documents, vocab_size
        self._stream: _Stream | None = None

    def __len__(self) -> int:
        """Windows in one epoch."""
        return self._opened().windows(self.seq_length)

    def windows(self, indices: npt.NDArray[np.int64]) -> Tokens:
        """Read windows: `[len(indices), seq_length + 1]`, int64.

        Raises `DataError`, naming file, row and id, when a shard is damaged or an id is not below `vocab_size`, and
        `IndexError` for an index outside [0, len(self)).
        """
        stream = self._opened()
        count = stream.windows(self.seq_length)
        tokens = np.empty((len(indices), self.seq_length + 1), dtype=np.int64)
        for row, index in zip(tokens, indices.tolist(), strict=True):
            if not 0 <= index < count:
                raise IndexError(f"window indices must lie in [0, {count}), got {index}")
            stream.read(index * self.seq_length, row)
            if row.max() >= self._vocab_size:
                self._refuse(stream, index * self.seq_length, row)
        return tokens

    def fingerprint(self) -> str:
        """Changes with the dataset, the range of documents and the window length."""
        told = f"{self._opened().manifest.fingerprint()} {self._documents} {self.seq_length}"
        return f"arrow-1 {hashlib.sha256(told.encode()).hexdigest()[:16]}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stream": None}

    def _opened(self) -> _Stream:
        if self._stream is None:
            stream = _Stream(self._folder, self._documents)
            if stream.windows(self.seq_length) < 1:
                first, last = self._documents
                raise DataError(
                    f"documents {first} to {last} of {self._folder} hold {stream.tokens} tokens, and one window needs "
                    f"{self.seq_length + 1} (seq_length + 1); add documents, give this part a larger share of split, "
                    f"or lower seq_length"
                )
            self._stream = stream
        return self._stream

    def _refuse(self, stream: _Stream, position: int, row: npt.NDArray[np.int64]) -> None:
        offset = int(np.argmax(row >= self._vocab_size))
        path, document = stream.origin(position + offset)
        raise DataError(
            f"{path}, row {document}: token id {row[offset]} does not fit vocab_size {self._vocab_size}; set "
            f"vocab_size to {stream.manifest.vocab_size} or more (the dataset's tokenizer is "
            f"{stream.manifest.tokenizer}), or tokenize the data again"
        )


class _Stream:
    """The tokens of a range of documents, one after another."""

    def __init__(self, folder: Path, documents: Documents) -> None:
        self.manifest = read_manifest(folder)
        self._folder = folder
        self._open: dict[int, OpenShard] = {}
        # Tokens and documents before each shard, and in all.
        self._token_starts = np.cumsum([0, *(s.tokens for s in self.manifest.shards)], dtype=np.int64)
        self._row_starts = np.cumsum([0, *(s.documents for s in self.manifest.shards)], dtype=np.int64)
        first, last = documents
        if not 0 <= first <= last <= self.manifest.documents:
            raise DataError(
                f"documents {first} to {last} were asked for, but {folder} has {self.manifest.documents}; was the "
                f"dataset made again during the run?"
            )
        self._start = self._document_start(first)
        self.tokens = self._document_start(last) - self._start

    def windows(self, seq_length: int) -> int:
        return max(self.tokens - 1, 0) // seq_length

    def read(self, position: int, out: npt.NDArray[np.int64]) -> None:
        """Fill `out` with the tokens from `position` on."""
        start = self._start + position
        stop, done = start + len(out), start
        number = int(np.searchsorted(self._token_starts, start, side="right")) - 1
        while done < stop:
            base, end = int(self._token_starts[number]), min(stop, int(self._token_starts[number + 1]))
            if done < end:
                self._shard(number).copy_tokens(done - base, end - base, out[done - start : end - start])
            done = end
            number += 1

    def origin(self, position: int) -> tuple[Path, int]:
        """The file that holds the token at `position`, and the row in that file."""
        token = self._start + position
        number = int(np.searchsorted(self._token_starts, token, side="right")) - 1
        shard = self._shard(number)
        return shard.path, shard.row_of(token - int(self._token_starts[number]))

    def _document_start(self, document: int) -> int:
        number = int(np.searchsorted(self._row_starts, document, side="right")) - 1
        row = document - int(self._row_starts[number])
        return int(self._token_starts[number]) + (self._shard(number).row_start(row) if row else 0)

    def _shard(self, number: int) -> OpenShard:
        shard = self._open.get(number)
        if shard is None:
            if len(self._open) >= _MAX_OPEN_SHARDS:
                del self._open[next(iter(self._open))]
            shard = self._open[number] = OpenShard(self._folder, self.manifest.shards[number])
        return shard
