"""A checkpoint in the memory of keepers, read like one on the disk."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence

from torch.distributed.checkpoint.metadata import Metadata

from raytrain_llama3.checkpoint.distcp import metadata_of
from raytrain_llama3.checkpoint.keeper import KeeperLink, Key, Refused
from raytrain_llama3.messages import KeptPart


class KeptSource:
    """Every rank's part, each a file under the rank's number."""

    is_raw = True

    def __init__(self, parts: Sequence[KeptPart], key: Key) -> None:
        self._key = key
        self._parts = {str(part.rank): part for part in parts}

    def __str__(self) -> str:
        return f"memory checkpoint of step {self._key[1]}"

    def metadata(self) -> Metadata:
        """The index of all parts. Raises `OSError` when a keeper is gone."""
        places = []
        for part in self._parts.values():
            try:
                link = KeeperLink(part.keeper)
                places += pickle.loads(link.table(part.rank, self._key))
            except Refused as error:
                raise OSError(str(error)) from error
            link.close()
        return metadata_of(places)

    def open(self, file: str) -> io.IOBase:
        """One rank's part, to read from."""
        part = self._parts[file]
        return _Remote(KeeperLink(part.keeper), part.rank, self._key)


class _Remote(io.RawIOBase):
    """Bytes in a keeper's memory as a file."""

    def __init__(self, link: KeeperLink, rank: int, key: Key) -> None:
        self._link, self._rank, self._key, self._at = link, rank, key, 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset
        return offset

    def readinto(self, buffer: object, /) -> int:
        room = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        found = self._link.content(self._rank, self._key, self._at, len(room))
        room[: len(found)] = found
        self._at += len(found)
        return len(found)

    def close(self) -> None:
        self._link.close()
        super().close()
