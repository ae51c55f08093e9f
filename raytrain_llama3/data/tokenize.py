"""Making a dataset from text, in parts that any number of processes may share: their number changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raytrain_llama3.data.documents import SUFFIXES, TEXT, Places, Reader, find_documents, find_files, no_documents
from raytrain_llama3.data.encoders import BYTES, Encoder, open_encoder
from raytrain_llama3.data.manifest import Manifest, Shard, write_manifest
from raytrain_llama3.data.order import SampleOrder
from raytrain_llama3.data.shard_writer import ShardWriter
from raytrain_llama3.data.workfolder import WorkFolder, work_folder
from raytrain_llama3.errors import DataError

_GROUP_DOCUMENTS = 256
_GROUP_BYTES = 1 << 23
_BLOCK_DOCUMENTS = 4096
_LEAST_PART_BYTES, _MOST_PART_BYTES = 4 << 20, 1 << 29
_USUAL_PARTS = 64
_NAMED = 20


@dataclass(frozen=True, slots=True)
class Job:
    """One part: documents that become one shard. Can be sent to another process."""

    part: int
    folder: str
    files: tuple[str, ...]
    places: Places
    column: str
    tokenizer: str
    append_eod: bool


@dataclass(frozen=True, slots=True)
class Done:
    """A part that is finished, or, with an `error`, cannot be."""

    part: int
    documents: int
    tokens: int
    left_out: tuple[str, ...] = ()
    error: str = ""


Runner = Callable[[Sequence[Job]], Iterator[Done]]
"""Runs jobs in any order, wherever there is room."""


def here(jobs: Sequence[Job]) -> Iterator[Done]:
    """Run jobs in this process."""
    encoders: dict[str, Encoder] = {}
    for job in jobs:
        if job.tokenizer not in encoders:
            encoders[job.tokenizer] = open_encoder(job.tokenizer)
        yield run_job(job, encoders[job.tokenizer])


def tokenize(
    inputs: Sequence[str],
    output: Path,
    tokenizer: str = BYTES,
    *,
    suffixes: Sequence[str] = SUFFIXES,
    column: str = TEXT,
    append_eod: bool = True,
    shards: int | None = None,
    log: Callable[[str], None],
    seed: int = 0,
    overwrite: bool = False,
    run: Runner = here,
) -> Manifest:
    """Turn text files into the dataset folder `output`, and return its manifest.

    Each file is a document, and so is the text of each line of JSON lines and each row of a Parquet file (`column`
    names it); each ends with the tokenizer's end-of-document id, unless `append_eod` is off. Documents are put in an
    order that depends on `seed` and their number alone, so that a split by document order takes its validation part
    from everywhere; the order is cut into `shards` parts of even size. Equal input gives equal shards, whoever runs
    the parts.

    Folders among `inputs` are searched for files ending in one of `suffixes`. Documents that cannot be read, or are
    not UTF-8 where the tokenizer wants it, are left out and told to `log`. `output` appears complete or not at all;
    a dataset there is replaced only with `overwrite`. A run that was killed is gone on with by the next of the same
    inputs and options.

    Raises `DataError` when there are no documents, the tokenizer cannot be opened, `output` is taken, or a line of
    JSON has no text.
    """
    if shards is not None and shards < 1:
        raise DataError(f"shards must be at least 1, got {shards}")
    with work_folder(output, overwrite) as work:
        encoder = open_encoder(tokenizer)
        files = find_files(inputs, suffixes)
        places, unreadable = find_documents(files, column, log)
        if not len(places):
            raise no_documents(inputs, suffixes)
        parts = _parts(places, seed, shards)
        options = [tokenizer, encoder.vocab_size, column, append_eod, seed, len(parts)]
        done = work.begin({"options": options, "files": [[f, *_stamp(f)] for f in files]})
        if done:
            log(f"{done} of {len(parts)} shards are there from a run that did not end; going on")
        jobs = [
            Job(part, str(work.path), tuple(files), places.chosen(documents), column, tokenizer, append_eod)
            for part, documents in enumerate(parts)
            if work.finished(part) is None
        ]
        _run_all([_narrowed(job) for job in jobs], run, len(parts), log)
        manifest, left_out = _collected(work, encoder, tokenizer, append_eod, len(parts))
        if not manifest.shards:
            raise no_documents(inputs, suffixes)
        write_manifest(work.path, manifest)
        work.publish()
    log(_told(output, manifest, left_out + unreadable))
    return manifest


def _told(output: Path, manifest: Manifest, left_out: int) -> str:
    return (
        f"{output}: {manifest.documents:,} documents, {manifest.tokens:,} tokens, {len(manifest.shards)} shard(s)"
        + (f"; {left_out:,} documents left out" if left_out else "")
    )


def run_job(job: Job, encoder: Encoder) -> Done:
    """Write one part's shard, and note that it is done. An error of the data is in the answer, not raised."""
    work = WorkFolder(Path(job.folder), Path(job.folder))
    id_type = Manifest(job.tokenizer, encoder.vocab_size, encoder.end_of_document, ()).id_type
    writer = ShardWriter(work.path / f"shard-{job.part:05d}.arrow", id_type)
    end = np.array([encoder.end_of_document] if job.append_eod else [], dtype=id_type)
    left_out: list[str] = []
    count = 0
    try:
        with Reader(job.files, job.places, job.column) as reader:
            for ids in _encoded(reader, len(job.places), encoder):
                if isinstance(ids, str):
                    count += 1
                    left_out += [ids] if count <= _NAMED else []
                elif len(ids):
                    writer.add(np.concatenate([ids.astype(id_type), end]))
    except DataError as error:
        return Done(job.part, 0, 0, error=str(error))
    shard = writer.finish()
    work.finish(job.part, shard, count)
    if count > _NAMED:
        left_out.append(f"and {count - _NAMED} more of part {job.part}")
    return Done(job.part, shard.documents if shard else 0, shard.tokens if shard else 0, tuple(left_out))


