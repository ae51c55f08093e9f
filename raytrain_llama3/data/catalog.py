"""What a `data_arg` names: a dataset folder, a manifest, loose shards, or Megatron's `.bin` and `.idx`."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from raytrain_llama3.data.apart import read_apart
from raytrain_llama3.data.filesystem import Place
from raytrain_llama3.data.manifest import MANIFEST_FILE, Shard, parse_manifest
from raytrain_llama3.data.shard import count, open_shard
from raytrain_llama3.errors import DataError

_PARQUET = ".parquet"
_SUFFIXES = (".arrow", _PARQUET, ".idx")
_NAMED_SHARDS = 256
_LOOKED_AT = 64


@dataclass(frozen=True)
class Dataset:
    """Shards in reading order, and what their ids mean. Can be sent to another process."""

    place: Place
    shards: tuple[Shard, ...]
    column: str | None = None
    """The column of token ids; None: one of the usual names."""
    tokenizer: str = ""
    vocab_size: int = 0
    """As the manifest says; 0 where there is none."""
    end_of_document: int | None = None
    append: int | None = None
    """Id to put after every document; None: documents are taken as they are stored."""

    @property
    def name(self) -> str:
        """As people gave it."""
        return self.place.uri

    @property
    def documents(self) -> int:
        """Documents of all shards."""
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Tokens of all shards, ends of documents included."""
        ends = self.documents if self.append is not None else 0
        return sum(shard.tokens for shard in self.shards) + ends

    def fingerprint(self) -> dict[str, Any]:
        """What is read, wherever it lies: counts, the tokenizer, and a digest of shards, names left out."""
        listed = [[s.documents, s.tokens, s.sha256 or s.bytes] for s in self.shards]
        named = [[s.file.rpartition("/")[2], *counts] for s, counts in zip(self.shards, listed, strict=True)]
        told: dict[str, Any] = {
            "documents_in_all": self.documents,
            "tokens_in_all": self.tokens,
            "bytes": sum(s.bytes for s in self.shards),
            "tokenizer": self.tokenizer,
            "column": self.column,
            "append": self.append,
            "shards": hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:16],
        }
        # Named one by one where they are few, so that a resume can say which of them changed.
        return told | ({"files": named} if len(named) <= _NAMED_SHARDS else {"files": len(named)})


def open_dataset(
    uris: Sequence[str], column: str | None, retries: int, cache: Path | None = None, log: Callable[[str], None] = print
) -> Dataset:
    """The dataset at one place, or at several of one filesystem one after another.

    Shards that no manifest tells of are counted; of local Arrow and of Parquet only the layout is read. The counts are
    kept in `cache` for the next time. Raises `DataError` when there is nothing, or a shard cannot be used.
    """
    found = [_open_one(Place(uri, retries), column, cache, log) for uri in uris]
    first = found[0]
    if len(found) == 1:
        return first
    if any(d.place.uri.partition("://")[0] != first.place.uri.partition("://")[0] for d in found if "://" in d.name):
        raise DataError(f"{' '.join(uris)}: to be read as one dataset they must lie on one filesystem")
    vocab_size = max(d.vocab_size for d in found)
    return replace(first, shards=tuple(s for d in found for s in d.shards), vocab_size=vocab_size)


def with_ends(dataset: Dataset, append_eod: bool | str, end_of_document: int | None) -> Dataset:
    """`dataset` with the end-of-document id that packing has to add, if any.

    `append_eod` is `auto`: as the manifest says, else where the first documents do not end with the id. Raises
    `DataError` where an id must be added and none is known.
    """
    if append_eod == "auto" and dataset.end_of_document is not None:
        return dataset
    known = dataset.end_of_document if end_of_document is None else end_of_document
    if append_eod is False or (append_eod == "auto" and (known is None or _has_ends(dataset, known))):
        return replace(dataset, append=None, end_of_document=known)
    if known is None:
        raise DataError(f"append_eod: no end-of-document id is known for {dataset.name}; give it with eod_token")
    return replace(dataset, append=known, end_of_document=known)


def _has_ends(dataset: Dataset, end: int) -> bool:
    """Whether the first documents that are not empty end with `end`."""
    for shard in dataset.shards:
        opened = open_shard(dataset.place, shard, dataset.column)
        for number in range(len(opened.rows)):
            if opened.tokens[number]:
                unit = opened.load(number)
                ends = unit.ends[unit.ends > 0][:_LOOKED_AT]
                return bool((unit.ids[ends - 1] == end).all())
    return True


