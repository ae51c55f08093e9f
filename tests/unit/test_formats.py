"""Every form in which token ids come gives the same windows, packed across the borders of shards."""

import pickle
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raytrain_llama3.data import packed as packing
from raytrain_llama3.data.catalog import open_dataset, with_ends
from raytrain_llama3.data.packed import PackedSource
from raytrain_llama3.errors import DataError

VOCAB, END = 1000, 999
LISTS = {
    "int32": pa.list_(pa.int32()),
    "uint16": pa.list_(pa.uint16()),
    "int64": pa.list_(pa.int64()),
    "large": pa.large_list(pa.int32()),
    "large_uint32": pa.large_list(pa.uint32()),
}


def write_arrow(path, documents, type_=LISTS["int32"], rows=3, column="input_ids", stream=False):
    schema = pa.schema([("other", pa.string()), (column, type_)])
    opener = pa.ipc.new_stream if stream else pa.ipc.new_file
    with opener(str(path), schema) as file:
        for first in range(0, len(documents), rows):
            part = documents[first : first + rows]
            file.write_batch(pa.record_batch([["x"] * len(part), pa.array(part, type_)], schema=schema))


def write_parquet(path, documents, type_=LISTS["int32"], rows=3, column="input_ids", **options):
    table = pa.table({"other": ["x"] * len(documents), column: pa.array(documents, type_)})
    pq.write_table(table, path, row_group_size=rows, **options)


def write_indexed(prefix, documents):
    """As Megatron's preprocess_data.py writes it."""
    lengths = np.array([len(d) for d in documents], dtype=np.int32)
    pointers = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)[:-1]]) * 4 if len(documents) else np.zeros(0)
    with prefix.with_name(prefix.name + ".idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, len(documents), len(documents) + 1))
        file.write(lengths.tobytes() + pointers.astype(np.int64).tobytes())
        file.write(np.arange(len(documents) + 1, dtype=np.int64).tobytes())
    ids = np.concatenate([np.zeros(0), *documents]).astype(np.int32)
    prefix.with_name(prefix.name + ".bin").write_bytes(ids.tobytes())


def documents_of(seed, count=40, longest=30):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, END, rng.integers(0, longest + 1)).tolist() for _ in range(count)]


def expected(documents, seq_length, append):
    stream = np.array([t for d in documents for t in ([*d, END] if append else d)], dtype=np.int64)
    count = max(len(stream) - 1, 0) // seq_length
    return np.stack([stream[i * seq_length : i * seq_length + seq_length + 1] for i in range(count)])


def source_of(place, seq_length=16, append=True, part=None, **options):
    dataset = with_ends(open_dataset([str(place)], None, retries=0, **options), append, END)
    return PackedSource(dataset, part or (0, dataset.documents), seq_length, VOCAB)


def write_three(folder, documents, form, type_):
    folder.mkdir()
    for number, first in enumerate(range(0, len(documents), 14)):
        part = documents[first : first + 14]
        if form == "indexed":
            write_indexed(folder / f"{number}", part)
        elif form == "parquet":
            write_parquet(folder / f"{number}.parquet", part, type_)
        elif form == "parquet_without_statistics":
            write_parquet(folder / f"{number}.parquet", part, type_, write_statistics=False)
        else:
            write_arrow(folder / f"{number}.arrow", part, type_, stream=form == "stream")


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize(
    ("form", "type_"),
    [
        *(("arrow", name) for name in LISTS),
        ("stream", "int32"),
        ("parquet", "int32"),
        ("parquet", "uint16"),
        ("parquet", "large"),
        ("parquet_without_statistics", "int64"),
        ("indexed", "int32"),
    ],
)
def test_every_form_gives_the_same_windows(tmp_path, form, type_, append):
    documents = documents_of(1)
    write_three(tmp_path / "data", documents, form, LISTS[type_])
    source = source_of(tmp_path / "data", append=append)
    wanted = expected(documents, 16, append)
    assert len(source) == len(wanted)
    order = np.random.default_rng(0).permutation(len(wanted))
    source.warm(order)
    assert np.array_equal(source.windows(order), wanted[order])
    again = pickle.loads(pickle.dumps(source))
    assert np.array_equal(again.windows(order[:3]), wanted[order[:3]])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(0, 25), min_size=1, max_size=25),
    shards=st.integers(1, 5),
    rows=st.integers(1, 4),
    seq_length=st.integers(1, 40),
    append=st.booleans(),
    part=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    parquet=st.booleans(),
)
def test_packing(tmp_path_factory, lengths, shards, rows, seq_length, append, part, parquet):
    """Any documents, cut into any shards and record batches, any part of them: one stream, cut into windows."""
    folder = tmp_path_factory.mktemp("packing")
    rng = np.random.default_rng(len(lengths))
    documents = [rng.integers(0, END, n).tolist() for n in lengths]
    cuts = sorted(rng.integers(0, len(documents) + 1, shards - 1).tolist())
    for number, (a, b) in enumerate(zip([0, *cuts], [*cuts, len(documents)], strict=True)):
        write = write_parquet if parquet else write_arrow
        write(folder / f"{number:02d}.{'parquet' if parquet else 'arrow'}", documents[a:b], rows=rows)
    first, last = sorted(round(x * len(documents)) for x in part)
    stream = [t for d in documents[first:last] for t in ([*d, END] if append else d)]
    if len(stream) <= seq_length:
        with pytest.raises(DataError, match="one window needs"):
            len(source_of(folder, seq_length, append, (first, last)))
        return
    wanted = expected(documents[first:last], seq_length, append)
    found = source_of(folder, seq_length, append, (first, last)).windows(np.arange(len(wanted)))
    assert np.array_equal(found, wanted)


