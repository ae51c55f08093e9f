"""Shards behind a real S3 protocol server on loopback."""

import boto3
import numpy as np
import pytest
from moto.server import ThreadedMotoServer
from test_formats import LISTS, documents_of, expected, source_of, write_arrow, write_parquet

from raytrain_llama3.data.tokenize import tokenize
from raytrain_llama3.errors import DataError, DataUnavailableError

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}


@pytest.fixture
def server(monkeypatch):
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield server
    server.stop()


def upload(server, folder):
    host, port = server.get_host_and_port()
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1")
    client.create_bucket(Bucket="bucket")
    for path in folder.rglob("*"):
        client.upload_file(str(path), "bucket", f"data/{path.relative_to(folder)}")
    return client, f"?endpoint_override={host}:{port}&scheme=http&region=us-east-1&allow_bucket_creation=false"


def test_arrow_and_parquet_behind_s3(tmp_path, server):
    documents = documents_of(1, count=60)
    folder = tmp_path / "up"
    folder.mkdir()
    write_arrow(folder / "0.arrow", documents[:30])
    write_parquet(folder / "1.parquet", documents[30:], LISTS["uint16"])
    client, query = upload(server, folder)
    wanted = expected(documents, 16, True)
    order = np.random.default_rng(0).permutation(len(wanted))
    for place in ("s3://bucket/data", "s3://bucket/data/*"):
        source = source_of(place + query)
        source.warm(order)
        assert np.array_equal(source.windows(order), wanted[order])
    client.delete_object(Bucket="bucket", Key="data/1.parquet")
    late = source_of(f"s3://bucket/data{query}")
    assert len(late) == len(expected(documents[:30], 16, True))
    with pytest.raises(DataError, match=r"s3://bucket/data/1\.parquet cannot be read|row group"):
        read_anew(source)
    server.stop()
    with pytest.raises(DataUnavailableError, match=r"s3://bucket/data/0\.arrow.* \(tried 1 times; see data_retries\)"):
        read_anew(late)


def read_anew(source):
    source._stream = None
    source.windows(np.arange(len(source)))


def test_a_dataset_with_its_manifest(tmp_path, server):
    (tmp_path / "in.txt").write_text("to be or not to be, that is the question " * 40)
    manifest = tokenize([str(tmp_path / "in.txt")], tmp_path / "up", log=lambda _: None)
    _, query = upload(server, tmp_path / "up")
    source = source_of(f"s3://bucket/data{query}", append="auto")
    local = source_of(tmp_path / "up", append="auto")
    every = np.arange(len(local))
    assert np.array_equal(source.windows(every), local.windows(every))
    assert source.tokens == manifest.tokens
