"""Byte pairs of a `tokenizer.json`, merged by `tiktoken` where that is sure to give the ids of `tokenizers`.

It is several times as fast. Both cut a text into pieces by a regular expression and merge the bytes of each. Whatever
might make them differ is asked of the libraries themselves, and where they do differ, or the file says something that
is not understood here, `tokenizers` does it.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CLASSES = (r"\p{L}", r"\p{N}", r"\s")
"""The patterns tell characters apart by these alone; others that they name are ASCII."""
_FOLDED = "\u017f"
"""The one character beyond ASCII that is one of Llama3's contractions when case is ignored: a long s."""
_BLANKS = 10_000
"""Twice as many blanks in a row are left to `tokenizers`: tiktoken gives up at some 100,000 of them."""
_UNKNOWN_OPTIONS = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")


class BytePairs:
    """Encodes texts of which the ids are known to be those of `tokenizers`; special tokens are just text."""

    def __init__(self, pattern: str, ranks: Mapping[bytes, int], added: Sequence[str]) -> None:
        """`ranks` are the ids of the vocabulary; texts with one of the `added` tokens are not for us."""
        library = importlib.import_module("tiktoken")
        self._encoding: Any = library.Encoding("json", pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens={})
        self._added = added
        self._known = b"".join(token for token in ranks if len(token) == 1)
        self._knows_all = len(self._known) == 256
        self._classes = _Classes()

    def encode(self, text: str) -> Sequence[int] | None:
        """Ids of a text; None where `tokenizers` has to be asked."""
        ids: Sequence[int] | None = self._encoding.encode_ordinary(text) if self._is_sure(text) else None
        return ids

    def _is_sure(self, text: str) -> bool:
        if any(token in text for token in self._added) or not self._classes.agree_on(text):
            return False
        # Vocabularies may lack bytes that their texts lacked; what then becomes of one has several answers.
        if not self._knows_all and text.encode().translate(None, self._known):
            return False
        starts = range(0, len(text) - _BLANKS + 1, _BLANKS)
        return not any(text[start : start + _BLANKS].isspace() for start in starts)


class _Classes:
    """Which characters are letters, numbers and blanks to both: the libraries' Unicode may be of different years."""

    def __init__(self) -> None:
        library, tokenizers = importlib.import_module("tiktoken"), importlib.import_module("tokenizers")
        ids = {bytes([i]): i for i in range(256)}
        self._pairs = [
            (
                library.Encoding(name, pat_str=name, mergeable_ranks=ids, special_tokens={}),
                tokenizers.pre_tokenizers.Split(tokenizers.Regex(name), "removed"),
            )
            for name in _CLASSES
        ]
        self._asked: set[str] = set()
        self._doubtful = {_FOLDED}
        self._ask(set(map(chr, range(128))))
        self._ascii_is_doubtful = len(self._doubtful) > 1

    def agree_on(self, text: str) -> bool:
        """Whether both put each character into the same class."""
        if text.isascii():
            return not self._ascii_is_doubtful
        characters = set(text)
        if not characters <= self._asked:
            self._ask(characters - self._asked)
        return self._doubtful.isdisjoint(characters)

    def _ask(self, characters: set[str]) -> None:
        text = "".join(characters)
        for takes, removes in self._pairs:
            taken = set(bytes(takes.encode_ordinary(text)).decode())
            left = set("".join(piece for piece, _ in removes.pre_tokenize_str(text)))
            self._doubtful |= taken ^ (characters - left)
        self._asked |= characters


def open_byte_pairs(path: Path) -> BytePairs | None:
    """What encodes as the `tokenizer.json` at `path` says; None where that is not sure, or tiktoken is not there."""
    told = json.loads(path.read_bytes())
    pattern = _pattern(told.get("pre_tokenizer"))
    if pattern is None or told.get("normalizer") or not _leaves_ids_alone(told.get("post_processor")):
        return None
    model = told["model"]
    if model.get("type") != "BPE" or any(model.get(name) for name in _UNKNOWN_OPTIONS):
        return None
    try:
        importlib.import_module("tiktoken")
    except ImportError:
        return None
    ranks = _ranks(model)
    added = [token["content"] for token in told.get("added_tokens") or () if not token.get("special")]
    return None if ranks is None else BytePairs(pattern, ranks, added)


def _pattern(steps: Any) -> str | None:
    """The regular expression that cuts a text, if it is one that is known here, before bytes are told as letters."""
    given = steps.get("pretokenizers", [steps]) if isinstance(steps, dict) else []
    if not given or given[-1].get("type") != "ByteLevel" or given[-1].get("add_prefix_space", True):
        return None
    by_itself = given[-1].get("use_regex", True)
    if len(given) == 1:
        return _GPT2_PATTERN if by_itself else None
    split = {"type": "Split", "pattern": {"Regex": LLAMA3_PATTERN}, "behavior": "Isolated", "invert": False}
    return LLAMA3_PATTERN if given[:-1] == [split] and not by_itself else None


def _leaves_ids_alone(processor: Any) -> bool:
    """Whether a post-processor does nothing to the ids of one text but add special tokens, which are not wanted."""
    if processor is None:
        return True
    steps = processor.get("processors", [processor])
    return all(
        step["type"] == "ByteLevel"
        or (step["type"] == "TemplateProcessing" and sum("Sequence" in piece for piece in step["single"]) == 1)
        for step in steps
    )


def _ranks(model: Mapping[str, Any]) -> dict[bytes, int] | None:
    """Ids of all that can come of merging bytes; None where tiktoken might merge otherwise.

    `tokenizers` merges the pair that is first in its list, tiktoken whatever two neighbours make the lowest id. Take
    of the list the merges whose parts have lower ids than their product, require that they are in the order of these
    ids, and go through them one by one. What then happens between two borders that no merge has crossed happens
    without them too. So if the bytes of every product, alone, are merged to it, then whenever two neighbours make a
    product whose turn has come or has been, they are the last two parts that it alone is made of: a pair of the list,
    which is merged at its turn. Neither library ever sees another pair; the rest of the list, and words that are only
    taken whole (`ignore_merges`) and stay three parts or more alone, are never made of neighbours at all.
    """
    vocab: dict[str, int] = model["vocab"]
    listed = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
    merges = [m for m in listed if all(len(part) == 1 or vocab[part] < vocab["".join(m)] for part in m)]
    numbers = [vocab["".join(merge)] for merge in merges]
    if numbers != sorted(numbers):
        return None
    products, takes_whole = {"".join(merge) for merge in listed}, bool(model.get("ignore_merges"))
    library = importlib.import_module("tokenizers")
    alone = library.models.BPE(vocab=vocab, merges=merges, cache_capacity=0)
    bytes_of = _bytes_of_letters()
    ranks: dict[bytes, int] = {}
    for token, number in vocab.items():
        if not bytes_of.keys() >= set(token) or not (len(token) == 1 or token in products or takes_whole):
            continue
        parts = len(alone.tokenize(token))
        if parts != 1 and not (takes_whole and parts > 2):
            return None
        ranks[bytes(bytes_of[letter] for letter in token)] = number
    return ranks


def _bytes_of_letters() -> dict[str, int]:
    """The letter that stands for each byte: its own, in Latin-1, where that can be printed, else one from 256 on."""
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + i): byte for i, byte in enumerate(others)}
