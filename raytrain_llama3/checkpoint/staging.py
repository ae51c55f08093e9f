"""From the device to host memory: the only part of an asynchronous save that training waits for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from raytrain_llama3.checkpoint.distcp import Item
from raytrain_llama3.checkpoint.hostbuffer import HostBuffer, room_for
from raytrain_llama3.checkpoint.pieces import Piece
from raytrain_llama3.checkpoint.writer import Staged, WriteJob

Files = dict[str, tuple[Sequence[Piece], Sequence[tuple[Item, bytes]]]]
"""Pieces and objects of each file that this rank writes."""


def files_for(rank: int, pieces: Sequence[Piece], blobs: Sequence[tuple[Item, bytes]], count: int) -> Files:
    """`pieces` over at most `count` files of about the same size, with Megatron's names; objects are in the first."""
    rows: list[list[Piece]] = [[] for _ in range(count)]
    loads = [0] * count
    for piece in sorted(pieces, key=lambda piece: -piece.nbytes):
        least = loads.index(min(loads))
        rows[least].append(piece)
        loads[least] += piece.nbytes
    parts = [(row, blobs if i == 0 else ()) for i, row in enumerate(rows)]
    return {f"__{rank}_{i}.distcp": part for i, part in enumerate(parts) if part[0] or part[1]}


def nbytes_of(files: Files) -> int:
    """Bytes of all numbers in `files`."""
    return sum(piece.nbytes for pieces, _ in files.values() for piece in pieces)


class Staging:
    """Host memory that is kept from save to save, and the copy into it."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self.buffer = HostBuffer(pin=on_gpu)

    def stage(self, folder: Path, files: Files) -> WriteJob:
        """Copy all numbers; they may change once this returns. Raises `OSError` when there is not memory enough."""
        self.buffer.reserve(room_for([piece.nbytes for pieces, _ in files.values() for piece in pieces]))
        staged: dict[str, Sequence[Staged | tuple[Item, bytes]]] = {}
        with torch.no_grad():
            for name, (pieces, blobs) in files.items():
                staged[name] = [*blobs, *(self._copied(piece) for piece in pieces)]
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()
        return WriteJob(folder, staged, self.buffer.size)

    def close(self) -> None:
        """Give the memory back."""
        self.buffer.close()

    def _copied(self, piece: Piece) -> Staged:
        start, room = self.buffer.take(piece.nbytes)
        room.view(piece.box.dtype).view(piece.box.sizes).copy_(piece.read(), non_blocking=self._on_gpu)
        return Staged(piece.box, start, piece.nbytes)
