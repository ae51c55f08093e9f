"""Reads boxes of global tensors from wherever they lie: in a checkpoint's files, or in the memory of keepers."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from raytrain_llama3.checkpoint.distcp import Box, read_metadata

_THREADS = 4


class Source(Protocol):
    """Where a checkpoint's bytes are."""

    is_raw: bool
    """Whether tensors lie there as bare numbers, and not as `torch.save` writes them."""

    def metadata(self) -> Metadata:
        """The index of all that is there."""

    def open(self, file: str) -> io.IOBase:
        """One of the files that the index names, to read from."""


class FolderSource:
    """A checkpoint on the disk."""

    is_raw = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __str__(self) -> str:
        return str(self._folder)

    def metadata(self) -> Metadata:
        """The index of all that is there."""
        return read_metadata(self._folder)

    def open(self, file: str) -> io.IOBase:
        """One of the files that the index names, to read from."""
        return (self._folder / file).open("rb")


@dataclass(slots=True)
class Target:
    """A box that is wanted: it is put into `tensor` (of `box.sizes`), and `done` is called when all of it is there."""

    box: Box
    tensor: Tensor
    done: Callable[[], None] | None = None


class Reader:
    """Reads from one checkpoint."""

    def __init__(self, source: Source) -> None:
        self._source, self._metadata = source, source.metadata()

    @property
    def keys(self) -> set[str]:
        """Names of all tensors and objects."""
        return set(self._metadata.state_dict_metadata)

    def dtype(self, key: str) -> torch.dtype | None:
        """What a tensor is stored as; None for an object, and for what is not there."""
        entry = self._metadata.state_dict_metadata.get(key)
        return entry.properties.dtype if isinstance(entry, TensorStorageMetadata) else None

    def shape(self, key: str) -> tuple[int, ...]:
        """The global shape of a tensor. Raises `KeyError` when there is none of that name."""
        return tuple(self._entry(key).size)

    def object(self, key: str) -> object:
        """An object that was saved. Raises `KeyError` when there is none of that name."""
        index = MetadataIndex(key)
        if self._metadata.storage_data is None or index not in self._metadata.storage_data:
            raise KeyError(f"{key} is not in the checkpoint")
        info = self._metadata.storage_data[index]
        with self._source.open(info.relative_path) as file:
            # Transformer Engine's state holds streams, which the safe reader does not know.
            (value,) = torch.load(_view(file, info), weights_only=False)
        return value

    def tensor(self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """One box, as it is stored, on the CPU."""
        entry = self._entry(key)
        box = Box(key, entry.properties.dtype, tuple(entry.size), offsets, sizes)
        found = torch.empty(sizes, dtype=box.dtype)
        self.fill([Target(box, found)])
        return found

    def fill(self, targets: Iterable[Target]) -> None:
        """Read every box. Raises `KeyError` or `ValueError` naming a tensor that is not there or has another shape."""
        by_file: dict[str, list[tuple[ReadItem, Target]]] = {}
        pending: dict[int, int] = {}
        assert self._metadata.storage_data is not None
        for target in targets:
            items = self._items(target)
            pending[id(target)] = len(items)
            for item in items:
                file = self._metadata.storage_data[item.storage_index].relative_path
                by_file.setdefault(file, []).append((item, target))
        with ThreadPoolExecutor(_THREADS) as readers:
            for finished in readers.map(lambda file: self._read(file, by_file[file]), by_file):
                for target in finished:
                    pending[id(target)] -= 1
                    if not pending[id(target)] and target.done is not None:
                        target.done()

    def _entry(self, key: str) -> TensorStorageMetadata:
        entry = self._metadata.state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            raise KeyError(f"{key} is not in the checkpoint")
        return entry

    def _items(self, target: Target) -> list[ReadItem]:
        box, entry = target.box, self._entry(target.box.key)
        if tuple(entry.size) != box.global_shape:
            raise ValueError(f"{box.key} has shape {list(entry.size)} there, {list(box.global_shape)} here")
        wanted = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
        items: list[ReadItem] = create_read_items_for_chunk_list(box.key, entry, [wanted])
        return items

    def _read(self, file: str, items: list[tuple[ReadItem, Target]]) -> list[Target]:
        """The parts of boxes that lie in one file, in the order in which they lie there."""
        assert self._metadata.storage_data is not None
        storage = self._metadata.storage_data
        held: tuple[MetadataIndex | None, Tensor | None] = (None, None)
        with self._source.open(file) as stream:
            for item, target in sorted(items, key=lambda pair: storage[pair[0].storage_index].offset):
                info = storage[item.storage_index]
                if held[0] != item.storage_index:
                    held = item.storage_index, self._stored(stream, item, info)
                stored = held[1]
                assert stored is not None
                box = stored[_slices(item.storage_offsets, item.lengths)]
                with torch.no_grad():
                    target.tensor[_slices(item.dest_offsets, item.lengths)].copy_(box)
        return [target for _, target in items]

    def _stored(self, stream: io.IOBase, item: ReadItem, info: Any) -> Tensor:
        """A whole box as it was saved."""
        if not self._source.is_raw:
            found: Tensor = torch.load(_view(stream, info), map_location="cpu", weights_only=True)
            return found
        index = item.storage_index
        entry = self._entry(index.fqn)
        sizes = next(chunk.sizes for chunk in entry.chunks if chunk.offsets == index.offset)
        room = bytearray(info.length)
        stream.seek(info.offset)
        stream.readinto(room)  # type: ignore[attr-defined]
        return torch.frombuffer(room, dtype=entry.properties.dtype).view(sizes)


class _View(io.RawIOBase):
    """A part of an open file as a file."""

    def __init__(self, file: io.IOBase, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence] + offset
        return self._at

    def readinto(self, buffer: object, /) -> int:
        wanted = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        wanted = wanted[: max(0, self._length - self._at)]
        self._file.seek(self._start + self._at)
        count: int = self._file.readinto(wanted)  # type: ignore[attr-defined]
        self._at += count
        return count


def _view(file: io.IOBase, info: Any) -> IO[bytes]:
    return cast("IO[bytes]", _View(file, info.offset, info.length))


def _slices(offsets: Iterable[int], lengths: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
