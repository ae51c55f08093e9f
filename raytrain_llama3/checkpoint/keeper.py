"""Keeps ranks' parts of checkpoints in a process of its own, on another node than the ranks whose parts they are.

Bytes come and go over plain TCP, straight between a rank and its keeper: Ray's object store would lose an object with
the process that put it there. A part comes with the name of the newest set that is whole, and all that is neither of
this set nor of the one that arrives is let go: two generations are held, and one of them is always whole.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from raytrain_llama3.messages import KeeperAddress

_LENGTH = "!Q"
_PIECE_BYTES = 1 << 22
_TIMEOUT_S = 60.0

Key = tuple[int, int]
"""Attempt and step. A greater one is newer."""


@dataclass(frozen=True, slots=True)
class SetFacts:
    """What a rank says of the set that its part belongs to. `whole`: the newest set known to be whole, if any is."""

    world_size: int
    samples: int
    whole: Key | None


class Refused(Exception):
    """The keeper is not there, does not know us, or does not hold what was asked for."""


@dataclass(frozen=True, slots=True)
class Held:
    """One rank's part: `table` says, to the ranks, what lies where in `content`."""

    table: bytes
    content: bytearray
    world_size: int
    samples: int


class Keeper:
    """A server on its node's own address, and what it holds. Answers only those who know its token."""

    def __init__(self, host: str) -> None:
        self._token = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._held: dict[int, dict[Key, Held]] = {}
        self._listener = socket.create_server((host, 0))
        threading.Thread(target=self._serve, daemon=True).start()

    def address(self) -> tuple[int, str]:
        """Port and token."""
        return int(self._listener.getsockname()[1]), self._token

    def holdings(self) -> dict[int, dict[Key, tuple[int, int]]]:
        """Of each rank, the parts that have arrived whole: (world size, samples) by attempt and step."""
        with self._lock:
            return {
                rank: {key: (held.world_size, held.samples) for key, held in parts.items()}
                for rank, parts in self._held.items()
            }

    def bytes_held(self) -> int:
        """Memory that parts take."""
        with self._lock:
            return sum(len(held.content) for parts in self._held.values() for held in parts.values())

    def close(self) -> None:
        """Stop serving, and let all parts go."""
        self._listener.close()
        with self._lock:
            self._held.clear()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(_TIMEOUT_S)
        with connection, contextlib.suppress(OSError, EOFError, ValueError, KeyError):
            while True:
                request = json.loads(_receive_block(connection, limit=1 << 16))
                if not secrets.compare_digest(str(request.get("token")), self._token):
                    return
                _send_block(connection, self._done(request, connection))

    def _done(self, request: Mapping[str, Any], connection: socket.socket) -> bytes:
        rank, key = int(request["rank"]), (int(request["attempt"]), int(request["step"]))
        if request["what"] == "put":
            self._take(rank, key, request, connection)
            return b""
        with self._lock:
            held = self._held[rank][key]
        if request["what"] == "table":
            return held.table
        start = int(request["start"])
        return bytes(memoryview(held.content)[start : start + int(request["length"])])

    def _take(self, rank: int, key: Key, request: Mapping[str, Any], connection: socket.socket) -> None:
        with self._lock:
            self._drop_older(rank, key, tuple(request["whole"] or ()))
        table = _receive_block(connection)
        content = bytearray(int(request["length"]))
        _receive_into(connection, memoryview(content))
        with self._lock:
            parts = self._held.setdefault(rank, {})
            parts[key] = Held(table, content, int(request["world_size"]), int(request["samples"]))

    def _drop_older(self, rank: int, key: Key, whole: tuple[int, ...]) -> None:
        if any(key[0] < held[0] for parts in self._held.values() for held in parts):
            # A rank that lives on after its attempt may still send; what the next one goes on from is not its to drop.
            return
        for other, parts in self._held.items():
            for old in [old for old in parts if old != whole]:
                # Other ranks' parts of this attempt are theirs to let go; of former attempts there may be more ranks.
                if old < key if other == rank else old[0] < key[0]:
                    del parts[old]


class KeeperLink:
    """A rank's connection to a keeper. Raises `Refused` where the keeper does not answer."""

    def __init__(self, keeper: KeeperAddress) -> None:
        self._where, self._token = f"keeper {keeper.host}:{keeper.port}", keeper.token
        self._lock = threading.Lock()
        try:
            self._connection = socket.create_connection((keeper.host, keeper.port), timeout=_TIMEOUT_S)
        except OSError as error:
            raise Refused(f"{self._where}: {error}") from error

    def put(
        self,
        rank: int,
        key: Key,
        about: SetFacts,
        table: bytes,
        content: Sequence[memoryview],
    ) -> None:
        """Have a part kept, the pieces of `content` one after the other; returns when the keeper holds all of it."""
        length = sum(piece.nbytes for piece in content)
        with self._asking(), self._lock:
            self._request("put", rank, key, {**asdict(about), "length": length})
            _send_block(self._connection, table)
            for piece in content:
                self._connection.sendall(piece)
            _receive_block(self._connection)

    def table(self, rank: int, key: Key) -> bytes:
        """What lies where in a part that was put."""
        with self._asking(), self._lock:
            self._request("table", rank, key, {})
            return _receive_block(self._connection)

    def content(self, rank: int, key: Key, start: int, length: int) -> bytes:
        """Some bytes of it."""
        with self._asking(), self._lock:
            self._request("content", rank, key, {"start": start, "length": length})
            return _receive_block(self._connection)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _request(self, what: str, rank: int, key: Key, more: Mapping[str, Any]) -> None:
        request = {"token": self._token, "what": what, "rank": rank, "attempt": key[0], "step": key[1], **more}
        _send_block(self._connection, json.dumps(request).encode())

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError) as error:
            raise Refused(f"{self._where}: {error or 'it has not what was asked for'}") from error


def _send_block(connection: socket.socket, block: bytes) -> None:
    connection.sendall(struct.pack(_LENGTH, len(block)))
    connection.sendall(block)


def _receive_block(connection: socket.socket, limit: int | None = None) -> bytes:
    header = bytearray(struct.calcsize(_LENGTH))
    _receive_into(connection, memoryview(header))
    (length,) = struct.unpack(_LENGTH, header)
    if limit is not None and length > limit:
        raise ValueError(f"a request of {length} bytes")
    block = bytearray(length)
    _receive_into(connection, memoryview(block))
    return bytes(block)


def _receive_into(connection: socket.socket, room: memoryview) -> None:
    while room:
        count = connection.recv_into(room[:_PIECE_BYTES])
        if not count:
            raise EOFError
        room = room[count:]
