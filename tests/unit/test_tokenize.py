import base64
import json
import os
import re
import sys

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from raytrain_llama3.data import tokenize as module
from raytrain_llama3.data.catalog import open_dataset
from raytrain_llama3.data.inspect import inspect
from raytrain_llama3.data.manifest import MANIFEST_FILE, read_manifest
from raytrain_llama3.data.packed import PackedSource
from raytrain_llama3.errors import DataError

END = 256


def tokenize(inputs, *arguments, **options):
    return module.tokenize([str(path) for path in inputs], *arguments, **options)


@pytest.fixture
def lines():
    return []


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    (folder / "b" / "deep").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    (folder / "a.txt").write_text("first")
    (folder / "b" / "two.md").write_text("zweites, größer")
    (folder / "b" / "deep" / "three.py").write_bytes(b"\xff\xfe not utf-8")
    (folder / "b" / "empty.txt").write_text("")
    (folder / "b" / "image.png").write_text("not text")
    (folder / ".hidden" / "x.txt").write_text("hidden")
    (folder / "lines.jsonl").write_text('{"text": "eins"}\n\n{"text": "zwei\\n", "id": 2}\n{"text": ""}\n{"text": "ä"}')
    return folder


ALL = {b"first", "zweites, größer".encode(), b"\xff\xfe not utf-8", b"eins", b"zwei\n", "ä".encode()}


def documents_of(folder):
    manifest = read_manifest(folder)
    dataset = open_dataset([str(folder)], None, 0)
    source = PackedSource(dataset, (0, manifest.documents), dataset.tokens - 1, manifest.vocab_size)
    stream = source.windows(np.array([0]))[0].tolist()
    documents = [[]]
    for token in stream:
        if token == manifest.end_of_document:
            documents.append([])
        else:
            documents[-1].append(token)
    assert documents.pop() == []
    return documents


def texts_of(folder):
    return [bytes(document) for document in documents_of(folder)]


def test_bytes(texts, tmp_path, lines):
    manifest = tokenize([texts], tmp_path / "out", log=lines.append)
    assert (manifest.tokenizer, manifest.vocab_size, manifest.end_of_document) == ("bytes", 257, END)
    assert manifest == read_manifest(tmp_path / "out")
    found = texts_of(tmp_path / "out")
    assert len(found) == manifest.documents == 6
    assert set(found) == ALL
    assert manifest.tokens == sum(len(text) + 1 for text in ALL)
    assert lines == [f"{tmp_path / 'out'}: 6 documents, {manifest.tokens} tokens, 1 shard(s)"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "texts"]


def test_equal_input_gives_equal_shards_and_the_seed_another_order(tmp_path, lines):
    names = [f"{i:03d}" for i in range(200)]
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        for name in names if folder == "one" else reversed(names):
            (tmp_path / folder / f"{name}.txt").write_text(name)
    prints, orders = [], []
    for folder, seed in (("one", 0), ("two", 0), ("one", 1)):
        out = tmp_path / f"out-{folder}-{seed}"
        prints.append(tokenize([tmp_path / folder], out, shards=5, seed=seed, log=lines.append).fingerprint())
        orders.append([text.decode() for text in texts_of(out)])
    assert prints[0] == prints[1] != prints[2]
    assert orders[0] == orders[1] != orders[2]
    assert all(sorted(order) == names for order in orders)
    # The last tenth, which a split validates on, comes from everywhere.
    for order in (orders[0], orders[2]):
        assert len({int(name) // 50 for name in order[-20:]}) == 4


def test_shards_are_cut_at_whole_documents_and_are_alike(tmp_path, lines):
    written = [f"{i} " * (i % 40 + 1) for i in range(3000)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in written))
    manifest = tokenize([tmp_path / "in.jsonl"], tmp_path / "out", shards=8, log=lines.append)
    tokens = [shard.tokens for shard in manifest.shards]
    assert len(tokens) == 8
    assert max(tokens) < 1.1 * min(tokens)
    assert sorted(texts_of(tmp_path / "out")) == sorted(text.encode() for text in written)
    assert lines[-2].startswith("8 of 8 shards: 3,000 documents")
    with pytest.raises(DataError, match="shards must be at least 1"):
        tokenize([tmp_path / "in.jsonl"], tmp_path / "out2", shards=0, log=lines.append)


def test_a_run_that_was_killed_goes_on_without_a_duplicate_or_a_lost_document(tmp_path, lines):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(500)))
    whole = tokenize([tmp_path / "in.jsonl"], tmp_path / "whole", shards=6, log=lines.append)
    ran = []

    def killed_after_two(jobs):
        for done in module.here(jobs):
            ran.append(done.part)
            yield done
            if len(ran) == 2:
                raise KeyboardInterrupt

    def noted(jobs):
        for done in module.here(jobs):
            ran.append(done.part)
            yield done

    with pytest.raises(KeyboardInterrupt):
        tokenize([tmp_path / "in.jsonl"], tmp_path / "out", shards=6, log=lines.append, run=killed_after_two)
    assert not (tmp_path / "out").exists()
    assert tokenize([tmp_path / "in.jsonl"], tmp_path / "out", shards=6, log=lines.append, run=noted) == whole
    assert sorted(ran) == list(range(6))
    assert "2 of 6 shards are there from a run that did not end; going on" in lines
    # Of other inputs nothing is taken over.
    ran.clear()
    with pytest.raises(KeyboardInterrupt):
        tokenize([tmp_path / "in.jsonl"], tmp_path / "out2", shards=6, log=lines.append, run=killed_after_two)
    (tmp_path / "in.jsonl").write_text((tmp_path / "in.jsonl").read_text() + '{"text": "one more"}\n')
    ran.clear()
    assert tokenize([tmp_path / "in.jsonl"], tmp_path / "out2", shards=6, log=lines.append, run=noted).documents == 501
    assert sorted(ran) == list(range(6))


