"""Finding documents in files and folders, and reading them one by one in any order."""

from __future__ import annotations

import functools
import json
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from raytrain_llama3.data.apart import read_apart
from raytrain_llama3.errors import DataError

SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl", ".json", ".parquet")
JSON_LINES = (".jsonl", ".json")
PARQUET = ".parquet"
TEXT = "text"

_OPEN_ROW_GROUPS = 32
_OPEN_FILES = 64

Numbers = npt.NDArray[np.int64]
Groups = list[tuple[int, int]]
"""Of each row group its rows, and the mean size of their texts in bytes."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where documents are; all `[documents]`. Can be sent to another process, and cut.

    Document i is `sizes[i]` bytes from byte `starts[i]` of file `files[i]` on; in a Parquet file it is row
    `rows[i]` of row group `starts[i]`, and `sizes[i]` is the row group's mean.
    """

    files: Numbers
    starts: Numbers
    rows: Numbers
    sizes: Numbers

    def __len__(self) -> int:
        return len(self.files)

    def chosen(self, documents: Numbers) -> Places:
        """Those of `documents`, in that order."""
        return Places(self.files[documents], self.starts[documents], self.rows[documents], self.sizes[documents])


def find_documents(files: Sequence[str], column: str, log: Callable[[str], None]) -> tuple[Places, int]:
    """The documents of some files, and how many files were left out because they cannot be read (told to `log`).

    Each file is a document, except that each line of JSON lines is one, and each row of a Parquet file. Raises
    `DataError` for a Parquet file without a text column `column`.
    """
    found = tuple(array("q") for _ in range(4))
    left_out = 0
    tables = [name for name in files if name.endswith(PARQUET)]
    groups = dict(zip(tables, read_apart(functools.partial(_row_groups, column), tables, str), strict=True))
    for number, name in enumerate(files):
        try:
            for place in _places(Path(name), groups.get(name)):
                for values, value in zip(found, (number, *place), strict=True):
                    values.append(value)
        except OSError as error:
            left_out += 1
            log(f"left out, cannot be read: {name} ({error})")
    return Places(*(np.array(values, dtype=np.int64) for values in found)), left_out


class Reader:
    """Reads the documents at `places` of `files`; `column` is the key of JSON lines and the column of Parquet.

    Until the block ends it keeps open what it read last: a shuffled part comes back to the same files again and again.
    """

    def __init__(self, files: Sequence[str], places: Places, column: str) -> None:
        self._files, self._places, self._column = files, places, column
        self._groups: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._opened: OrderedDict[int, BinaryIO] = OrderedDict()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        while self._opened:
            self._opened.popitem()[1].close()

    def name(self, document: int) -> str:
        """Where a document comes from, for people."""
        name, start = self._files[self._places.files[document]], int(self._places.starts[document])
        if name.endswith(PARQUET):
            return f"{name}, row group {start}, row {self._places.rows[document]}"
        return f"{name}, byte {start}" if name.endswith(JSON_LINES) else name

    def read(self, document: int) -> bytes:
        """The document's text, as it stands in the file; of a JSON line its text, as UTF-8; empty for a null.

        Raises `OSError` when the file cannot be read, and `DataError`, naming file and line, when a line of JSON
        is not an object with the text.
        """
        file, start = int(self._places.files[document]), int(self._places.starts[document])
        name = self._files[file]
        if name.endswith(PARQUET):
            return self._row(file, start, int(self._places.rows[document]))
        opened = self._open(file)
        opened.seek(start)
        raw = opened.read(int(self._places.sizes[document]))
        return _text_of_line(Path(name), start, raw, self._column) if name.endswith(JSON_LINES) else raw

    def _open(self, file: int) -> BinaryIO:
        opened = self._opened.get(file)
        if opened is None:
            while len(self._opened) >= _OPEN_FILES:
                self._opened.popitem(last=False)[1].close()
            opened = self._opened[file] = Path(self._files[file]).open("rb")  # noqa: SIM115  (`__exit__` closes it)
        self._opened.move_to_end(file)
        return opened

    def _row(self, file: int, group: int, row: int) -> bytes:
        texts = self._groups.get((file, group))
        if texts is None:
            import pyarrow.parquet as pq

            while len(self._groups) >= _OPEN_ROW_GROUPS:
                self._groups.popitem(last=False)
            texts = pq.ParquetFile(self._files[file]).read_row_group(group, columns=[self._column]).column(0)
            self._groups[file, group] = texts
        self._groups.move_to_end((file, group))
        text = texts[row].as_py()
        return b"" if text is None else text if isinstance(text, bytes) else str(text).encode("utf-8", "surrogatepass")


