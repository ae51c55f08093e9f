"""Where a save goes: straight to the disk, to the disk through the writer process, or into a keeper's memory."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from raytrain_llama3.checkpoint import distcp
from raytrain_llama3.checkpoint.distcp import Item, Part, Place
from raytrain_llama3.checkpoint.folder import clear_partial
from raytrain_llama3.checkpoint.keeper import KeeperLink, Key, Refused, SetFacts
from raytrain_llama3.checkpoint.pieces import Piece
from raytrain_llama3.checkpoint.staging import Files, Staging
from raytrain_llama3.checkpoint.writer import IndexJob, Staged, WriteJob, WriterProcess
from raytrain_llama3.messages import FileFacts, KeeperAddress


class Destination(Protocol):
    """What a save is made of, in order; the last three on a thread of their own where `staging` is there."""

    staging: Staging | None
    """The copy that training waits for; None: it waits for all."""
    is_disk: bool

    def prepare(self, path: Path) -> None:
        """On rank 0, before any rank writes."""

    def write(self, path: Path, what: WriteJob | Files, samples: int) -> Part:
        """This rank's part."""

    def conclude(self, path: Path, parts: Sequence[Part]) -> dict[str, FileFacts]:
        """On rank 0, once every part is there."""

    def confirm(self, path: Path) -> None:
        """On every rank, once all of the save has come about."""

    def close(self) -> None:
        """End it, whatever is under way."""


class Direct:
    """Written by this process from where the numbers are."""

    is_disk = True

    def __init__(self) -> None:
        self.staging: Staging | None = None

    def prepare(self, path: Path) -> None:
        """An empty folder."""
        clear_partial(path)
        path.mkdir(parents=True)

    def write(self, path: Path, what: WriteJob | Files, samples: int) -> Part:
        """Files, one thread each."""
        assert isinstance(what, dict)
        return distcp.write_files(path, {name: _row(pieces, blobs) for name, (pieces, blobs) in what.items()})

    def conclude(self, path: Path, parts: Sequence[Part]) -> dict[str, FileFacts]:
        """The index."""
        return distcp.write_index(path, parts)

    def confirm(self, path: Path) -> None:
        """Nothing: the driver publishes."""

    def close(self) -> None:
        """Nothing is under way when the training thread is here."""


class ThroughWriter(Direct):
    """Written by the writer process from a copy in host memory."""

    def __init__(self, *, on_gpu: bool) -> None:
        super().__init__()
        staging = Staging(on_gpu=on_gpu)
        self.staging, self.writer = staging, WriterProcess(staging.buffer)

    def write(self, path: Path, what: WriteJob | Files, samples: int) -> Part:
        """Files, by the other process."""
        assert isinstance(what, WriteJob)
        return self.writer.write(what)

    def conclude(self, path: Path, parts: Sequence[Part]) -> dict[str, FileFacts]:
        """The index, by the other process."""
        return self.writer.write_index(IndexJob(path, tuple(parts)))

    def close(self) -> None:
        """Kill the writer."""
        self.writer.close()


class ToKeepers:
    """Sent to keepers, all of it to each, from a copy in host memory; nothing is written."""

    is_disk = False

    def __init__(
        self,
        rank: int,
        world_size: int,
        attempt: int,
        keepers: Sequence[KeeperAddress],
        whole: Key | None,
        *,
        on_gpu: bool,
    ) -> None:
        self._rank, self._world_size, self._attempt = rank, world_size, attempt
        # The newest set of which every rank's part is held, as far as this rank knows.
        self._whole = whole
        self._keepers = tuple(keepers)
        self._links: list[KeeperLink] = []
        self.staging: Staging | None = Staging(on_gpu=on_gpu)

    def prepare(self, path: Path) -> None:
        """Nothing: a keeper takes what comes."""

    def write(self, path: Path, what: WriteJob | Files, samples: int) -> Part:
        """One block of bytes: the numbers as they lie in the copy, then the objects."""
        assert isinstance(what, WriteJob)
        assert self.staging is not None
        places, blobs, end = [], bytearray(), self.staging.buffer.used
        for row in what.files.values():
            for item in row:
                if isinstance(item, Staged):
                    places.append(Place(item.box, str(self._rank), item.start, item.nbytes))
                else:
                    places.append(Place(item[0], str(self._rank), end + len(blobs), len(item[1])))
                    blobs += item[1]
        content = [self.staging.buffer.content, memoryview(blobs)]
        about = SetFacts(self._world_size, samples, self._whole)
        try:
            for keeper in self._keepers[len(self._links) :]:
                self._links.append(KeeperLink(keeper))
            for link in self._links:
                link.put(self._rank, self._key(path), about, pickle.dumps(places), content)
        except Refused:
            # What broke off in the middle cannot be gone on with.
            self.close()
            raise
        return Part((), {})

    def conclude(self, path: Path, parts: Sequence[Part]) -> dict[str, FileFacts]:
        """Nothing: a set counts when every part is held, which the driver sees."""
        return {}

    def confirm(self, path: Path) -> None:
        """The set is whole: keepers may let the ones before it go."""
        self._whole = self._key(path)

    def close(self) -> None:
        """Hang up."""
        for link in self._links:
            link.close()
        self._links = []

    def _key(self, path: Path) -> Key:
        return self._attempt, int(path.name)


def _row(pieces: Sequence[Piece], blobs: Iterable[tuple[Item, bytes]]) -> Iterator[tuple[Item, Tensor | bytes]]:
    yield from blobs
    for piece in pieces:
        with torch.no_grad():
            yield piece.box, distcp.alone(piece.read())
