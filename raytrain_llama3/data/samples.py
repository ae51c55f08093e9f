"""Sample number to tokens: the sources of a blend, each in its own order. What the whole run agrees on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from raytrain_llama3.data.blend import Blend
from raytrain_llama3.data.mixing import GOLDEN, MASK
from raytrain_llama3.data.order import ORDER_VERSION, SampleOrder, block_windows
from raytrain_llama3.data.source import Indices, Tokens, TokenSource

_TABLE, _TABLES = 4096, 8
"""Samples that are located together, and how many such tables are kept."""


class Samples:
    """Samples of a run, counted from 0 over all its epochs: a pure function of the arguments.

    Each source has an order and epochs of its own. Can be sent to another process, before and after use.
    """

    def __init__(
        self, sources: Sequence[TokenSource], weights: Sequence[str], seed: int, *, shuffle: bool = True
    ) -> None:
        self._sources, self._weights, self._seed, self._shuffle = tuple(sources), tuple(weights), seed, shuffle
        self._blend = Blend(weights) if len(sources) > 1 else None
        self._orders: list[SampleOrder] = []
        self._tables: OrderedDict[int, tuple[Indices, Indices]] = OrderedDict()

    @property
    def seq_length(self) -> int:
        """Tokens of a sample, less the one that is only a target."""
        return self._sources[0].seq_length

    @property
    def windows(self) -> int:
        """Windows of all sources, each once."""
        return sum(map(len, self._sources))

    @property
    def sources(self) -> tuple[TokenSource, ...]:
        """The sources of the blend, or the only one."""
        return self._sources

    def read(self, samples: Indices) -> Tokens:
        """`[len(samples), seq_length + 1]`, int32. Raises `DataError` naming file and row."""
        tokens = np.empty((len(samples), self.seq_length + 1), dtype=np.int32)
        for source, places, windows in self._located(samples):
            if len(places) == len(samples):
                return self._sources[source].windows(windows, tokens)
            tokens[places] = self._sources[source].windows(windows)
        return tokens

    def warm(self, samples: Indices) -> None:
        """Begin to read what these samples need, where reading is slow; does not wait."""
        for source, _, windows in self._located(samples):
            self._sources[source].warm(windows)

    def windows_of(self, samples: Indices) -> list[tuple[int, int]]:
        """(source, window) of each sample."""
        found: dict[int, tuple[int, int]] = {}
        for source, places, windows in self._located(samples):
            found |= {p: (source, w) for p, w in zip(places.tolist(), windows.tolist(), strict=True)}
        return [found[place] for place in range(len(samples))]

    def fingerprint(self) -> dict[str, Any]:
        """All that decides which tokens a sample number stands for; plain JSON."""
        told = {"seed": self._seed, "shuffle": self._shuffle, "order": ORDER_VERSION}
        return told | {"weights": list(self._weights), "sources": [source.fingerprint() for source in self._sources]}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_orders": [], "_tables": OrderedDict()}

    def _located(self, samples: Indices) -> list[tuple[int, Indices, Indices]]:
        """(source, places among `samples`, windows) of every source that has some of them."""
        sources, windows = self._looked_up(samples)
        if self._blend is None:
            return [(0, np.arange(len(samples), dtype=np.int64), windows)]
        found = []
        for source in np.unique(sources).tolist():
            places = np.flatnonzero(sources == source)
            found.append((source, places, windows[places]))
        return found

    def _looked_up(self, samples: Indices) -> tuple[Indices, Indices]:
        """Source and window of each sample. Neighbours are computed together: for a few, numpy's calls cost most."""
        if not len(samples):
            return samples, samples
        first, last = int(samples.min()) // _TABLE, int(samples.max()) // _TABLE
        if last - first >= _TABLES:
            return self._computed(samples)
        tables = [self._table(number) for number in range(first, last + 1)]
        sources, windows = tables[0] if len(tables) == 1 else map(np.concatenate, zip(*tables, strict=True))
        at = samples - first * _TABLE
        return sources[at], windows[at]

    def _table(self, number: int) -> tuple[Indices, Indices]:
        """Of samples [number, number + 1) * `_TABLE`; those used last are kept."""
        if number not in self._tables:
            self._tables[number] = self._computed(np.arange(number * _TABLE, (number + 1) * _TABLE, dtype=np.int64))
            while len(self._tables) > _TABLES:
                self._tables.popitem(last=False)
        self._tables.move_to_end(number)
        return self._tables[number]

    def _computed(self, samples: Indices) -> tuple[Indices, Indices]:
        if not self._orders:
            # Two sources of equal length must not be walked in step.
            self._orders = [
                SampleOrder(
                    (self._seed + i * GOLDEN) & MASK if i else self._seed,
                    len(source),
                    block_windows(source.seq_length),
                    shuffle=self._shuffle,
                )
                for i, source in enumerate(self._sources)
            ]
        if self._blend is None:
            return np.zeros_like(samples), self._orders[0].locate(samples)
        sources, numbers = self._blend.locate(samples)
        windows = np.empty_like(samples)
        for source in np.unique(sources).tolist():
            places = np.flatnonzero(sources == source)
            windows[places] = self._orders[source].locate(numbers[places])
        return sources, windows
