import dataclasses
import itertools
import json
import pickle

import numpy as np
import pyarrow as pa
import pytest
from dataset import packed, random_documents, write_dataset

from raytrain_llama3.data import packed as packing
from raytrain_llama3.data.manifest import read_manifest, split_documents, write_manifest
from raytrain_llama3.errors import DataError

VOCAB = 1000


@pytest.fixture
def dataset(tmp_path):
    documents = random_documents(0, 60, VOCAB)
    write_dataset(tmp_path / "data", documents, VOCAB)
    return tmp_path / "data", documents


def expected_windows(documents, first, last, seq_length):
    stream = np.concatenate([np.array([], dtype=np.int64), *documents[first:last]])
    count = (len(stream) - 1) // seq_length
    return np.stack([stream[i * seq_length : i * seq_length + seq_length + 1] for i in range(count)])


@pytest.mark.parametrize("vocab_size", [300, 70_000])
@pytest.mark.parametrize("shard_tokens", [1, 7, 100, 10**9])
@pytest.mark.parametrize("seed", range(3))
def test_windows_are_cut_from_the_documents_one_after_another(tmp_path, vocab_size, shard_tokens, seed):
    documents = random_documents(seed, 80, vocab_size)
    write_dataset(tmp_path / "data", documents, vocab_size, shard_tokens)
    rng = np.random.default_rng(seed)
    for _ in range(12):
        first, last = sorted(rng.choice(81, 2, replace=False).tolist())
        first, last = (0, 80) if last - first < 5 else (first, last)
        seq_length = int(rng.integers(1, 60))
        expected = expected_windows(documents, first, last, seq_length)
        source = packed(tmp_path / "data", (first, last), seq_length, vocab_size)
        assert len(source) == len(expected)
        indices = rng.integers(0, len(expected), rng.integers(0, 20))
        windows = source.windows(indices)
        assert windows.dtype == np.int32
        assert windows.shape == (len(indices), seq_length + 1)
        assert np.array_equal(windows, expected[indices])
        assert np.array_equal(source.windows(np.arange(len(expected))), expected)


@pytest.mark.parametrize(("vocab_size", "id_type"), [(65_536, pa.uint16()), (65_537, pa.uint32())])
def test_ids_take_the_least_room(tmp_path, vocab_size, id_type):
    write_dataset(tmp_path / "data", [np.array([0, vocab_size - 1])], vocab_size)
    with pa.memory_map(str(tmp_path / "data/shard-00000.arrow")) as file:
        assert pa.ipc.open_file(file).schema.field("input_ids").type == pa.list_(id_type)
    windows = packed(tmp_path / "data", (0, 1), 1, vocab_size).windows(np.array([0]))
    assert windows.tolist() == [[0, vocab_size - 1]]


def test_shards_have_several_record_batches(dataset):
    folder, _ = dataset
    shards = sorted(folder.glob("*.arrow"))
    assert len(shards) > 5
    with pa.memory_map(str(shards[0])) as file:
        assert pa.ipc.open_file(file).num_record_batches > 1


def test_sliced_columns_of_another_writer(tmp_path):
    write_dataset(tmp_path / "data", [np.array([1, 2])], VOCAB)
    manifest = read_manifest(tmp_path / "data")
    path = tmp_path / "data/shard-00000.arrow"
    column = pa.array([[9], [1, 2], [], [3]], pa.list_(pa.uint16())).slice(1)
    with pa.ipc.new_file(str(path), pa.schema([("tokens", column.type)])) as file:
        file.write_batch(pa.record_batch([column], ["tokens"]))
    shard = dataclasses.replace(manifest.shards[0], documents=3, tokens=3, bytes=path.stat().st_size, units=None)
    write_manifest(tmp_path / "data", dataclasses.replace(manifest, shards=(shard,)))
    assert packed(tmp_path / "data", (0, 3), 2, VOCAB).windows(np.array([0])).tolist() == [[1, 2, 3]]
    assert packed(tmp_path / "data", (0, 2), 1, VOCAB).windows(np.array([0])).tolist() == [[1, 2]]


def test_more_shards_than_may_be_open(dataset, monkeypatch):
    folder, documents = dataset
    monkeypatch.setattr(packing, "_MAX_OPEN_SHARDS", 2)
    source = packed(folder, (0, 60), 150, VOCAB)
    expected = expected_windows(documents, 0, 60, 150)
    for i in np.random.default_rng(0).permutation(len(expected)):
        assert np.array_equal(source.windows(np.array([i]))[0], expected[i])
    assert len(source._stream._open) == 2


