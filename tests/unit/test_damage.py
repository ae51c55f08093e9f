"""Damaged data never becomes a batch: a message with file and row, or the very windows that were written.

RAYTRAIN_FUZZ is how many damages are tried of each kind and form: 60 unless it is set, as each of a Parquet file costs
a process (a tenth of a second). They are the same ones every time. Change how shards are read, and run it with 1500.
"""

import json
import os
import shutil

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_formats import END, VOCAB, documents_of, expected, source_of, write_arrow, write_indexed, write_parquet

from raytrain_llama3.data.apart import read_apart
from raytrain_llama3.data.catalog import open_dataset
from raytrain_llama3.data.packed import PackedSource
from raytrain_llama3.data.state import changes, check_unchanged
from raytrain_llama3.data.tokenize import tokenize
from raytrain_llama3.errors import DataChangedError, DataError, DataUnavailableError

DOCUMENTS = documents_of(9, count=60)
FORMS = ("arrow", "stream", "parquet", "indexed")
fuzz = settings(
    max_examples=int(os.environ.get("RAYTRAIN_FUZZ", "60")),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def write(folder, form, documents=DOCUMENTS):
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(3):
        part = documents[number * 20 : number * 20 + 20]
        if form == "parquet":
            write_parquet(folder / f"{number}.parquet", part)
        elif form == "indexed":
            write_indexed(folder / f"{number}", part)
        else:
            write_arrow(folder / f"{number}.arrow", part, stream=form == "stream")
    return folder


def read_all(place):
    source = source_of(place)
    return source.windows(np.arange(len(source)))


@pytest.fixture(scope="module", params=FORMS)
def whole(request, tmp_path_factory):
    return write(tmp_path_factory.mktemp("whole") / "data", request.param)


@fuzz
@given(shard=st.integers(0, 10), cut=st.floats(0, 1))
def test_a_file_cut_short(whole, tmp_path_factory, shard, cut):
    """Wherever it is cut: found out when the data is opened or read, with the file's name."""
    folder = tmp_path_factory.mktemp("cut") / "data"
    shutil.copytree(whole, folder)
    files = sorted(folder.iterdir())
    file = files[shard % len(files)]
    content = file.read_bytes()
    kept = min(int(len(content) * cut), len(content) - 1)
    file.write_bytes(content[:kept])
    try:
        found = read_all(folder)
    except DataError as error:
        assert file.stem in str(error)  # noqa: PT017  (whether it is raised depends on where it is cut)
    else:
        # A stream may end after any batch: then there are fewer documents, and each is whole.
        stream = [t for d in DOCUMENTS for t in (*d, END)]
        assert len(found) <= len(stream) // 16
        assert file.suffix == ".arrow" or np.array_equal(found, expected(DOCUMENTS, 16, True))


@fuzz
@given(shard=st.integers(0, 10), at=st.floats(0, 1), byte=st.integers(1, 255))
def test_a_byte_changed(whole, tmp_path_factory, shard, at, byte):
    """No crash, no window with an id that the vocabulary does not hold."""
    folder = tmp_path_factory.mktemp("changed") / "data"
    shutil.copytree(whole, folder)
    change(folder, shard, at, byte)
    try:
        found = read_all(folder)
    except DataError:
        return
    assert found.min() >= 0
    assert found.max() < VOCAB


def change(folder, shard, at, byte):
    files = sorted(folder.iterdir())
    file = files[shard % len(files)]
    content = bytearray(file.read_bytes())
    content[int(at * (len(content) - 1))] ^= byte
    file.write_bytes(content)


@fuzz
@given(shard=st.integers(0, 10), at=st.floats(0, 1), byte=st.integers(1, 255))
def test_a_byte_changed_after_it_was_counted(whole, tmp_path_factory, shard, at, byte):
    """The same where the run has begun, and each process opens shards for itself: none may die of it."""
    folder = tmp_path_factory.mktemp("later") / "data"
    shutil.copytree(whole, folder)
    source = source_of(folder)
    change(folder, shard, at, byte)
    try:
        found = source.windows(np.arange(len(expected(DOCUMENTS, 16, True))))
    except DataError:
        return
    assert found.min() >= 0
    assert found.max() < VOCAB


# Over both pyarrow calls abort(): a column's chunks are of a type that there is not, or have a level too few.
@pytest.mark.parametrize(
    ("was", "becomes"),
    [(b"\x15\x02\x19", b"\x15\x7e\x19"), (b"\x25\x02\x18\x07element", b"\x25\x00\x18\x07element")],
)
def test_a_footer_that_would_end_the_process(tmp_path, was, becomes):
    folder = write(tmp_path / "data", "parquet")
    source = source_of(folder)
    file = folder / "1.parquet"
    assert was in file.read_bytes()
    file.write_bytes(file.read_bytes().replace(was, becomes))
    with pytest.raises(DataError, match=r"shard .*1\.parquet"):
        read_all(folder)
    with pytest.raises(DataError, match=r"shard .*1\.parquet, row group 0"):
        source.windows(np.arange(len(source)))
    if b"element" in was:
        with pytest.raises(DataError, match=r"1\.parquet"):
            tokenize([str(folder)], tmp_path / "out", column="input_ids", log=print)


def look(file):
    if file == "dies":
        os.abort()
    if file == "raises":
        raise DataError("raised")
    return file.upper() if file != "none" else OSError("returned")


def test_what_kills_a_process_is_named():
    assert read_apart(look, [], str) == []
    first, second = read_apart(look, ["a", "none"], str)
    assert first == "A"
    assert isinstance(second, OSError)
    with pytest.raises(DataError, match=r"^raised$"):
        read_apart(look, ["a", "raises", "dies"], str)
    with pytest.raises(DataError, match=r"^file dies is damaged: a process that looked at it died"):
        read_apart(look, ["a", "dies", "raises"], lambda file: f"file {file}")


def test_counts_that_cannot_be_are_found_when_a_shard_is_counted(tmp_path):
    folder = write(tmp_path / "data", "arrow")
    file = folder / "1.arrow"
    ends = np.cumsum([0, *map(len, DOCUMENTS[20:23])], dtype=np.int32)
    wrong = ends.copy()
    wrong[-1] = -5
    assert file.read_bytes().count(ends.tobytes()) == 1
    file.write_bytes(file.read_bytes().replace(ends.tobytes(), wrong.tobytes()))
    with pytest.raises(DataError, match=r"1\.arrow, record batch 0: damaged"):
        open_dataset([str(folder)], None, 0)


@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_a_columns_name_that_is_no_text(tmp_path, form):
    folder = write(tmp_path / "data", form)
    file = folder / f"1.{form}"
    file.write_bytes(file.read_bytes().replace(b"other", b"oth\xe9r"))
    with pytest.raises(DataError, match=rf"1\.{form} is damaged \(the name of a column is not UTF-8"):
        read_all(folder)


BAD_COLUMNS = [
    (pa.array(["a"] * 20), r"1\.{form}: column 'input_ids' is string, wanted list"),
    (pa.array([1] * 20), r"1\.{form}: column 'input_ids' is int64, wanted list"),
    (pa.array([[0.5]] * 20), r"1\.{form}: column 'input_ids' is list<.*double"),
    (pa.array([[1]] * 7 + [None] + [[1]] * 12), r"1\.{form}, row 7: null instead of a list"),
    (pa.array([[1, 2]] * 11 + [[3, None]] + [[1, 2]] * 8), r"1\.{form}, row 11: null among the token ids"),
    (pa.array([[1, 2, 3]] * 5 + [[3, 5000]] + [[1, 2]] * 14), r"1\.{form}, row 5: token id 5000 does not fit"),
]


@pytest.mark.parametrize(("column", "message"), BAD_COLUMNS)
@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_a_column_that_will_not_do(tmp_path, form, column, message):
    folder = write(tmp_path / "data", form)
    (write_arrow if form == "arrow" else write_parquet)(folder / f"1.{form}", column.to_pylist(), column.type)
    with pytest.raises(DataError, match=message.replace("{form}", form)):
        read_all(folder)


def test_an_empty_shard_among_others_is_no_harm(tmp_path):
    for form in ("arrow", "parquet"):
        folder = write(tmp_path / form, form, DOCUMENTS[:40])
        assert np.array_equal(read_all(folder), expected(DOCUMENTS[:40], 16, True))


@pytest.mark.parametrize("form", ["arrow", "parquet", "indexed"])
def test_nothing_but_empty_shards(tmp_path, form):
    folder = write(tmp_path / "data", form, [])
    with pytest.raises(DataError, match=r"its 3 shard\(s\) hold no document at all"):
        read_all(folder)


def test_zero_shards_and_zero_bytes(tmp_path):
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match=r"none is not a dataset: it holds no manifest\.json and no \.arrow"):
        read_all(tmp_path / "none")
    with pytest.raises(DataError, match="nowhere is not a dataset"):
        read_all(tmp_path / "nowhere")
    for name in ("x.arrow", "x.parquet", "x.idx"):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(DataError, match=name):
            read_all(tmp_path / name)


