"""Tokenizers: text, as bytes, to token ids."""

from __future__ import annotations

import base64
import importlib
import json
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from raytrain_llama3.data.byte_pairs import LLAMA3_PATTERN, open_byte_pairs
from raytrain_llama3.errors import DataError

BYTES = "bytes"
_LLAMA3_SPECIALS = 256
_END_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>")


class Encoder(Protocol):
    """What turns documents into ids below `vocab_size`."""

    vocab_size: int
    end_of_document: int

    def encode(self, documents: Sequence[bytes]) -> list[npt.NDArray[Any] | None]:
        """Ids of each document, without its end, `[tokens]`; None where the text is not what the tokenizer takes."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids below `vocab_size`, as well as it can be told."""
        ...


class ByteEncoder:
    """Ids 0 to 255 are the bytes themselves; 256 ends a document. Takes any file."""

    vocab_size = 257
    end_of_document = 256

    def encode(self, documents: Sequence[bytes]) -> list[npt.NDArray[Any] | None]:
        """The bytes as they are, uint8."""
        return [np.frombuffer(document, dtype=np.uint8) for document in documents]

    def decode(self, ids: Sequence[int]) -> str:
        """As UTF-8, without ends of documents."""
        return bytes(i for i in ids if i < self.end_of_document).decode("utf-8", "replace")


class HuggingFaceEncoder:
    """A `tokenizer.json`, run by the `tokenizers` library, or by `tiktoken` where the ids are the same. Takes UTF-8.

    Special tokens are neither added nor recognised: a text that spells one out is just text. The end of a document
    is the first of <|end_of_text|>, <|endoftext|>, </s> that the tokenizer has, else the `eos_token` of a
    tokenizer_config.json beside it (instruction-tuned models end a turn with theirs, not a document).
    """

    def __init__(self, path: Path) -> None:
        tokenizers = _imported("tokenizers", "reading a tokenizer.json")
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
        self._pairs = open_byte_pairs(path)

    def encode(self, documents: Sequence[bytes]) -> list[npt.NDArray[Any] | None]:
        """Ids, uint32; None for a document that is not UTF-8."""
        texts = [_decode(document) for document in documents]
        found = [None if text is None or self._pairs is None else self._pairs.encode(text) for text in texts]
        left = [text for text, ids in zip(texts, found, strict=True) if text is not None and ids is None]
        encoded = iter(self._tokenizer.encode_batch_fast(left, add_special_tokens=False))
        return [
            None if text is None else _array(next(encoded).ids if ids is None else ids)
            for text, ids in zip(texts, found, strict=True)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens by their names."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

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


class SentencePieceEncoder:
    """A SentencePiece `.model`. Takes UTF-8; `</s>`, or whatever the model's end of sequence is, ends a document."""

    def __init__(self, path: Path) -> None:
        library = _imported("sentencepiece", f"reading {path}")
        self._model: Any = library.SentencePieceProcessor(model_file=str(path))
        self.vocab_size = int(self._model.vocab_size())
        self.end_of_document = int(self._model.eos_id())
        if self.end_of_document < 0:
            raise DataError(f"tokenizer {path} has no end of sequence to end documents with")

    def encode(self, documents: Sequence[bytes]) -> list[npt.NDArray[Any] | None]:
        """Ids, uint32; None for a document that is not UTF-8."""
        return _one_by_one(documents, self._model.encode)

    def decode(self, ids: Sequence[int]) -> str:
        """Control symbols are nothing."""
        return str(self._model.decode(list(ids)))


class TiktokenEncoder:
    """Llama3's own `tokenizer.model`: a list of byte pairs, run by `tiktoken`. Takes UTF-8.

    As in Meta's reader, 256 special ids follow the pairs; the second of them, <|end_of_text|>, ends a document.
    """

    def __init__(self, path: Path) -> None:
        library, load = _imported("tiktoken", f"reading {path}"), _imported("tiktoken.load", f"reading {path}")
        pairs = load.load_tiktoken_bpe(str(path))
        names = ["<|begin_of_text|>", "<|end_of_text|>", *(f"<|special_{i}|>" for i in range(2, _LLAMA3_SPECIALS))]
        specials = {name: len(pairs) + i for i, name in enumerate(names)}
        self._encoding: Any = library.Encoding(
            path.name, pat_str=LLAMA3_PATTERN, mergeable_ranks=pairs, special_tokens=specials
        )
        self.vocab_size = len(pairs) + _LLAMA3_SPECIALS
        self.end_of_document = specials["<|end_of_text|>"]

    def encode(self, documents: Sequence[bytes]) -> list[npt.NDArray[Any] | None]:
        """Ids, uint32; None for a document that is not UTF-8."""
        return _one_by_one(documents, self._encoding.encode_ordinary)

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens by their names."""
        return str(self._encoding.decode(list(ids)))


def open_encoder(name: str) -> Encoder:
    """The tokenizer called `name`: "bytes", a tokenizer.json, a folder that holds one, or a `.model`.

    A `.model` is a list of byte pairs in base64 (Llama3's, for tiktoken) or else SentencePiece's.

    Raises `DataError` when it is not there, cannot be read or has no token to end documents with.
    """
    if name == BYTES:
        return ByteEncoder()
    path = Path(name).expanduser()
    if path.is_dir():
        path /= "tokenizer.json"
    if not path.is_file():
        raise DataError(
            f"tokenizer {name!r}: no file {path}; give {BYTES!r}, a tokenizer.json, a folder that holds one, or a "
            f".model of SentencePiece or tiktoken"
        )
    if path.suffix == ".json":
        return HuggingFaceEncoder(path)
    try:
        return TiktokenEncoder(path) if _is_tiktoken(path) else SentencePieceEncoder(path)
    except (RuntimeError, ValueError, OSError) as error:
        raise DataError(f"tokenizer {path} cannot be read: {error}") from error


def _is_tiktoken(path: Path) -> bool:
    """Whether the file begins with a line of base64 and a rank."""
    with path.open("rb") as file:
        parts = file.readline(1024).split()
    try:
        return len(parts) == 2 and int(parts[1]) >= 0 and bool(base64.b64decode(parts[0], validate=True))
    except ValueError:
        return False


def _imported(name: str, purpose: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        library = name.split(".")[0]
        raise DataError(f"{purpose} takes the library {library}: pip install 'raytrain-llama3[hf]'") from error


def _one_by_one(documents: Sequence[bytes], encode: Callable[[str], Sequence[int]]) -> list[npt.NDArray[Any] | None]:
    texts = map(_decode, documents)
    return [None if text is None else _array(encode(text)) for text in texts]


def _array(ids: Sequence[int]) -> npt.NDArray[np.uint32]:
    # numpy looks at each number's type before it takes it, and needs several times as long.
    return np.frombuffer(array("I", ids), dtype=np.uint32)


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