def test_only_what_is_needed_is_opened(tmp_path):
    documents = random_documents(0, 60, VOCAB)
    write_dataset(tmp_path / "data", documents, VOCAB)
    last = sorted((tmp_path / "data").glob("*.arrow"))[-2]
    last.unlink()
    source = packed(tmp_path / "data", (0, 60), 8, VOCAB)
    assert np.array_equal(source.windows(np.array([0]))[0], expected_windows(documents, 0, 60, 8)[0])


def test_pickles_before_and_after_use_without_its_files(dataset):
    folder, documents = dataset
    source = packed(folder, (3, 50), 8, VOCAB)
    before = pickle.dumps(source)
    indices = np.array([5, 0, 9])
    windows = source.windows(indices)
    assert pickle.dumps(source) == before
    assert np.array_equal(pickle.loads(before).windows(indices), windows)
    assert np.array_equal(windows, expected_windows(documents, 3, 50, 8)[indices])
    assert np.array_equal(source.windows(indices), windows)


def test_fingerprint_follows_what_is_read_and_not_where_it_lies(tmp_path):
    documents = random_documents(0, 60, VOCAB)
    changed = [*documents[:7], documents[7] ^ 1, *documents[8:]]
    assert len(documents[7])
    for name, content in (("one", documents), ("copy", documents), ("changed", changed)):
        write_dataset(tmp_path / name, content, VOCAB)
    prints = [
        packed(tmp_path / name, range_, seq_length, VOCAB).fingerprint()
        for name, range_, seq_length in [
            ("one", (0, 50), 8),
            ("copy", (0, 50), 8),
            ("changed", (0, 50), 8),
            ("one", (0, 51), 8),
            ("one", (1, 50), 8),
            ("one", (0, 50), 9),
        ]
    ]
    assert prints[0] == prints[1]
    assert len({str(told) for told in prints}) == 5


@pytest.mark.parametrize("index", [-1, 10**6])
def test_no_such_window(dataset, index):
    with pytest.raises(IndexError, match=str(index)):
        packed(dataset[0], (0, 60), 8, VOCAB).windows(np.array([0, index]))


def test_no_manifest(tmp_path):
    with pytest.raises(
        DataError, match=r"manifest\.json.*python -m raytrain_llama3 data tokenize --input PATH --output"
    ):
        len(packed(tmp_path / "none", (0, 1), 8, VOCAB))


@pytest.mark.parametrize(
    "change",
    [
        lambda told: told.update(format="other"),
        lambda told: told.update(version=99),
        lambda told: told.update(tokens=told["tokens"] + 1),
        lambda told: told.pop("vocab_size"),
        lambda told: told["shards"][0].update(documents="5"),
        lambda told: told["shards"][0].update(bytes=-1),
        lambda told: told.update(shards=None),
    ],
)
def test_manifest_of_something_else(dataset, change):
    path = dataset[0] / "manifest.json"
    told = json.loads(path.read_text())
    change(told)
    path.write_text(json.dumps(told))
    with pytest.raises(DataError, match=r"manifest\.json is not a raytrain-llama3-tokens manifest"):
        read_manifest(dataset[0])


@pytest.mark.parametrize("content", ["", "{", "[]", '"x"'])
def test_manifest_cut_short(dataset, content):
    (dataset[0] / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=r"manifest\.json"):
        read_manifest(dataset[0])


def read_all(folder):
    source = packed(folder, (0, 60), 8, VOCAB)
    source.windows(np.arange(len(source)))


def test_shard_missing(dataset):
    (dataset[0] / "shard-00003.arrow").unlink()
    with pytest.raises(DataError, match=r"shard-00003\.arrow cannot be read"):
        read_all(dataset[0])


def test_shard_truncated(dataset):
    path = dataset[0] / "shard-00003.arrow"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(DataError, match=rf"shard-00003\.arrow is truncated: {len(whole) - 100} bytes.*{len(whole)}"):
        read_all(dataset[0])


def test_shard_of_the_right_size_that_is_not_arrow(dataset):
    path = dataset[0] / "shard-00003.arrow"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(DataError, match=r"shard-00003\.arrow is not an Arrow IPC file"):
        read_all(dataset[0])


