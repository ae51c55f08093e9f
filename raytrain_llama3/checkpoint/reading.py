"""Reads boxes of global tensors from wherever they lie: in a checkpoint's files, or in the memory of keepers.

Numbers go from the file straight to where they are wanted. A copy of what the file holds is made only where what is
wanted lies elsewhere than in this memory, is of another kind, or has gaps.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Callable, Iterable, Sequence
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
_HEAD_BYTES = 4096
"""What is read at once where a tensor's own description is, which is in pieces of a few bytes."""


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
        return (self._folder / file).open("rb", buffering=0)


@dataclass(slots=True)
class Target:
    """A box that is wanted: it is put into `tensor` (of `box.sizes`), and `done` is called when all of it is there.

    Calls come in the order in which the boxes were asked for, after all of them are there.
    """

    box: Box
    tensor: Tensor
    done: Callable[[], None] | None = None


class Reader:
    """Reads from one checkpoint."""

    def __init__(self, source: Source) -> None:
        self._source, self._metadata = source, source.metadata()
        self._forms: dict[tuple[int, ...], _Form] = {}

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
        """Read every box.

        Raises `KeyError` or `ValueError` naming a tensor that is not there, has another shape, or is damaged.
        """
        assert self._metadata.storage_data is not None
        by_file: dict[str, list[tuple[ReadItem, Tensor]]] = {}
        targets = list(targets)
        for target in targets:
            for item in self._items(target):
                file = self._metadata.storage_data[item.storage_index].relative_path
                into = target.tensor[_slices(item.dest_offsets, item.lengths)]
                by_file.setdefault(file, []).append((item, into))
        # Each file in one go from front to back: in turns with itself, the kernel reads less of it ahead.
        with ThreadPoolExecutor(_THREADS) as readers:
            list(readers.map(lambda file: self._read(file, by_file[file]), by_file))
        for target in targets:
            if target.done is not None:
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

    def _read(self, file: str, items: list[tuple[ReadItem, Tensor]]) -> None:
        """The parts of boxes that lie in one file, in the order in which they lie there."""
        assert self._metadata.storage_data is not None
        storage = self._metadata.storage_data
        items.sort(key=lambda pair: storage[pair[0].storage_index].offset)
        with self._source.open(file) as stream, torch.no_grad():
            for index, wanted in itertools.groupby(items, lambda pair: pair[0].storage_index):
                try:
                    stored = self._stored(stream, index, storage[index])
                    for item, into in wanted:
                        stored.read(stream, item, into)
                except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
                    raise ValueError(f"{index.fqn} in {file}: {str(error).strip()}") from error

    def _stored(self, stream: io.IOBase, index: MetadataIndex, info: Any) -> _Stored:
        entry = self._entry(index.fqn)
        if self._source.is_raw:
            sizes = next(chunk.sizes for chunk in entry.chunks if chunk.offsets == index.offset)
            return _Stored(info.offset, torch.empty(sizes, dtype=entry.properties.dtype, device="meta"))
        kind = (info.length, *entry.size)
        form = self._forms.get(kind)
        if form is None or not form.is_at(stream, info.offset):
            form = self._forms[kind] = _form(stream, info)
        return form.stored(info.offset)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A box as it was saved: its numbers lie from byte `start` of a file on, as `like` has them in its memory."""

    start: int
    like: Tensor

    def read(self, stream: io.IOBase, item: ReadItem, into: Tensor) -> None:
        """Put the part of it that `item` names into `into`, which has that part's shape."""
        if not into.numel():
            return
        part = self.like[_slices(item.storage_offsets, item.lengths)]
        start = self.start + int(part.storage_offset() - self.like.storage_offset()) * part.itemsize
        is_alike = into.device.type == "cpu" and into.dtype == part.dtype
        if is_alike and into.is_contiguous() and part.is_contiguous():
            _read_into(stream, start, into)
            return
        span = 1 + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
        room = torch.empty(span, dtype=part.dtype)
        _read_into(stream, start, room)
        into.copy_(room.as_strided(part.shape, part.stride()))


@dataclass(frozen=True, slots=True)
class _Form:
    """How `torch.save` wrote a tensor: after the bytes of `head` lie its numbers, which are as those of `like`.

    The head has all that describes the tensor, so where the same head is found again, so is the same form. To ask
    `torch.load` each time costs more than reading: the list of what it wrote lies behind the numbers, and to go there
    and back stops the kernel from reading ahead.
    """

    head: bytes
    like: Tensor

    def is_at(self, stream: io.IOBase, offset: int) -> bool:
        """Whether what lies there was written in this form."""
        stream.seek(offset)
        return bool(stream.read(len(self.head)) == self.head)

    def stored(self, offset: int) -> _Stored:
        """The tensor of this form that lies there."""
        return _Stored(offset + len(self.head) + int(self.like.storage_offset()) * self.like.itemsize, self.like)


def _form(stream: io.IOBase, info: Any) -> _Form:
    # What is loaded to the meta device has no numbers, but knows where they lie.
    like: Tensor = torch.load(_view(stream, info), map_location="meta", weights_only=True)
    place = like.untyped_storage()._checkpoint_offset
    assert place is not None
    return _Form(_view(stream, info).read(place), like)


def _read_into(stream: io.IOBase, start: int, tensor: Tensor) -> None:
    """The numbers from byte `start` on into `tensor`, which is contiguous and on the CPU."""
    room = memoryview(tensor.view(-1).view(torch.uint8).numpy())
    stream.seek(start)
    while room.nbytes:
        count: int = stream.readinto(room)  # type: ignore[attr-defined]
        if not count:
            raise ValueError(f"the file ends {room.nbytes} bytes before this tensor does: it is damaged")
        room = room[count:]


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
    return cast("IO[bytes]", io.BufferedReader(_View(file, info.offset, info.length), _HEAD_BYTES))


def _slices(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