def test_a_bin_without_its_idx_and_the_other_way(tmp_path):
    folder = write(tmp_path / "data", "indexed")
    (folder / "1.bin").unlink()
    with pytest.raises(DataError, match=r"1\.bin cannot be read"):
        read_all(folder)


def test_a_shard_that_vanishes_while_a_run_reads(tmp_path):
    folder = write(tmp_path / "data", "parquet")
    source = source_of(folder)
    (folder / "2.parquet").unlink()
    source.windows(np.array([0]))
    with pytest.raises(DataError, match=r"2\.parquet cannot be read"):
        source.windows(np.arange(len(source)))


def fingerprint(place, **changed):
    source = source_of(place)
    return {"seed": 1, "shuffle": True, "order": 2, "weights": ["1"], "sources": [source.fingerprint()]} | changed


def test_what_changed_between_runs_is_said(tmp_path):
    folder = write(tmp_path / "data", "parquet")
    saved = json.loads(json.dumps(fingerprint(folder)))
    assert check_unchanged(saved, fingerprint(folder), 5, accept=False) == []
    shutil.copytree(folder, tmp_path / "elsewhere")
    assert changes(saved, fingerprint(tmp_path / "elsewhere")) == []
    assert check_unchanged(None, fingerprint(folder), 5, accept=False) == []
    (folder / "2.parquet").unlink()
    write_parquet(folder / "1.parquet", DOCUMENTS[:19])
    write_parquet(folder / "3.parquet", DOCUMENTS[:2])
    with pytest.raises(DataChangedError) as caught:
        check_unchanged(saved, fingerprint(folder, seed=7), 5, accept=False)
    told = str(caught.value)
    assert caught.value.exit_code == 3
    for part in ("step 5", "seed was 1, is 7", "shard 2.parquet is gone", "shard 3.parquet is new", "--data-changed"):
        assert part in told
    assert "shard 1.parquet had 20 documents" in told
    assert len(check_unchanged(saved, fingerprint(folder, seed=7), 5, accept=True)) > 3
    mock = {**saved, "sources": [{"kind": "mock-1"}]}
    assert changes(mock, saved) == ["kind of data was mock-1, is packed-2"]