def test_two_runs_do_not_write_one_output(tmp_path, lines):
    (tmp_path / "a.txt").write_text("text")

    def meanwhile(jobs):
        with pytest.raises(DataError, match="is being written by another process"):
            tokenize([tmp_path / "a.txt"], tmp_path / "out", log=lines.append)
        yield from module.here(jobs)

    assert tokenize([tmp_path / "a.txt"], tmp_path / "out", log=lines.append, run=meanwhile).documents == 1


def test_parquet(tmp_path, lines):
    texts = [f"row {i}" for i in range(30)] + ["", None]
    pq.write_table(pa.table({"id": range(32), "text": texts}), tmp_path / "x.parquet", row_group_size=7)
    manifest = tokenize([tmp_path], tmp_path / "out", log=lines.append)
    assert manifest.documents == 30
    assert sorted(texts_of(tmp_path / "out")) == sorted(f"row {i}".encode() for i in range(30))
    with pytest.raises(DataError, match=r"x\.parquet has no column 'body' but id, text: .*--column"):
        tokenize([tmp_path], tmp_path / "out2", column="body", log=lines.append)


def test_more_files_than_are_kept_open(tmp_path, lines):
    (tmp_path / "in").mkdir()
    for number in range(200):
        told = [json.dumps({"text": f"{number} {line}"}) for line in range(5)]
        (tmp_path / "in" / f"{number}.jsonl").write_text("\n".join(told))
    tokenize([tmp_path / "in"], tmp_path / "out", log=lines.append)
    found = sorted(texts_of(tmp_path / "out"))
    assert found == sorted(f"{number} {line}".encode() for number in range(200) for line in range(5))
    assert [file.path for file in psutil.Process().open_files() if str(tmp_path / "in") in file.path] == []


def test_json_keys_and_no_end(tmp_path, lines):
    (tmp_path / "x.json").write_text('{"body": "one"}\n{"body": "two"}\n')
    manifest = tokenize([tmp_path / "x.json"], tmp_path / "out", column="body", append_eod=False, log=lines.append)
    assert (manifest.tokens, manifest.has_ends) == (6, False)
    # Packing puts in what is not stored.
    assert sorted(texts_of(tmp_path / "out")) == [b"one", b"two"]


def test_inputs_may_be_files_of_any_ending_and_are_taken_once(texts, tmp_path, lines):
    inputs = [texts / "b" / "image.png", texts / "a.txt", texts / "a.txt"]
    tokenize(inputs, tmp_path / "out", log=lines.append)
    assert sorted(texts_of(tmp_path / "out")) == [b"first", b"not text"]
    tokenize([texts], tmp_path / "png", suffixes=(".png",), log=lines.append)
    assert texts_of(tmp_path / "png") == [b"not text"]


def test_no_documents(tmp_path, lines):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "empty.txt").write_text("")
    for suffix in (".txt", ".xyz"):
        with pytest.raises(DataError, match=rf"no documents in {re.escape(str(tmp_path / 'in'))}.*\{suffix}"):
            tokenize([tmp_path / "in"], tmp_path / "out", suffixes=(suffix,), log=lines.append)
    with pytest.raises(DataError, match="nowhere is not there"):
        tokenize([tmp_path / "nowhere"], tmp_path / "out", log=lines.append)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("line", ["{", "[1]", '{"txt": "a"}', '{"text": 5}', "7"])
