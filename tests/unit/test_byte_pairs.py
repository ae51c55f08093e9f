import itertools
import json
import random
import sys
import unicodedata

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from raytrain_llama3.data.byte_pairs import LLAMA3_PATTERN, open_byte_pairs
from raytrain_llama3.data.encoders import open_encoder

CORPUS = [
    "The quick brown fox isn't here; they've gone, we'll see what I'd do. Don't!\n\n  He said: 'twas 1984, not 20,260.",
    "Größe, façade, naïve — Привет, мир! 你好。世界。 こんにちは 🙂👍🏽 aaaa aaaaaaaa ababab",
    "\t\tdef f(x):\r\n    return x ** 2\n",
    "over and over, under, wonder, wander, wandering, the theory of there and then and the others; banana bandana",
]
TEXTS = [
    *CORPUS,
    "",
    " ",
    "\n",
    "a",
    " a",
    "  a  b   c \n\n \n d\t\t\te \r\n\r\n f   ",
    "I'M YOU'RE we'Ll they'VE x's 's 'S ''s can't'd'd",
    "1 12 123 1234 12345 ٣٤٥ ⅷ ½ ² 1٣2",
    "e\u0301 x\u00a0y\u2003z\u2028w\u0085v \ufeff \u200b \u180e \x1c\x1d\x00",
    "'\u017f a'\u017ft don'\u017f K\u212a",
    "👩‍👩‍👧‍👦🏳️‍🌈🇩🇪 flags",
    "<|endoftext|> in the midst<|endoftext|>of it, <|eot_id|>",
    "a tool<tool_call>b, wonder <tool_call >",
    "\U0001d518\U0001d52b\U0001d526 ㋿ \U0001f6d8 \U00016ea0 \U0002ebf0 \ua7cb \U00010d4a \ufffe \U0010ffff",
    "a" * 3000 + " " * 3000 + "ab" * 700 + "\n" * 900 + "x" + "!" * 800,
    "long " * 30000,
]


def train(corpus=CORPUS, alphabet=True, llama3=False):
    tokenizer = Tokenizer(models.BPE())
    if llama3:
        split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()) if alphabet else [],
        show_progress=False,
    )
    tokenizer.train_from_iterator(list(corpus), trainer)
    return tokenizer


def as_llama3_is_published(tokenizer):
    """Every way to part a token is listed, a word is taken whole, and some words can be had in no other way."""
    told = json.loads(tokenizer.to_str())
    vocab = {token: i for i, token in enumerate(t for t in told["model"]["vocab"] if t != "<|endoftext|>")}
    vocab |= {word: len(vocab) + i for i, word in enumerate(("Ġwunderbar", "xyzzy"))}
    parts = [(t[:i], t[i:], number) for t, number in vocab.items() for i in range(1, len(t))]
    parts = [(a, b, number) for a, b, number in parts if a in vocab and b in vocab]
    # Within a token as the converter of `transformers` sorts them.
    parts.sort(key=lambda p: (p[2], vocab[p[0]], vocab[p[1]]))
    told["model"] |= {"vocab": vocab, "merges": [[a, b] for a, b, _ in parts], "ignore_merges": True}
    told["added_tokens"] = []
    published = Tokenizer.from_str(json.dumps(told))
    published.add_special_tokens(["<|begin_of_text|>", "<|endoftext|>"])
    template = processors.TemplateProcessing("<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", len(vocab))])
    published.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return published


def with_added(tokenizer):
    tokenizer.add_tokens([AddedToken("<tool_call>"), AddedToken("wander", single_word=True), "ö, f"])
    tokenizer.add_special_tokens(["<|eot_id|>", "wonder"])
    return tokenizer


FORMS = {
    "gpt2": train,
    "gpt2-few-bytes": lambda: train(["the wandering TV of banana bandana's\r\n\t1!, ö"], alphabet=False),
    "gpt2-added": lambda: with_added(train()),
    "llama3": lambda: train(llama3=True),
    "llama3-published": lambda: as_llama3_is_published(train(llama3=True)),
    "llama3-added": lambda: with_added(as_llama3_is_published(train(llama3=True))),
}


def saved(tokenizer, folder):
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def random_texts(count):
    seed = random.SystemRandom().randrange(1 << 32)
    sys.stdout.write(f"seed {seed}\n")
    chosen = random.Random(seed)
    assigned = [chr(c) for c in range(0x20000) if unicodedata.category(chr(c)) not in ("Cs", "Cn")]
    kinds = [
        lambda n: chosen.choices("ab nrt'sTV  \n\r\t1!,", k=n),
        lambda n: chosen.choices([chr(c) for c in range(128)], k=n),
        lambda n: chosen.choices([chr(c) for c in range(0x600)], k=n),
        lambda n: chosen.choices(assigned, k=n),
        lambda n: [chr(c) for c in chosen.choices(range(0x110000), k=n) if not 0xD800 <= c < 0xE000],
        lambda n: chosen.choices(["the", "wander", "ing", " ", "'ll", "banana", "\n", "ö", "你好", "<|eot_id|>"], k=n),
        lambda n: list(chosen.randbytes(n).decode("utf-8", "replace")),
    ]
    return ["".join(chosen.choice(kinds)(chosen.randrange(1, 200))) for _ in range(count)]