class Flaky:
    """A filesystem's function that fails a number of times."""

    def __init__(self, failures, error):
        self.left, self.error, self.calls = failures, error, 0

    def __call__(self):
        self.calls += 1
        if self.left:
            self.left -= 1
            raise self.error
        return "read"


def test_transient_errors_are_retried_with_limits(monkeypatch):
    from raytrain_llama3.data import filesystem

    monkeypatch.setattr(filesystem, "_FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(filesystem, "_LONGEST_WAIT_S", 0.001)
    place = filesystem.Place("s3://bucket/x", retries=3)
    flaky = Flaky(3, OSError("connection reset"))
    assert place.reading("shard x, row group 2", flaky) == "read"
    assert flaky.calls == 4
    with pytest.raises(DataUnavailableError, match=r"shard x, row group 2 cannot be read: connection reset \(tried 4"):
        place.reading("shard x, row group 2", Flaky(4, OSError("connection reset")))
    gone = Flaky(1, FileNotFoundError("gone"))
    with pytest.raises(FileNotFoundError):
        place.reading("shard x", gone)
    assert gone.calls == 1


def test_a_dataset_made_again_with_fewer_documents(tmp_path):
    folder = write(tmp_path / "data", "arrow")
    dataset = open_dataset([str(folder)], None, 0)
    with pytest.raises(DataError, match=r"documents 0 to 61 were asked for.* has 60"):
        len(PackedSource(dataset, (0, 61), 8, VOCAB))
