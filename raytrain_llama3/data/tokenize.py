"""Making a dataset from text, and looking at one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raytrain_llama3.data.documents import SUFFIXES, Corpus, find_files, no_documents
from raytrain_llama3.data.encoders import BYTES, Encoder, open_encoder
from raytrain_llama3.data.manifest import Manifest, read_manifest, write_manifest
from raytrain_llama3.data.order import SampleOrder
from raytrain_llama3.data.shard import OpenShard, TokenHash
from raytrain_llama3.data.shard_writer import ShardWriter, replacing
from raytrain_llama3.errors import DataError

SHARD_TOKENS = 1 << 28
"""Half a GiB of uint16, one GiB of uint32."""
_GROUP_DOCUMENTS = 256
_GROUP_BYTES = 1 << 23
_LOG_INTERVAL_DOCUMENTS = 100_000
_INSPECT_SEQ_LENGTH = 8192


def tokenize(
    inputs: Sequence[Path],
    output: Path,
    tokenizer: str = BYTES,
    *,
    suffixes: frozenset[str] = SUFFIXES,
    shard_tokens: int = SHARD_TOKENS,
    log: Callable[[str], None],
    seed: int = 0,
    overwrite: bool = False,
) -> Manifest:
    """Turn text files into the dataset folder `output`, and return its manifest.

    Each file is a document, and so is the "text" of each line of a .jsonl file; each ends with the tokenizer's
    end-of-document id. Documents are put in an order that depends on `seed` and their number alone, so that a
    split by document order takes its validation part from everywhere. Equal input gives equal shards.

    Folders among `inputs` are searched for files ending in one of `suffixes`. Documents that cannot be read, or are
    not UTF-8 where the tokenizer wants it, are left out and told to `log`. `output` appears complete or not at all;
    a dataset there is replaced only with `overwrite`.

    Raises `DataError` when there are no documents, the tokenizer cannot be opened, `output` is taken, or a line of
    a .jsonl file has no "text".
    """
    if shard_tokens < 1:
        raise DataError(f"shard_tokens must be at least 1, got {shard_tokens}")
    with replacing(output, overwrite) as folder:
        encoder = open_encoder(tokenizer)
        corpus = Corpus(find_files(inputs, suffixes), log)
        id_type = Manifest(tokenizer, encoder.vocab_size, encoder.end_of_document, ()).id_type
        left_out = corpus.left_out
        with ShardWriter(folder, id_type, shard_tokens) as writer:
            for done, ids in enumerate(_encoded(corpus, encoder, seed), start=1):
                if isinstance(ids, str):
                    left_out += 1
                    log(f"left out, {ids}")
                elif len(ids):
                    writer.add(np.append(ids.astype(id_type), id_type.type(encoder.end_of_document)))
                if done % _LOG_INTERVAL_DOCUMENTS == 0:
                    log(f"{done:,} of {len(corpus):,} documents")
        if not writer.shards:
            raise no_documents(inputs, suffixes)
        manifest = Manifest(tokenizer, encoder.vocab_size, encoder.end_of_document, writer.shards)
        write_manifest(folder, manifest)
    log(
        f"{output}: {manifest.documents:,} documents, {manifest.tokens:,} tokens, {len(manifest.shards)} shard(s)"
        + (f"; {left_out:,} documents left out" if left_out else "")
    )
    return manifest


def inspect(folder: Path) -> str:
    """Check every shard of a dataset against its manifest and describe it in a few lines.

    Reads all of it. Raises `DataError`, naming the file, at the first thing that is not as it should be.
    """
    manifest = read_manifest(folder)
    shards = [OpenShard(folder, shard) for shard in manifest.shards]
    for shard in shards:
        _check_contents(shard, manifest)
    mean = manifest.tokens / max(manifest.documents, 1)
    windows = max(manifest.tokens - 1, 0) // _INSPECT_SEQ_LENGTH
    lines = [
        f"dataset      {folder}",
        f"tokenizer    {manifest.tokenizer}",
        f"vocab_size   {manifest.vocab_size:,} ({manifest.id_type}), documents end with {manifest.end_of_document}",
        f"shards       {len(shards):,}, {sum(shard.bytes for shard in manifest.shards):,} bytes",
        f"documents    {manifest.documents:,}, {mean:,.1f} tokens each on average",
        f"tokens       {manifest.tokens:,}",
        f"windows      {windows:,} at seq_length {_INSPECT_SEQ_LENGTH:,}",
        f"fingerprint  {manifest.fingerprint()}",
    ]
    if manifest.tokenizer == BYTES and manifest.documents:
        lines.append(f"begins with  {_beginning(shards[0])!r}")
    return "\n".join(lines)


def _encoded(corpus: Corpus, encoder: Encoder, seed: int) -> Iterator[npt.NDArray[Any] | str]:
    """Ids of every document in shuffled order, or why a document was left out."""
    names: list[str] = []
    texts: list[bytes] = []
    size = 0
    for document in _shuffled(len(corpus), seed):
        try:
            texts.append(corpus.read(document))
        except OSError as error:
            yield f"cannot be read: {corpus.name(document)} ({error})"
            continue
        names.append(corpus.name(document))
        size += len(texts[-1])
        # Tokenizers encode the documents of a group in parallel.
        if len(texts) == _GROUP_DOCUMENTS or size >= _GROUP_BYTES:
            yield from _encode_group(encoder, names, texts)
            names, texts, size = [], [], 0
    yield from _encode_group(encoder, names, texts)


def _encode_group(encoder: Encoder, names: list[str], texts: list[bytes]) -> Iterator[npt.NDArray[Any] | str]:
    for name, ids in zip(names, encoder.encode(texts), strict=True):
        yield f"not UTF-8: {name}" if ids is None else ids


def _shuffled(count: int, seed: int) -> Iterator[int]:
    if not count:
        return
    order = SampleOrder(seed, count)
    for first in range(0, count, 1 << 16):
        yield from order.locate(np.arange(first, min(first + (1 << 16), count), dtype=np.int64)).tolist()


def _check_contents(shard: OpenShard, manifest: Manifest) -> None:
    found = TokenHash()
    for row, ids in enumerate(shard.documents()):
        found.add(ids)
        if len(ids) and ids.max() >= manifest.vocab_size:
            raise DataError(
                f"{shard.path}, row {row}: token id {ids.max()} does not fit the vocab_size {manifest.vocab_size} of "
                f"the manifest; make the dataset again"
            )
    if found.hexdigest() != shard.shard.sha256:
        raise DataError(
            f"shard {shard.path} does not hold the tokens that were written (SHA-256 {found.hexdigest()}, the manifest "
            f"says {shard.shard.sha256}); copy it again or make the dataset again"
        )


def _beginning(shard: OpenShard) -> str:
    # 200 characters are at most 800 bytes.
    first = next(shard.documents())[:800]
    return first[first < 256].astype(np.uint8).tobytes().decode("utf-8", "replace")[:200]
