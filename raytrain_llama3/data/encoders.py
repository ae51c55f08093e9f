"""Tokenizers: text, as bytes, to token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from raytrain_llama3.errors import DataError

BYTES = "bytes"
_END_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>")


class Encoder(Protocol):
    """What turns documents into ids below `vocab_size`."""

    vocab_size: int
    end_of_document: int

    def encode(self, documents: Sequence[bytes]) -> list[npt.NDArray[Any] | None]:
        """Ids of each document, without its end, `[tokens]`; None where the text is not what the tokenizer takes."""
        ...


class ByteEncoder:
    """Ids 0 to 255 are the bytes themselves; 256 ends a document. Takes any file."""

    vocab_size = 257
    end_of_document = 256

    def encode(self, documents: Sequence[bytes]) -> list[npt.NDArray[Any] | None]:
        """The bytes as they are, uint8."""
        return [np.frombuffer(document, dtype=np.uint8) for document in documents]


class HuggingFaceEncoder:
    """A `tokenizer.json`, run by the `tokenizers` library. Takes UTF-8.

    Special tokens are neither added nor recognised: a text that spells one out is just text. The end of a document
    is the first of <|end_of_text|>, <|endoftext|>, </s> that the tokenizer has, else the `eos_token` of a
    tokenizer_config.json beside it (instruction-tuned models end a turn with theirs, not a document).
    """

    def __init__(self, path: Path) -> None:
        tokenizers = _import_tokenizers()
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:
            # The library raises this very class, and no other, for a bad path and for bad contents.
            raise DataError(f"tokenizer {path} cannot be read: {error}") from error
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.end_of_document = self._end(path)

    def encode(self, documents: Sequence[bytes]) -> list[npt.NDArray[Any] | None]:
        """Ids, uint32; None for a document that is not UTF-8."""
        texts = [_decode(document) for document in documents]
        encoded = iter(
            self._tokenizer.encode_batch_fast([text for text in texts if text is not None], add_special_tokens=False)
        )
        return [None if text is None else np.array(next(encoded).ids, dtype=np.uint32) for text in texts]

    def _end(self, path: Path) -> int:
        config = path.with_name("tokenizer_config.json")
        names = [*_END_NAMES, *_eos_token(config)]
        for name in names:
            number = self._tokenizer.token_to_id(name)
            if number is not None:
                return int(number)
        raise DataError(
            f"tokenizer {path} has none of {', '.join(names)} to end documents with; put a tokenizer_config.json with "
            f"an eos_token beside it"
        )


def open_encoder(name: str) -> Encoder:
    """The tokenizer called `name`: "bytes", a tokenizer.json, or a folder that holds one.

    Raises `DataError` when it is not there, cannot be read or has no token to end documents with.
    """
    if name == BYTES:
        return ByteEncoder()
    path = Path(name).expanduser()
    if path.is_dir():
        path /= "tokenizer.json"
    if not path.is_file():
        raise DataError(
            f"tokenizer {name!r}: no file {path}; give {BYTES!r}, a tokenizer.json, or a folder that holds one"
        )
    return HuggingFaceEncoder(path)


def _import_tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(
            "reading a tokenizer.json takes the library tokenizers: pip install 'raytrain-llama3[hf]'"
        ) from error
    return tokenizers


def _decode(document: bytes) -> str | None:
    try:
        return document.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _eos_token(config: Path) -> list[str]:
    if not config.is_file():
        return []
    try:
        told = json.loads(config.read_bytes()).get("eos_token")
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{config} cannot be read: {error}") from error
    name = told.get("content") if isinstance(told, dict) else told
    return [name] if isinstance(name, str) else []
