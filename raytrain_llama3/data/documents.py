"""Finding documents in files and folders, and reading them one by one in any order."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from raytrain_llama3.errors import DataError

SUFFIXES = frozenset({".txt", ".md", ".rst", ".py", ".jsonl"})
JSON_LINES = ".jsonl"


class Corpus:
    """The documents of some files: each file is one, except that in a .jsonl file each line is one.

    Only places are kept, 24 bytes a document; texts are read when asked for. Files that cannot be read are told to
    `log` and counted in `left_out`.
    """

    def __init__(self, files: Sequence[Path], log: Callable[[str], None]) -> None:
        self._files = tuple(files)
        self.left_out = 0
        self._file_of, self._starts, self._lengths = array("q"), array("q"), array("q")
        for number, path in enumerate(self._files):
            try:
                for start, length in _places(path):
                    self._file_of.append(number)
                    self._starts.append(start)
                    self._lengths.append(length)
            except OSError as error:
                self.left_out += 1
                log(f"left out, cannot be read: {path} ({error})")

    def __len__(self) -> int:
        return len(self._starts)

    def name(self, document: int) -> str:
        """Where a document comes from, for people."""
        path, start = self._files[self._file_of[document]], self._starts[document]
        return f"{path}, byte {start}" if path.suffix == JSON_LINES else str(path)

    def read(self, document: int) -> bytes:
        """The document's text, as it stands in the file; of a JSON line its "text", as UTF-8.

        Raises `OSError` when the file cannot be read, and `DataError`, naming file and line, when a line of a .jsonl
        file is not an object with a "text".
        """
        path, start = self._files[self._file_of[document]], self._starts[document]
        with path.open("rb") as file:
            file.seek(start)
            raw = file.read(self._lengths[document])
        return _text_of_line(path, start, raw) if path.suffix == JSON_LINES else raw


def find_files(inputs: Sequence[Path], suffixes: frozenset[str]) -> list[Path]:
    """Files in a fixed order: `inputs` as given, folders walked in sorted order for files with one of `suffixes`.

    A file named in `inputs` counts whatever its suffix; hidden files and folders below an input do not, nor a second
    mention. Raises `DataError` when an input is not there or no file is found.
    """
    found: dict[Path, None] = {}
    for path in inputs:
        if path.is_dir():
            found.update(dict.fromkeys(_walk(path, suffixes)))
        elif path.exists():
            found[path] = None
        else:
            raise DataError(f"--input {path} is not there")
    if not found:
        raise no_documents(inputs, suffixes)
    return list(found)


def no_documents(inputs: Sequence[Path], suffixes: frozenset[str]) -> DataError:
    """The error for inputs without a single document."""
    return DataError(
        f"no documents in {', '.join(map(str, inputs))}: looked for files ending in {', '.join(sorted(suffixes))}; "
        f"name files themselves to take them whatever their ending"
    )


def _walk(folder: Path, suffixes: frozenset[str]) -> Iterator[Path]:
    for parent, folders, names in folder.walk():
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = parent / name
            if path.suffix in suffixes and not name.startswith(".") and path.is_file():
                yield path


def _places(path: Path) -> Iterator[tuple[int, int]]:
    """Start and length in bytes of every document that is not empty."""
    if path.suffix != JSON_LINES:
        if size := path.stat().st_size:
            yield 0, size
        return
    start = 0
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield start, len(line)
            start += len(line)


def _text_of_line(path: Path, start: int, raw: bytes) -> bytes:
    try:
        text = json.loads(raw)["text"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f'{_line_name(path, start)} is not a JSON object with a "text" ({error})') from error
    if not isinstance(text, str):
        raise DataError(f'{_line_name(path, start)}: "text" is {type(text).__name__}, not a string')
    # A lone half of a surrogate pair is legal JSON and no legal UTF-8; whether that matters is the tokenizer's to say.
    return text.encode("utf-8", "surrogatepass")


def _line_name(path: Path, start: int) -> str:
    with path.open("rb") as file:
        return f"{path}, line {file.read(start).count(b'\n') + 1}"