def find_files(inputs: Sequence[str], suffixes: Sequence[str]) -> list[str]:
    """Files in a fixed order: `inputs` as given, folders walked in sorted order for files with one of `suffixes`.

    An input may be a pattern. A file named in `inputs` counts whatever its suffix; hidden files and folders below an
    input do not, nor a second mention. Raises `DataError` when an input is not there or no file is found.
    """
    found: dict[str, None] = {}
    for given in inputs:
        path = Path(given).expanduser()
        if path.is_dir():
            found.update(dict.fromkeys(map(str, _walk(path, suffixes))))
        elif path.exists():
            found[str(path)] = None
        elif matching := sorted(map(str, _matching(path))):
            found.update(dict.fromkeys(matching))
        else:
            raise DataError(f"--input {given} is not there")
    if not found:
        raise no_documents(inputs, suffixes)
    return list(found)


def no_documents(inputs: Sequence[str], suffixes: Sequence[str]) -> DataError:
    """The error for inputs without a single document."""
    return DataError(
        f"no documents in {', '.join(inputs)}: looked for files ending in {', '.join(sorted(suffixes))}; "
        f"name files themselves to take them whatever their ending"
    )


def _matching(path: Path) -> Iterator[Path]:
    if not any(mark in str(path) for mark in "*?["):
        return
    absolute = path.absolute()
    yield from (p for p in Path(absolute.anchor).glob(str(absolute.relative_to(absolute.anchor))) if p.is_file())


def _walk(folder: Path, suffixes: Sequence[str]) -> Iterator[Path]:
    for parent, folders, names in folder.walk():
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = parent / name
            if path.suffix in suffixes and not name.startswith(".") and path.is_file():
                yield path


def _places(path: Path, groups: Groups | OSError | None) -> Iterator[tuple[int, int, int]]:
    """Start, row and size of every document that is not empty; `groups` are a Parquet file's."""
    if isinstance(groups, OSError):
        raise groups
    if groups is not None:
        for number, (rows, mean) in enumerate(groups):
            yield from ((number, row, mean) for row in range(rows))
    elif path.suffix not in JSON_LINES:
        if size := path.stat().st_size:
            yield 0, 0, size
    else:
        start = 0
        with path.open("rb") as file:
            for line in file:
                if line.strip():
                    yield start, 0, len(line)
                start += len(line)


def _row_groups(column: str, path: str) -> Groups | OSError:
    """Rows of each row group and the mean size of their texts, or why the file cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except OSError as error:
        return error
    except pa.ArrowInvalid as error:
        raise DataError(f"{path} is not a Parquet file ({error})") from error
    names = file.schema_arrow.names
    if column not in names:
        raise DataError(f"{path} has no column {column!r} but {', '.join(names)}: name that of the text with --column")
    leaf = names.index(column)
    groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    if sum(group.num_rows for group in groups) != file.metadata.num_rows:
        raise DataError(f"{path} is damaged (its row groups do not hold the rows that it tells of); restore it")
    sizes = [group.column(leaf).total_uncompressed_size for group in groups]
    return [(g.num_rows, max(1, size // max(g.num_rows, 1))) for g, size in zip(groups, sizes, strict=True)]


def _text_of_line(path: Path, start: int, raw: bytes, key: str) -> bytes:
    try:
        text = json.loads(raw)[key]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f'{_line_name(path, start)} is not a JSON object with a "{key}" ({error})') from error
    if not isinstance(text, str):
        raise DataError(f'{_line_name(path, start)}: "{key}" is {type(text).__name__}, not a string')
    # A lone half of a surrogate pair is legal JSON and no legal UTF-8; whether that matters is the tokenizer's to say.
    return text.encode("utf-8", "surrogatepass")


def _line_name(path: Path, start: int) -> str:
    with path.open("rb") as file:
        return f"{path}, line {file.read(start).count(b'\n') + 1}"