def test_patterns_files_prefixes_and_several_places(tmp_path):
    documents = documents_of(2)
    write_three(tmp_path / "a", documents, "arrow", LISTS["int32"])
    wanted = expected(documents, 16, True)
    every = np.arange(len(wanted))
    assert np.array_equal(source_of(tmp_path / "a" / "*.arrow").windows(every), wanted)
    assert np.array_equal(source_of(f"file://{tmp_path}/a").windows(every), wanted)
    assert np.array_equal(source_of(f"file://{tmp_path}/a/*.arrow").windows(every), wanted)
    one = source_of(tmp_path / "a" / "1.arrow")
    assert np.array_equal(one.windows(np.arange(len(one))), expected(documents[14:28], 16, True))
    write_indexed(tmp_path / "prefix", documents)
    assert np.array_equal(source_of(tmp_path / "prefix").windows(every), wanted)
    dataset = open_dataset([str(tmp_path / "a" / f"{i}.arrow") for i in (2, 0)], None, 0)
    both = PackedSource(with_ends(dataset, True, END), (0, dataset.documents), 16, VOCAB)
    assert np.array_equal(both.windows(np.array([0])), expected(documents[28:], 16, True)[:1])


def test_the_end_is_added_only_where_documents_do_not_end_with_it(tmp_path):
    documents = documents_of(3)
    write_arrow(tmp_path / "with.arrow", [[*d, END] for d in documents])
    write_arrow(tmp_path / "without.arrow", documents)
    wanted = expected(documents, 16, True)
    for name in ("with", "without"):
        source = source_of(tmp_path / f"{name}.arrow", append="auto")
        assert np.array_equal(source.windows(np.arange(len(wanted))), wanted)
    with pytest.raises(DataError, match="give it with eod_token"):
        with_ends(open_dataset([str(tmp_path / "with.arrow")], None, 0), True, None)


def test_another_column(tmp_path):
    documents = documents_of(4)
    write_parquet(tmp_path / "x.parquet", documents, column="text_ids")
    with pytest.raises(DataError, match=r"x\.parquet has no column input_ids or tokens, but other, text_ids"):
        open_dataset([str(tmp_path)], None, 0)
    dataset = open_dataset([str(tmp_path)], "text_ids", 0)
    source = PackedSource(with_ends(dataset, True, END), (0, dataset.documents), 16, VOCAB)
    assert np.array_equal(source.windows(np.array([3]))[0], expected(documents, 16, True)[3])


def test_few_units_are_kept_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "_CACHE_BYTES", 1000)
    documents = documents_of(5, count=120)
    write_three(tmp_path / "data", documents, "parquet", LISTS["int32"])
    source = source_of(tmp_path / "data")
    wanted = expected(documents, 16, True)
    every = np.random.default_rng(0).permutation(len(wanted))
    found = [source.windows(every[i : i + 7]) for i in range(0, len(every), 7)]
    assert np.array_equal(np.concatenate(found), wanted[every])
    assert sum(f.result().ids.nbytes for f in source._stream._units._units.values()) <= 1000


def test_counts_are_kept_until_a_shard_is_written_again(tmp_path):
    documents = documents_of(6)
    write_three(tmp_path / "data", documents, "arrow", LISTS["int32"])
    cache = tmp_path / "cache"
    first = open_dataset([str(tmp_path / "data")], None, 0, cache)
    (file,) = cache.iterdir()
    told = file.read_text()
    assert open_dataset([str(tmp_path / "data")], None, 0, cache) == first
    assert file.read_text() == told
    write_arrow(tmp_path / "data" / "0.arrow", documents[:5])
    assert open_dataset([str(tmp_path / "data")], None, 0, cache).documents == len(documents) - 9
    file.write_text("{")
    assert open_dataset([str(tmp_path / "data")], None, 0, cache).documents == len(documents) - 9


@pytest.mark.parametrize("number", [-1, VOCAB, 2**40])
@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_ids_outside_the_vocabulary(tmp_path, form, number):
    documents = [[1, 2, 3]] * 8
    documents[5] = [1, number, 3]
    write = write_arrow if form == "arrow" else write_parquet
    write(tmp_path / f"x.{form}", documents, LISTS["int64"])
    source = source_of(tmp_path / f"x.{form}", 4)
    with pytest.raises(DataError, match=rf"x\.{form}, row 5: token id {number} does not fit vocab_size 1000"):
        source.windows(np.arange(len(source)))
