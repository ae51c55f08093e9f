"""Host memory that a rank fills and its writer process reads: outside `/dev/shm`, and gone when both are."""

from __future__ import annotations

import mmap
import os
from typing import Any, Self

import torch
from torch import Tensor

_ALIGN = 64


class HostBuffer:
    """A block of shared memory, kept from save to save. `pin` makes copies from a GPU fast.

    It belongs to no mounted filesystem (memfd), so that a container's 64 MB of `/dev/shm` do not bound it, and
    nothing is left of it after a SIGKILL. It counts as the memory of whoever touched it first.
    """

    def __init__(self, *, pin: bool = False) -> None:
        self.descriptor = os.memfd_create("checkpoint", os.MFD_CLOEXEC)
        self._pin = pin
        self._map: mmap.mmap | None = None
        self._bytes: Tensor | None = None
        self._used = 0

    @classmethod
    def attached(cls, descriptor: int) -> Self:
        """The other side of a buffer, in another process."""
        other = cls.__new__(cls)
        other.descriptor, other._pin, other._map, other._bytes, other._used = descriptor, False, None, None, 0
        other._open(os.fstat(descriptor).st_size)
        return other

    @property
    def size(self) -> int:
        """Bytes that it holds."""
        return 0 if self._map is None else len(self._map)

    def reserve(self, size: int) -> bool:
        """Have room for `size` bytes, with nothing in it; whether it had to grow, and must be attached anew."""
        self._used = 0
        if size <= self.size:
            return False
        self._close_map()
        # Reserved, not only promised: too little memory is said here and not by a SIGBUS later.
        os.posix_fallocate(self.descriptor, 0, size)
        self._open(size)
        return True

    def take(self, nbytes: int) -> tuple[int, Tensor]:
        """The next `nbytes` bytes (uint8): from where on, and themselves."""
        start = -(-self._used // _ALIGN) * _ALIGN
        self._used = start + nbytes
        return start, self.at(start, nbytes)

    @property
    def used(self) -> int:
        """Bytes that were taken."""
        return self._used

    @property
    def content(self) -> memoryview:
        """All that was taken."""
        return memoryview(self._map or b"")[: self._used]

    def at(self, start: int, nbytes: int) -> Tensor:
        """Bytes `start` to `start` + `nbytes`, in a storage of their own that is no copy."""
        assert self._map is not None
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=start)

    def close(self) -> None:
        """Give the memory back, once the other side has closed too."""
        self._close_map()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _open(self, size: int) -> None:
        self._map = mmap.mmap(self.descriptor, size) if size else None
        if self._map is not None and self._pin:
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
            torch.cuda.check_error(_runtime().cudaHostRegister(self._bytes.data_ptr(), size, 0))

    def _close_map(self) -> None:
        if self._bytes is not None:
            torch.cuda.check_error(_runtime().cudaHostUnregister(self._bytes.data_ptr()))
        # Unmapped when the last tensor over it is gone.
        self._map = self._bytes = None


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def room_for(sizes: list[int]) -> int:
    """Bytes that a buffer needs for pieces of `sizes`."""
    return sum(-(-size // _ALIGN) * _ALIGN for size in sizes)
