"""Files of `export NAME=value` lines, read as a shell's `source` would read them, as far as that is safe.

Quotes, comments, and `$NAME`, `${NAME}` and `${NAME:-default}` mean what they mean in a shell; nothing is run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_REFERENCE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::-([^}]*))?\})")
_WORD = re.compile(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+(?=\s|$)""")
_PIECE = re.compile(r"""[^'"]+|'[^']*'|"[^"]*["]""")
_COMMANDS = ("$(", "`")


def read(paths: Sequence[str], environ: Mapping[str, str], problems: list[str]) -> dict[str, str]:
    """What the files set, a later one over an earlier; every line that cannot be read goes into `problems`."""
    found: dict[str, str] = {}
    for path in paths:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            problems.append(f"--env-file {path}: cannot be read: {getattr(error, 'strerror', None) or error}")
            continue
        for number, line in enumerate(text.splitlines(), 1):
            try:
                found |= _line(line, {**environ, **found})
            except ValueError as error:
                problems.append(f"{path}:{number}: {error}: {line.strip()}")
    return found


def differences(file: Mapping[str, str], environ: Mapping[str, str]) -> list[str]:
    """Variables that a file sets otherwise than the environment, which wins as it does over every file."""
    # Names alone: a value may be a secret.
    names = [name for name, value in file.items() if environ.get(name, value) != value]
    return (
        [f"{', '.join(names)}: set in the environment already, and so not taken from the --env-file"] if names else []
    )


def _line(line: str, known: Mapping[str, str]) -> dict[str, str]:
    """The assignments of one line. Raises `ValueError` for what is none."""
    words = _words(line)
    if words[:1] == ["export"]:
        words = words[1:]
    found: dict[str, str] = {}
    for word in words:
        match = _ASSIGNMENT.fullmatch(word)
        if match is None:
            raise ValueError("is not NAME=value")
        found[match[1]] = _value(match[2], {**known, **found})
    return found


def _words(line: str) -> list[str]:
    """The words of a line, quotes kept; a # begins a comment only where a word begins."""
    words, rest = list[str](), line.strip()
    while rest and not rest.startswith("#"):
        match = _WORD.match(rest)
        if match is None:
            raise ValueError("has a quote that does not end")
        words.append(match[0])
        rest = rest[match.end() :].lstrip()
    return words


def _value(raw: str, known: Mapping[str, str]) -> str:
    value = ""
    for piece in _PIECE.findall(raw):
        if piece.startswith("'"):
            value += piece[1:-1]
            continue
        if any(command in piece for command in _COMMANDS):
            raise ValueError("runs a command, which only a shell does: write the value")
        value += _REFERENCE.sub(lambda match: _referred(match, known), piece.strip('"'))
    return value


def _referred(match: re.Match[str], known: Mapping[str, str]) -> str:
    return known.get(match[1] or match[2], "") or match[3] or ""