def test_json_line_without_text(tmp_path, lines, line):
    (tmp_path / "in.jsonl").write_text(f'{{"text": "a"}}\n\n{line}\n')
    with pytest.raises(DataError, match=r'in\.jsonl, line 3.*"text"'):
        tokenize([tmp_path / "in.jsonl"], tmp_path / "out", log=lines.append)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_dataset_is_replaced_only_when_asked(texts, tmp_path, lines):
    out = tmp_path / "out"
    tokenize([texts], out, log=lines.append)
    with pytest.raises(DataError, match=r"out holds a dataset already.*--overwrite"):
        tokenize([texts / "a.txt"], out, log=lines.append)
    assert set(texts_of(out)) == ALL
    with pytest.raises(DataError, match="not there"):
        tokenize([texts / "none"], out, overwrite=True, log=lines.append)
    assert set(texts_of(out)) == ALL
    tokenize([texts / "a.txt"], out, overwrite=True, log=lines.append)
    assert texts_of(out) == [b"first"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "texts"]


def test_a_folder_with_something_else_is_left_alone(texts, tmp_path, lines):
    with pytest.raises(DataError, match="is no dataset, so it is left alone"):
        tokenize([texts], texts, overwrite=True, log=lines.append)
    assert (texts / "a.txt").read_text() == "first"
    (tmp_path / "empty").mkdir()
    tokenize([texts], tmp_path / "empty", log=lines.append)
    assert set(texts_of(tmp_path / "empty")) == ALL


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_file_without_permission(texts, tmp_path, lines):
    (texts / "a.txt").chmod(0)
    manifest = tokenize([texts], tmp_path / "out", log=lines.append)
    assert manifest.documents == 5
    assert "cannot be read" in lines[0]
    assert "a.txt" in lines[0]
    assert lines[-1].endswith("; 1 documents left out")


def test_file_that_goes_away(texts, tmp_path, lines):
    def late(jobs):
        (texts / "a.txt").unlink()
        yield from module.here(jobs)

    manifest = tokenize([texts], tmp_path / "out", log=lines.append, run=late)
    assert set(texts_of(tmp_path / "out")) == ALL - {b"first"}
    assert manifest.documents == 5
    assert f"cannot be read: {texts / 'a.txt'}" in lines[0]
    assert lines[-1].endswith("; 1 documents left out")


def write_tokenizer(folder, specials=("<s>", "</s>"), words=("first", "eins", "zwei", "<", ">", "s", "/")):
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {word: i for i, word in enumerate(["?", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(specials))
    if "<s>" in specials:
        begin = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", begin)])
    tokenizer.enable_truncation(2)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


@pytest.mark.parametrize("name", ["tok", "tok/tokenizer.json"])
def test_hugging_face(texts, tmp_path, lines, name):
    tokenizer = write_tokenizer(tmp_path / "tok")
    (texts / "long.txt").write_text("eins zwei first </s> eins")
    manifest = tokenize([texts], tmp_path / "out", str(tmp_path / name), log=lines.append)
    assert manifest.end_of_document == tokenizer.token_to_id("</s>") == 9
    assert (manifest.vocab_size, manifest.tokenizer) == (10, str(tmp_path / name))
    # No begin token, nothing cut off, and an end that a text spells out is not taken for one.
    expected = [[1], [2], [3], [0], [0, 0], [2, 3, 1, 0, 2]]
    assert sorted(documents_of(tmp_path / "out")) == sorted(expected)
    assert lines[0] == f"left out, not UTF-8: {texts / 'b' / 'deep' / 'three.py'}"
    assert lines[-1].endswith("; 1 documents left out")


@pytest.mark.parametrize(
    ("specials", "config", "end"),
    [
        (("</s>", "<|end_of_text|>"), None, "<|end_of_text|>"),
        (("<|endoftext|>", "</s>"), None, "<|endoftext|>"),
        (("<|eot_id|>", "<|end_of_text|>"), {"eos_token": "<|eot_id|>"}, "<|end_of_text|>"),
        (("<pad>", "<end>"), {"eos_token": "<end>"}, "<end>"),
        (("<pad>", "<end>"), {"eos_token": {"content": "<end>", "special": True}}, "<end>"),
    ],
)
def test_end_of_document(texts, tmp_path, lines, specials, config, end):
    tokenizer = write_tokenizer(tmp_path / "tok", specials)
    if config is not None:
        (tmp_path / "tok" / "tokenizer_config.json").write_text(json.dumps(config))
    manifest = tokenize([texts / "a.txt"], tmp_path / "out", str(tmp_path / "tok"), log=lines.append)
    assert manifest.end_of_document == tokenizer.token_to_id(end)


@pytest.mark.parametrize("config", [None, {"eos_token": "<none>"}, {}])
def test_no_end_of_document(texts, tmp_path, lines, config):
    write_tokenizer(tmp_path / "tok", ("<pad>",))
    if config is not None:
        (tmp_path / "tok" / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"has none of <\|end_of_text\|>.*eos_token"):
        tokenize([texts], tmp_path / "out", str(tmp_path / "tok"), log=lines.append)


def test_tokenizer_that_is_none(texts, tmp_path, lines):
    with pytest.raises(DataError, match=r"tokenizer 'nope'.*'bytes'"):
        tokenize([texts], tmp_path / "out", "nope", log=lines.append)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json cannot be read"):
        tokenize([texts], tmp_path / "out", str(tmp_path), log=lines.append)


def test_without_the_library(texts, tmp_path, lines, monkeypatch):
    write_tokenizer(tmp_path / "tok")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=re.escape("pip install 'raytrain-llama3[hf]'")):
        tokenize([texts], tmp_path / "out", str(tmp_path / "tok"), log=lines.append)


def test_sentence_piece(texts, tmp_path, lines):
    import sentencepiece

    (tmp_path / "corpus.txt").write_text("first eins zwei zweites\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus.txt"),
        model_prefix=str(tmp_path / "sp"),
        vocab_size=30,
        hard_vocab_limit=False,
        minloglevel=9,
    )
    manifest = tokenize([texts / "a.txt"], tmp_path / "out", str(tmp_path / "sp.model"), log=lines.append)
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "sp.model"))
    assert (manifest.vocab_size, manifest.end_of_document) == (model.vocab_size(), model.eos_id())
    assert documents_of(tmp_path / "out") == [model.encode("first")]


