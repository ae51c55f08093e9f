"""One open shard, whatever its format: documents in units (record batches, row groups) that are read one at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raytrain_llama3.data.filesystem import Place
from raytrain_llama3.data.manifest import Shard
from raytrain_llama3.errors import DataError

COLUMNS = ("input_ids", "tokens")
"""Names of the column of token ids, unless another is given."""

Ids = npt.NDArray[Any]
"""Token ids as stored, of any integer type, `[tokens]`."""
Counts = npt.NDArray[np.int64]


class Unit:
    """Documents that are read together. `ends` counts tokens up to the end of each, `[documents]`."""

    __slots__ = ("_ends", "ids")

    def __init__(self, ids: Ids, ends: Counts | Callable[[], Counts]) -> None:
        self.ids, self._ends = ids, ends

    @property
    def ends(self) -> Counts:
        """Tokens of the unit up to the end of each document."""
        if callable(self._ends):
            self._ends = self._ends()
        return self._ends

    def documents(self) -> Iterator[Ids]:
        """Ids of each document, views."""
        yield from np.split(self.ids, self.ends[:-1]) if len(self.ends) else ()

    def with_ends(self, end_of_document: int) -> Unit:
        """A copy in which every document is followed by `end_of_document`."""
        type_ = self.ids.dtype if end_of_document <= np.iinfo(self.ids.dtype).max else np.dtype(np.uint32)
        ends = self.ends + np.arange(1, len(self.ends) + 1, dtype=np.int64)
        ids = np.empty(len(self.ids) + len(ends), dtype=type_)
        is_token = np.ones(len(ids), dtype=bool)
        is_token[ends - 1] = False
        ids[is_token] = self.ids
        ids[ends - 1] = end_of_document
        return Unit(ids, ends)


class OpenShard(Protocol):
    """A shard whose layout is known and whose units are read when asked for. Its methods may be called by threads."""

    is_mapped: bool
    """Whether a unit costs no memory: its ids are those of the mapped file."""
    rows: Counts
    """`[units]`: documents of each."""
    tokens: Counts
    """`[units]`: token ids of each, as stored."""

    def load(self, unit: int) -> Unit:
        """Read one unit. Raises `DataError` naming file and row, or row group."""
        ...


def open_shard(place: Place, shard: Shard, column: str | None) -> OpenShard:
    """Open a shard of `place` and see that it is what `shard` says.

    Raises `DataError` when it is missing, cut short, of another format, or holds other counts.
    """
    name = place.name(shard.file)
    try:
        size = place.size(shard.file)
        if size is None:
            raise FileNotFoundError("no such file")
        if size != shard.bytes:
            how = "truncated" if size < shard.bytes else "not the file that was written"
            raise DataError(
                f"shard {name} is {how}: {size} bytes, it had {shard.bytes}; copy it again or make the dataset again"
            )
        opened = _open(place, shard.file, column, shard.units)
    except UnicodeDecodeError as error:
        raise _names_damaged(name, error) from error
    except OSError as error:
        raise DataError(f"shard {name} cannot be read ({error}); restore it or make the dataset again") from error
    found = int(opened.rows.sum()), int(opened.tokens.sum())
    if found != (shard.documents, shard.tokens):
        raise DataError(
            f"shard {name} holds {found[0]} documents and {found[1]} tokens, the manifest says {shard.documents} and "
            f"{shard.tokens}; make the dataset again"
        )
    return opened


def count(place: Place, path: str, size: int, column: str | None) -> Shard:
    """What is in a shard that no manifest tells of. Raises `DataError` as `open_shard` does.

    A damaged Parquet file may end the process: `data.apart` is for it.
    """
    try:
        opened = _open(place, path, column, None)
    except UnicodeDecodeError as error:
        raise _names_damaged(place.name(path), error) from error
    except OSError as error:
        raise DataError(f"shard {place.name(path)} cannot be read ({error})") from error
    units = tuple(zip(opened.rows.tolist(), opened.tokens.tolist(), strict=True))
    return Shard(path, sum(rows for rows, _ in units), sum(tokens for _, tokens in units), size, "", units)


def _names_damaged(name: str, error: UnicodeDecodeError) -> DataError:
    return DataError(f"shard {name} is damaged (the name of a column is not UTF-8: {error}); restore it")


def _open(place: Place, path: str, column: str | None, units: tuple[tuple[int, int], ...] | None) -> OpenShard:
    if path.endswith(".parquet"):
        from raytrain_llama3.data.parquet import ParquetShard

        return ParquetShard(place, path, column, units)
    if path.endswith(".idx"):
        from raytrain_llama3.data.indexed import IndexedShard

        return IndexedShard(place, path)
    from raytrain_llama3.data.arrow import ArrowShard

    return ArrowShard(place, path, column, units)


def column_name(name: str, names: list[str], wanted: str | None) -> str:
    """The column of token ids among `names`. Raises `DataError` naming the shard when there is none."""
    for candidate in (wanted,) if wanted else COLUMNS:
        if candidate in names:
            return str(candidate)
    raise DataError(
        f"shard {name} has no column {wanted or ' or '.join(COLUMNS)}, but {', '.join(names) or 'none at all'}; name "
        f"the column of token ids with data_column, or tokenize the text with `data tokenize`"
    )


def check_type(name: str, column: str, found: Any) -> None:
    """Raise `DataError` where a column of Arrow type `found` cannot hold token ids."""
    is_list = pa.types.is_list(found) or pa.types.is_large_list(found)
    if not is_list or not pa.types.is_integer(found.value_type):
        raise DataError(
            f"shard {name}: column {column!r} is {found}, wanted list<uint16>, list<int32> or another list of whole "
            f"numbers; tokenize the text with `data tokenize`"
        )


def unit_of(name: str, first_row: int, rows: int, array: Any) -> Unit:
    """A list array of token ids as a unit of `rows` documents, nothing copied.

    Raises `DataError`, naming file and row, for a null or another number of rows.
    """
    if len(array) != rows:
        raise DataError(f"shard {name}, from row {first_row}: {len(array)} rows, its layout says {rows}; restore it")
    try:
        array.validate()
    except pa.ArrowException as error:
        raise DataError(f"shard {name}, from row {first_row}: damaged ({error}); restore it") from error
    if array.null_count:
        row = first_row + int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
        raise DataError(f"shard {name}, row {row}: null instead of a list of token ids; leave such rows out")
    values = array.flatten()
    offsets = array.offsets.to_numpy(zero_copy_only=True)
    if values.null_count:
        token = int(np.argmax(values.is_null().to_numpy(zero_copy_only=False)))
        row = first_row + int(np.searchsorted(offsets[1:] - offsets[0], token, side="right"))
        raise DataError(f"shard {name}, row {row}: null among the token ids; leave such rows out")
    return Unit(values.to_numpy(zero_copy_only=True), lambda: _ends(name, first_row, offsets))


def _ends(name: str, first_row: int, offsets: npt.NDArray[Any]) -> Counts:
    ends = np.asarray(offsets[1:] - offsets[0], dtype=np.int64)
    backwards = np.flatnonzero(np.diff(ends, prepend=0) < 0)
    if backwards.size:
        raise DataError(f"shard {name}, row {first_row + int(backwards[0])}: damaged (it ends before it begins)")
    return ends


class TokenHash:
    """SHA-256 over documents, the same however they are grouped into record batches."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, ids: Ids) -> None:
        """Take in one document, `[tokens]`."""
        self._hash.update(len(ids).to_bytes(8, "little"))
        self._hash.update(np.ascontiguousarray(ids))

    def hexdigest(self) -> str:
        """Of all documents so far."""
        return self._hash.hexdigest()