@pytest.mark.parametrize(
    "column", [pa.array([[1, None]], pa.list_(pa.uint16())), pa.array([[1]], pa.list_(pa.float32()))]
)
def test_shard_with_another_column(dataset, column):
    path = dataset[0] / "shard-00000.arrow"
    with pa.ipc.new_file(str(path), pa.schema([("tokens", column.type)])) as file:
        file.write_batch(pa.record_batch([column], ["tokens"]))
    first = read_manifest(dataset[0]).shards[0]
    counts = {"documents": 1, "tokens": len(column[0])}
    rewrite_shard(dataset[0], bytes=path.stat().st_size, units=None, **counts)
    source = packed(dataset[0], (0, 60 - first.documents), 1, VOCAB)
    with pytest.raises(DataError, match=r"shard-00000\.arrow.*(row 0: null among|is list<.*wanted list<uint16>)"):
        source.windows(np.array([0]))


@pytest.mark.parametrize("name", ["documents", "tokens"])
def test_shard_with_other_counts(dataset, name):
    manifest = read_manifest(dataset[0])
    wrong = getattr(manifest.shards[0], name) + 1
    rewrite_shard(dataset[0], **{name: wrong}, units=None)
    with pytest.raises(DataError, match=rf"shard-00000\.arrow holds .* the manifest says .*{wrong}"):
        read_all(dataset[0])


def rewrite_shard(folder, **changes):
    manifest = read_manifest(folder)
    shards = (dataclasses.replace(manifest.shards[0], **changes), *manifest.shards[1:])
    write_manifest(folder, dataclasses.replace(manifest, shards=shards))


@pytest.mark.parametrize("bad", [0, 17, 59])
def test_id_outside_the_vocabulary(tmp_path, bad):
    documents = [np.append(document, 5) % 500 for document in random_documents(0, 60, VOCAB)]
    documents[bad][-1] = 777
    manifest = write_dataset(tmp_path / "data", documents, VOCAB)
    row, number = bad, 0
    while row >= manifest.shards[number].documents:
        row -= manifest.shards[number].documents
        number += 1
    source = packed(tmp_path / "data", (0, 60), 1, 500)
    every = np.arange(len(source))
    with pytest.raises(DataError) as caught:
        source.windows(every)
    assert f"shard-{number:05d}.arrow, row {row}: token id 777 does not fit vocab_size 500" in str(caught.value)
    assert "set vocab_size to 1000" in str(caught.value)


def test_less_than_one_window(tmp_path):
    write_dataset(tmp_path / "data", [np.arange(5), np.arange(3)], VOCAB)
    assert len(packed(tmp_path / "data", (0, 2), 7, VOCAB)) == 1
    with pytest.raises(DataError, match=r"hold 8 tokens, and one window needs 9 .*lower seq_length"):
        len(packed(tmp_path / "data", (0, 2), 8, VOCAB))


def test_documents_that_are_not_there(dataset):
    with pytest.raises(DataError, match=r"documents 0 to 61 .* has 60"):
        len(packed(dataset[0], (0, 61), 8, VOCAB))


@pytest.mark.parametrize(
    ("documents", "split", "ranges"),
    [
        (1000, (99, 1, 0), ((0, 990), (990, 1000), (1000, 1000))),
        (1000, (0.8, 0.1, 0.1), ((0, 800), (800, 900), (900, 1000))),
        (10, (99, 1, 0), ((0, 9), (9, 10), (10, 10))),
        (3, (98, 1, 1), ((0, 1), (1, 2), (2, 3))),
        (5, (1, 0, 0), ((0, 5), (5, 5), (5, 5))),
        (5, (0, 1, 0), ((0, 0), (0, 5), (5, 5))),
    ],
)
def test_split(documents, split, ranges):
    assert split_documents(documents, split) == ranges


def test_every_split_covers_all_documents_once():
    shares = (0, 0.001, 1, 3, 97)
    for documents, split in itertools.product(range(3, 40), itertools.product(shares, repeat=3)):
        if not any(split):
            continue
        (start, a), (b, c), (d, stop) = split_documents(documents, split)
        assert (start, a, c, stop) == (0, b, d, documents)
        for share, count in zip(split, (a, c - a, stop - c), strict=True):
            assert (count > 0) == (share > 0)
            assert abs(count - documents * share / sum(split)) < 3


def test_split_of_too_few_documents():
    with pytest.raises(DataError, match=r"asks for 2 parts .* only 1 document\(s\)"):
        split_documents(1, (99, 1, 0))


@pytest.mark.parametrize("split", [(0, 0, 0), (1, -1, 0), (1, float("nan"), 0), (1, float("inf"), 0)])
def test_split_that_is_no_split(split):
    with pytest.raises(DataError, match="99,1,0"):
        split_documents(10, split)
