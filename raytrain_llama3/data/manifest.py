"""What a dataset folder says about itself: `manifest.json`, and how its documents are split."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raytrain_llama3.errors import DataError

MANIFEST_FILE = "manifest.json"
FORMAT = "raytrain-llama3-tokens"
VERSION = 1

Documents = tuple[int, int]
"""Half-open range of document numbers, counted in manifest order."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of documents.

    `sha256` covers the documents' token ids, not the bytes of the file; it is empty where no one has read them all.
    """

    file: str
    documents: int
    tokens: int
    bytes: int
    sha256: str
    units: tuple[tuple[int, int], ...] | None = None
    """Documents and tokens of each record batch or row group, so that a remote file need not be read to know them."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A dataset: what its ids mean, and its shards in reading order."""

    tokenizer: str
    vocab_size: int
    end_of_document: int
    """Token id between documents."""
    shards: tuple[Shard, ...]
    has_ends: bool = True
    """Whether every document ends with `end_of_document` as it is stored."""

    @property
    def documents(self) -> int:
        """Documents of all shards."""
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Tokens of all shards, ends of documents included where they are stored."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def id_type(self) -> np.dtype[Any]:
        """What an id is stored as: uint16 where the vocabulary fits, else uint32."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    def fingerprint(self) -> str:
        """Changes with the ids, their order, where documents end, and the tokenizer; not with where the folder is."""
        told: list[Any] = [self.tokenizer, self.vocab_size, self.end_of_document, self.has_ends]
        told += [[shard.documents, shard.tokens, shard.sha256] for shard in self.shards]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def read_manifest(folder: Path) -> Manifest:
    """Read and check `folder`/manifest.json. Opens no shard.

    Raises `DataError`, with the file and what to do, when there is none, or it is not one of ours.
    """
    path = folder / MANIFEST_FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(
            f"{folder} is not a dataset: it holds no {MANIFEST_FILE}. Make one from text with "
            f"`python -m raytrain_llama3 data tokenize --input PATH --output {folder}`"
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}); restore it or make the dataset again") from error
    return parse_manifest(str(path), content)


def parse_manifest(path: str, content: bytes) -> Manifest:
    """The manifest with the bytes `content`; `path` is its name for people. Raises `DataError` as above."""
    try:
        told = json.loads(content)
    except ValueError as error:
        raise DataError(f"{path} cannot be read ({error}); restore it or make the dataset again") from error
    try:
        return _from_json(told)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path} is not a {FORMAT} manifest of version {VERSION} ({type(error).__name__}: {error}); make the "
            f"dataset again with `python -m raytrain_llama3 data tokenize`"
        ) from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `folder`/manifest.json."""
    told = {
        "format": FORMAT,
        "version": VERSION,
        **asdict(manifest),
        "documents": manifest.documents,
        "tokens": manifest.tokens,
    }
    (folder / MANIFEST_FILE).write_text(json.dumps(told) + "\n", encoding="utf-8")


def split_documents(total: int, split: tuple[float, float, float]) -> tuple[Documents, Documents, Documents]:
    """Training, validation and test parts of `total` documents, in proportion to `split` (any scale: 99,1,0).

    A part with a share above 0 gets at least one document; the others may be empty ranges.

    Raises `DataError` when the shares are no proportions, or there are fewer documents than parts.
    """
    if min(split) < 0 or not math.isfinite(sum(split)) or sum(split) == 0:
        raise DataError(f"split {split} must be three numbers, none below 0 and one above, such as 99,1,0")
    wanted = sum(share > 0 for share in split)
    if total < wanted:
        raise DataError(
            f"split {split} asks for {wanted} parts but the dataset has only {total} document(s); add documents, or "
            f"give some parts a share of 0"
        )
    counts = [int(total * share / sum(split)) for share in split]
    for part, share in enumerate(split):
        if share > 0 and counts[part] == 0:
            counts[part] = 1
    # What rounding left over, or took too much, is the largest part's.
    counts[counts.index(max(counts))] += total - sum(counts)
    first, second = counts[0], counts[0] + counts[1]
    return (0, first), (first, second), (second, total)


def _from_json(told: Mapping[str, Any]) -> Manifest:
    if (told["format"], told["version"]) != (FORMAT, VERSION):
        raise ValueError(f"format {told['format']!r}, version {told['version']!r}")
    manifest = Manifest(
        tokenizer=str(told["tokenizer"]),
        vocab_size=_count(told, "vocab_size"),
        end_of_document=_count(told, "end_of_document"),
        shards=tuple(
            Shard(
                str(shard["file"]),
                _count(shard, "documents"),
                _count(shard, "tokens"),
                _count(shard, "bytes"),
                str(shard["sha256"]),
                _units(shard),
            )
            for shard in told["shards"]
        ),
        has_ends=bool(told.get("has_ends", True)),
    )
    for name, found in (("documents", manifest.documents), ("tokens", manifest.tokens)):
        if told[name] != found:
            raise ValueError(f"the shards have {found} {name}, the total says {told[name]}")
    return manifest


def _units(shard: Mapping[str, Any]) -> tuple[tuple[int, int], ...] | None:
    told = shard.get("units")
    if told is None:
        return None
    units = tuple((int(rows), int(tokens)) for rows, tokens in told)
    if (sum(u[0] for u in units), sum(u[1] for u in units)) != (shard["documents"], shard["tokens"]):
        raise ValueError(f"{shard['file']}: its units do not add up to {shard['documents']} documents")
    return units


def _count(told: Mapping[str, Any], name: str) -> int:
    value = told[name]
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is {value!r}, not a number of things")
    return value
