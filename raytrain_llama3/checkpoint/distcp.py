"""The files of Megatron-core's `torch_dist` format, which is torch.distributed.checkpoint's: written and indexed here.

A data file is a row of tensors and objects, each as `torch.save` writes it. `.metadata` says where each is, and of
which global tensor it is which box. Only torch is needed: the writer process has no Megatron-core.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import os
import pickle
from collections.abc import Buffer, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from raytrain_llama3.checkpoint.folder import INDEX_NAMES
from raytrain_llama3.messages import FileFacts

METADATA_NAME, MEGATRON_NAME = INDEX_NAMES
COMMON_KEY = "common_state/shard_0_1"
"""Megatron-core's key of what all ranks have in common."""

_AHEAD_BYTES = 1 << 25
_SYNC_FILE_RANGE_WRITE = 2
_MEGATRON = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}


@dataclass(frozen=True, slots=True)
class Box:
    """A box of the global tensor `key`: `sizes` numbers from `offsets` on, along each axis of `global_shape`."""

    key: str
    dtype: torch.dtype
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Blob:
    """An object under a key of its own, as `torch.save` wrote it."""

    key: str


Item = Box | Blob


@dataclass(frozen=True, slots=True)
class Place:
    """Where an item lies: in which file, from which byte on, and how many of them."""

    item: Item
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank has written."""

    places: tuple[Place, ...]
    files: dict[str, FileFacts]


class _Digesting(io.RawIOBase):
    """Passes bytes on to a file, and takes their digest on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._sha = file, hashlib.sha256()
        self._begun = self.size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer, /) -> int:
        self._file.write(data)
        self._sha.update(data)
        length = memoryview(data).nbytes
        self.size += length
        if self.size - self._begun >= _AHEAD_BYTES:
            _begin_writing(self._file.fileno(), self._begun, self.size - self._begun)
            self._begun = self.size
        return length

    def tell(self) -> int:
        return self.size

    @property
    def facts(self) -> FileFacts:
        return FileFacts(self.size, self._sha.hexdigest())


def _begin_writing(descriptor: int, start: int, length: int) -> None:
    """Have the kernel send these bytes to the disk now, while others are made; does not wait, and may do nothing."""
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call(descriptor, ctypes.c_int64(start), ctypes.c_int64(length), _SYNC_FILE_RANGE_WRITE)


def pack(value: object) -> bytes:
    """An object as a blob's bytes: Megatron-core keeps a list of one."""
    stream = io.BytesIO()
    torch.save([value], stream)
    return stream.getvalue()


def alone(tensor: Tensor) -> Tensor:
    """`tensor` on the CPU in a storage of its own, as `torch.save` writes storages whole; no copy of a view there."""
    there = tensor.detach().cpu().contiguous()
    raw = there.view(-1).view(torch.uint8).numpy() if there.numel() else None
    if raw is None or there.untyped_storage().nbytes() == there.nbytes:
        return there
    return torch.frombuffer(memoryview(raw), dtype=there.dtype).view(there.shape)


def write_file(path: Path, items: Iterable[tuple[Item, Tensor | bytes]]) -> tuple[list[Place], FileFacts]:
    """Write one data file, which must not be there yet, through to the disk.

    A writer that an attempt left behind could otherwise write into its successor's files.
    """
    places = []
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        stream = _Digesting(file)
        for item, value in items:
            start = stream.tell()
            if isinstance(value, Tensor):
                torch.save(value, cast("IO[bytes]", stream))
            else:
                stream.write(value)
            places.append(Place(item, path.name, start, stream.tell() - start))
        os.fsync(file.fileno())
    return places, stream.facts


def write_files(folder: Path, files: Mapping[str, Iterable[tuple[Item, Tensor | bytes]]]) -> Part:
    """Write one rank's files at the same time, one thread each. Raises `OSError` of the first that fails."""
    # A digest of the whole file is taken anyway.
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        with ThreadPoolExecutor(max(len(files), 1)) as writers:
            written = list(writers.map(lambda name: write_file(folder / name, files[name]), files))
    finally:
        torch.serialization.set_crc32_options(before)
    places = tuple(place for found, _ in written for place in found)
    return Part(places, {name: facts for name, (_, facts) in zip(files, written, strict=True)})


def write_index(folder: Path, parts: Iterable[Part]) -> dict[str, FileFacts]:
    """Write what says where everything is; returns what each file of the checkpoint is."""
    parts = list(parts)
    files = {name: facts for part in parts for name, facts in part.files.items()}
    metadata = metadata_of(place for part in parts for place in part.places)
    metadata.storage_meta = StorageMeta(checkpoint_id=str(folder))
    for name, content in ((METADATA_NAME, pickle.dumps(metadata)), (MEGATRON_NAME, json.dumps(_MEGATRON).encode())):
        with (folder / name).open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        files[name] = FileFacts(len(content), hashlib.sha256(content).hexdigest())
    return files


def metadata_of(places: Iterable[Place]) -> Metadata:
    """Torch's index of `places`. Raises `ValueError` when they do not make up each global tensor exactly."""
    entries: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for place in places:
        item, info = place.item, _StorageInfo(place.file, place.offset, place.length)
        if isinstance(item, Blob):
            entries[item.key] = BytesStorageMetadata()
            storage[MetadataIndex(item.key)] = info
            continue
        entry = entries.setdefault(
            item.key,
            TensorStorageMetadata(TensorProperties(dtype=item.dtype), torch.Size(item.global_shape), []),
        )
        entry.chunks.append(ChunkStorageMetadata(torch.Size(item.offsets), torch.Size(item.sizes)))
        storage[MetadataIndex(item.key, torch.Size(item.offsets))] = info
    for key, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata):
            found = sum(chunk.sizes.numel() for chunk in entry.chunks)
            if found != entry.size.numel():
                raise ValueError(f"{key}: {found} of {entry.size.numel()} numbers were saved")
    return Metadata(entries, planner_data={}, storage_data=storage, version=CURRENT_DCP_VERSION)


def read_metadata(folder: Path) -> Metadata:
    """The index of the checkpoint in `folder`. Only a run's own folder is read: it is a pickle."""
    with (folder / METADATA_NAME).open("rb") as file:
        found = pickle.load(file)
    if not isinstance(found, Metadata):
        raise ValueError(f"{folder / METADATA_NAME} holds no index but a {type(found).__name__}")
    return found
