"""Shards behind a real S3 protocol server on loopback."""

import numpy as np
import pytest
from test_formats import LISTS, documents_of, expected, source_of, write_arrow, write_parquet

from raytrain_llama3.data.tokenize import tokenize
from raytrain_llama3.errors import DataError, DataUnavailableError


def test_arrow_and_parquet_behind_s3(tmp_path, bucket):
    documents = documents_of(1, count=60)
    folder = tmp_path / "up"
    folder.mkdir()
    write_arrow(folder / "0.arrow", documents[:30])
    write_parquet(folder / "1.parquet", documents[30:], LISTS["uint16"])
    data = bucket.upload(folder)
    wanted = expected(documents, 16, True)
    order = np.random.default_rng(0).permutation(len(wanted))
    for place in (data, bucket.uri("data/*")):
        source = source_of(place)
        source.warm(order)
        assert np.array_equal(source.windows(order), wanted[order])
    bucket.client.delete_object(Bucket="bucket", Key="data/1.parquet")
    late = source_of(data)
    assert len(late) == len(expected(documents[:30], 16, True))
    with pytest.raises(DataError, match=r"s3://bucket/data/1\.parquet cannot be read|row group"):
        read_anew(source)
    bucket.server.stop()
    with pytest.raises(DataUnavailableError, match=r"s3://bucket/data/0\.arrow.* \(tried 1 times; see data_retries\)"):
        read_anew(late)


def read_anew(source):
    source._stream = None
    source.windows(np.arange(len(source)))


def test_a_dataset_with_its_manifest(tmp_path, bucket):
    (tmp_path / "in.txt").write_text("to be or not to be, that is the question " * 40)
    manifest = tokenize([str(tmp_path / "in.txt")], tmp_path / "up", log=lambda _: None)
    source = source_of(bucket.upload(tmp_path / "up"), append="auto")
    local = source_of(tmp_path / "up", append="auto")
    every = np.arange(len(local))
    assert np.array_equal(source.windows(every), local.windows(every))
    assert source.tokens == manifest.tokens