def test_llama3s_own_tokenizer(texts, tmp_path, lines):
    pairs = [bytes([i]) for i in range(256)] + [b"fi", b"rs", b"firs", b"first"]
    (tmp_path / "t.model").write_bytes(b"".join(base64.b64encode(p) + f" {i}\n".encode() for i, p in enumerate(pairs)))
    manifest = tokenize([texts / "a.txt"], tmp_path / "out", str(tmp_path / "t.model"), log=lines.append)
    assert (manifest.vocab_size, manifest.end_of_document) == (260 + 256, 261)
    assert documents_of(tmp_path / "out") == [[259]]
    assert "begins with  'first" in inspect(str(tmp_path / "out"))


def test_inspect(texts, tmp_path, lines):
    manifest = tokenize([texts], tmp_path / "out", shards=3, log=lines.append)
    told = inspect(str(tmp_path / "out"), seq_length=8, global_batch_size=2, train_samples=40)
    windows = (manifest.tokens - 1) // 8
    for part in ("bytes", "vocab_size   257", "documents    6", f"tokens       {manifest.tokens}"):
        assert part in told
    assert f"windows      {windows} at seq_length 8" in told
    assert f"an epoch     {windows / 2:.1f} steps at global_batch_size 2" in told
    assert f"epochs       {40 / windows:.2f} in 40 samples" in told
    for text in texts_of(tmp_path / "out")[:3]:
        assert f"begins with  {text.decode('utf-8', 'replace')!r}" in told
    assert manifest.fingerprint() in told


def test_inspect_of_loose_shards(tmp_path):
    pq.write_table(pa.table({"input_ids": [[1, 2], [3, 700, 4]]}), tmp_path / "x.parquet")
    told = inspect(str(tmp_path), seq_length=2)
    assert "ids          0 to 700" in told
    with pytest.raises(DataError, match=r"x\.parquet, row 1: token id 700 does not fit vocab_size 257"):
        inspect(str(tmp_path), vocab_size=257)


def test_inspect_finds_a_changed_token(texts, tmp_path, lines):
    tokenize([texts], tmp_path / "out", log=lines.append)
    path = tmp_path / "out" / "shard-00000.arrow"
    whole = path.read_bytes()
    first = np.frombuffer(b"first", dtype=np.uint8).astype(np.uint16).tobytes()
    assert whole.count(first) == 1
    path.write_bytes(whole.replace(first, first[::-1][1:] + b"\0"))
    with pytest.raises(DataError, match=r"shard-00000\.arrow does not hold the tokens that were written"):
        inspect(str(tmp_path / "out"))
    path.write_bytes(whole.replace(first, first[:-2] + b"\xff\xff"))
    with pytest.raises(DataError, match=r"shard-00000\.arrow, row \d: token id 65535 does not fit vocab_size 257"):
        inspect(str(tmp_path / "out"))


def test_inspect_finds_a_missing_shard(texts, tmp_path, lines):
    tokenize([texts], tmp_path / "out", log=lines.append)
    (tmp_path / "out" / "shard-00000.arrow").unlink()
    with pytest.raises(DataError, match=r"shard-00000\.arrow"):
        inspect(str(tmp_path / "out"))
    (tmp_path / "out" / MANIFEST_FILE).unlink()
    with pytest.raises(DataError, match="is not a dataset"):
        inspect(str(tmp_path / "out"))