@pytest.mark.parametrize("form", FORMS)
def test_the_ids_are_those_of_the_tokenizers_library(tmp_path, form):
    path = saved(FORMS[form](), tmp_path)
    texts = [*TEXTS, *random_texts(1000)]
    library = Tokenizer.from_file(str(path))
    library.encode_special_tokens = True
    expected = [e.ids for e in library.encode_batch_fast(texts, add_special_tokens=False)]
    pairs = open_byte_pairs(path)
    found = [pairs.encode(text) for text in texts]
    different = [(t, e) for t, f, e in zip(texts, found, expected, strict=True) if f is not None and list(f) != e]
    assert different == []
    sure = sum(ids is not None for ids in found)
    assert sure > (100 if form == "gpt2-few-bytes" else 700)
    encoded = open_encoder(str(path)).encode([*(text.encode() for text in texts), b"\xff"])
    assert encoded.pop() is None
    assert all(ids.dtype == np.uint32 for ids in encoded)
    assert [ids.tolist() for ids in encoded] == expected


def test_what_it_is_not_sure_of(tmp_path):
    pairs = open_byte_pairs(saved(with_added(train()), tmp_path))
    for text in ("a <tool_call> b", "a wander b", "a wanderer", "'\u017f", " " * 20_000, "a" + "\n" * 20_000):
        assert pairs.encode(text) is None
    for text in ("plain", "special: <|eot_id|><|endoftext|>", "Größe 🙂", " " * 5000, "ab " * 20_000):
        assert pairs.encode(text) is not None
    few = open_byte_pairs(saved(FORMS["gpt2-few-bytes"](), tmp_path))
    assert few.encode("the other, banana!") is not None
    assert few.encode("the query, 2") is None


def test_a_million_blanks(tmp_path):
    path = saved(train(llama3=True), tmp_path)
    text = "a" + " " * 1_000_000 + "b"
    expected = Tokenizer.from_file(str(path)).encode(text, add_special_tokens=False).ids
    assert open_encoder(str(path)).encode([text.encode()])[0].tolist() == expected


def changed(tokenizer, change):
    told = json.loads(tokenizer.to_str())
    change(told)
    return told


def swap_merges(told):
    merges = told["model"]["merges"]
    merges[5], merges[40] = merges[40], merges[5]


def add_a_token_that_neighbours_make(told):
    """A word in the vocabulary that no listed pair makes, but the bytes of which end as two parts."""
    told["model"]["vocab"]["".join(told["model"]["merges"][-1]) + "@"] = 100_000
    told["model"]["ignore_merges"] = True


def set_model(name, value):
    return lambda told: told["model"].update({name: value})


def set_cut(name, value):
    return lambda told: told["pre_tokenizer"].update({name: value})


@pytest.mark.parametrize(
    "change",
    [
        set_model("type", "WordPiece"),
        set_model("dropout", 0.1),
        set_model("continuing_subword_prefix", "##"),
        set_model("end_of_word_suffix", "</w>"),
        swap_merges,
        add_a_token_that_neighbours_make,
        set_cut("add_prefix_space", True),
        set_cut("use_regex", False),
        set_cut("type", "Whitespace"),
        lambda told: told.update(normalizer={"type": "NFC"}),
        lambda told: told.update(pre_tokenizer=None),
        lambda told: told.update(post_processor={"type": "RobertaProcessing"}),
        lambda told: told.update(post_processor={"type": "TemplateProcessing", "single": [], "pair": []}),
    ],
)
def test_files_that_are_not_understood_are_left_alone(tmp_path, change):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(changed(train(), lambda told: None)))
    assert open_byte_pairs(path) is not None
    path.write_text(json.dumps(changed(train(), change)))
    assert open_byte_pairs(path) is None


@pytest.mark.parametrize(
    ("products", "merges", "same"),
    [
        (["ab", "abc"], ["a b", "ab c"], True),
        # Of a token alone another pair is left than the list has.
        (["ab", "bc", "abc"], ["a b", "b c", "a bc"], False),
        # It is listed both ways, and only one of them is ever met.
        (["ab", "bc", "abc"], ["a b", "b c", "a bc", "ab c"], True),
        # A part comes after what it is a part of.
        (["abc", "ab"], ["ab c", "a b"], False),
        (["bc", "abc", "ab"], ["b c", "ab c", "a bc", "a b"], True),
        # The last token's bytes stay three parts: nothing makes it.
        (["ab", "cd", "bcd", "abcd"], ["a b", "c d", "b cd", "a bcd"], False),
    ],
)
def test_what_neighbours_make_must_be_what_the_list_says(tmp_path, products, merges, same):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*letters, *products])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs = open_byte_pairs(saved(tokenizer, tmp_path))
    assert (pairs is not None) == same
    if pairs is not None:
        words = ["".join(word) for n in range(1, 7) for word in itertools.product("abcd", repeat=n)]
        assert [list(pairs.encode(word)) for word in words] == [e.ids for e in tokenizer.encode_batch(words)]


@pytest.mark.parametrize("field", ["pattern", "behavior", "invert"])
def test_other_ways_to_cut_are_left_alone(tmp_path, field):
    other = {"pattern": {"Regex": LLAMA3_PATTERN.replace("{1,3}", "")}, "behavior": "Removed", "invert": True}
    told = json.loads(train(llama3=True).to_str())
    told["pre_tokenizer"]["pretokenizers"][0][field] = other[field]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(told))
    assert open_byte_pairs(path) is None


def test_without_tiktoken_the_ids_are_the_same(tmp_path, monkeypatch):
    path = saved(train(), tmp_path)
    texts = [text.encode() for text in TEXTS]
    expected = [ids.tolist() for ids in open_encoder(str(path)).encode(texts)]
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    assert open_byte_pairs(path) is None
    assert [ids.tolist() for ids in open_encoder(str(path)).encode(texts)] == expected


def test_a_normalizer_is_heeded(tmp_path):
    tokenizer = train()
    tokenizer.normalizer = normalizers.Lowercase()
    path = saved(tokenizer, tmp_path)
    one, other = open_encoder(str(path)).encode([b"BANANA", b"banana"])
    assert one.tolist() == other.tolist()