def _run_all(jobs: Sequence[Job], run: Runner, parts: int, log: Callable[[str], None]) -> None:
    documents = tokens = 0
    for number, done in enumerate(run(jobs) if jobs else (), start=parts - len(jobs) + 1):
        if done.error:
            raise DataError(done.error)
        for line in done.left_out:
            log(f"left out, {line}")
        documents, tokens = documents + done.documents, tokens + done.tokens
        if parts > 1:
            log(f"{number} of {parts} shards: {documents:,} documents, {tokens:,} tokens")


def _collected(
    work: WorkFolder, encoder: Encoder, tokenizer: str, append_eod: bool, parts: int
) -> tuple[Manifest, int]:
    """The manifest of all finished parts, and how many documents they left out."""
    shards, left_out = [], 0
    for part in range(parts):
        told = work.finished(part)
        if told is None:
            raise DataError(f"part {part} of {work.output} is not there, though all were run; run the command again")
        left_out += told["left_out"]
        if told["shard"]:
            units = tuple((rows, tokens) for rows, tokens in told["shard"].pop("units"))
            shards.append(Shard(**told["shard"], units=units))
    return Manifest(tokenizer, encoder.vocab_size, encoder.end_of_document, tuple(shards), append_eod), left_out


def _parts(places: Places, seed: int, shards: int | None) -> list[npt.NDArray[np.int64]]:
    """Documents of each part, in shuffled order, cut so that parts are alike in bytes."""
    count = len(places)
    order = SampleOrder(seed, count, _BLOCK_DOCUMENTS)
    shuffled = np.concatenate(
        [order.locate(np.arange(i, min(i + (1 << 16), count), dtype=np.int64)) for i in range(0, count, 1 << 16)]
    )
    ends = np.cumsum(places.sizes[shuffled])
    total = int(ends[-1])
    size = min(max(total // _USUAL_PARTS, _LEAST_PART_BYTES), _MOST_PART_BYTES)
    number = min(shards or max(1, round(total / size)), count)
    cuts = np.searchsorted(ends, [total * i // number for i in range(1, number)], side="right")
    return [part for part in np.split(shuffled, cuts) if len(part)]


def _narrowed(job: Job) -> Job:
    """With no more files than the part's documents are in."""
    used, files = np.unique(job.places.files, return_inverse=True)
    places = replace(job.places, files=files.astype(np.int64))
    return replace(job, files=tuple(job.files[i] for i in used.tolist()), places=places)


def _stamp(file: str) -> tuple[int, int]:
    try:
        found = Path(file).stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def _encoded(reader: Reader, count: int, encoder: Encoder) -> Iterator[npt.NDArray[Any] | str]:
    """Ids of each document in order, or why a document was left out."""
    names: list[str] = []
    texts: list[bytes] = []
    size = 0
    for document in range(count):
        try:
            texts.append(reader.read(document))
        except OSError as error:
            yield f"cannot be read: {reader.name(document)} ({error})"
            continue
        names.append(reader.name(document))
        size += len(texts[-1])
        # Tokenizers encode the documents of a group together.
        if len(texts) == _GROUP_DOCUMENTS or size >= _GROUP_BYTES:
            yield from _encode_group(encoder, names, texts)
            names, texts, size = [], [], 0
    yield from _encode_group(encoder, names, texts)


def _encode_group(encoder: Encoder, names: list[str], texts: list[bytes]) -> Iterator[npt.NDArray[Any] | str]:
    for name, ids in zip(names, encoder.encode(texts), strict=True):
        yield f"not UTF-8: {name}" if ids is None else ids