def _open_one(place: Place, column: str | None, cache: Path | None, log: Callable[[str], None]) -> Dataset:
    try:
        return _found(place, column, cache, log)
    except OSError as error:
        raise DataError(f"{place.uri} cannot be read: {error}") from error


def _found(place: Place, column: str | None, cache: Path | None, log: Callable[[str], None]) -> Dataset:
    path = place.path
    if path.endswith(f"/{MANIFEST_FILE}"):
        return _from_manifest(place, path, column)
    if (size := place.size(path)) is not None:
        files = [(path, size)]
    elif place.is_folder(path):
        manifest = f"{path.rstrip('/')}/{MANIFEST_FILE}"
        if place.size(manifest) is not None:
            return _from_manifest(place, manifest, column)
        files = place.files(path, _SUFFIXES)
    elif (size := place.size(path + ".idx")) is not None:
        files = [(path + ".idx", size)]
    else:
        files = place.files(path, _SUFFIXES)
    if not files:
        raise DataError(
            f"{place.uri} is not a dataset: it holds no {MANIFEST_FILE} and no {', '.join(_SUFFIXES)} file. Make one "
            f"from text with `python -m raytrain_llama3 data tokenize --input PATH --output {place.uri}`"
        )
    return _counted(place, files, column, cache, log)


def _from_manifest(place: Place, path: str, column: str | None) -> Dataset:
    manifest, folder = parse_manifest(place.name(path), place.read(path)), path.rpartition("/")[0]
    shards = tuple(replace(shard, file=f"{folder}/{shard.file}") for shard in manifest.shards)
    append = None if manifest.has_ends else manifest.end_of_document
    return Dataset(place, shards, column, manifest.tokenizer, manifest.vocab_size, manifest.end_of_document, append)


def _counted(
    place: Place,
    files: Sequence[tuple[str, int]],
    column: str | None,
    cache: Path | None,
    log: Callable[[str], None],
) -> Dataset:
    known = _Counts(cache, place, column)
    missing = [file for file in files if known.get(*file) is None]
    if missing and not place.is_local:
        log(f"counting the tokens of {len(missing)} shard(s) of {place.uri}")
    read = functools.partial(_count, place, column)
    parquet = [file for file in missing if file[0].endswith(_PARQUET)]
    others = [file for file in missing if not file[0].endswith(_PARQUET)]
    for found in [*read_apart(read, parquet, lambda file: f"shard {place.name(file[0])}"), *map(read, others)]:
        known.add(found)
    known.save()
    shards = tuple(shard for path, size in files if (shard := known.get(path, size)) is not None)
    if not sum(shard.documents for shard in shards):
        raise DataError(f"{place.uri}: its {len(shards)} shard(s) hold no document at all")
    return Dataset(place, shards, column)


def _count(place: Place, column: str | None, file: tuple[str, int]) -> Shard:
    return count(place, *file, column)


class _Counts:
    """Counts of shards as they were found, kept in a file: of a local shard until it is written again."""

    def __init__(self, folder: Path | None, place: Place, column: str | None) -> None:
        key = hashlib.sha256(f"{place.uri}\n{column}".encode()).hexdigest()[:16]
        self._path = folder / f"counts-{key}.json" if folder is not None else None
        self._place, self._shards, self._is_new = place, dict[str, Shard](), False
        try:
            told = json.loads(self._path.read_bytes()) if self._path else {}
            self._stamps: dict[str, Any] = told.get("stamps", {})
            for shard in told.get("shards", []):
                units = tuple((int(r), int(t)) for r, t in shard.pop("units"))
                self._shards[shard["file"]] = Shard(**shard, units=units)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            # It saves time and holds nothing else: one that cannot be read is made anew.
            self._shards, self._stamps = {}, {}

    def get(self, path: str, size: int) -> Shard | None:
        shard = self._shards.get(path)
        is_same = shard is not None and shard.bytes == size and self._stamps.get(path) == self._stamp(path)
        return shard if is_same else None

    def add(self, shard: Shard) -> None:
        self._shards[shard.file], self._stamps[shard.file] = shard, self._stamp(shard.file)
        self._is_new = True

    def save(self) -> None:
        """Atomically, as several drivers may share the folder."""
        if self._path is None or not self._is_new:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_suffix(f".{os.getpid()}.tmp")
        told = {"stamps": self._stamps, "shards": [asdict(s) for s in self._shards.values()]}
        fresh.write_text(json.dumps(told))
        fresh.replace(self._path)

    def _stamp(self, path: str) -> int:
        return Path(path).stat().st_mtime_ns if self._place.is_local else 0
