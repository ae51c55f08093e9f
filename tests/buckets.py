"""A real S3 protocol server on loopback."""

import contextlib
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moto.server import ThreadedMotoServer


@dataclass(frozen=True, slots=True)
class Bucket:
    """The bucket called `bucket`, its server and a client of it."""

    server: "ThreadedMotoServer"
    client: Any
    address: str

    def upload(self, folder: Path) -> str:
        """Put a folder's files below `data/`; returns the URI of that."""
        for path in folder.rglob("*"):
            self.client.upload_file(str(path), "bucket", f"data/{path.relative_to(folder)}")
        return self.uri("data")

    def uri(self, key: str) -> str:
        """What names it to `pyarrow.fs`."""
        return f"s3://bucket/{key}?endpoint_override={self.address}&scheme=http&region=us-east-1"


@contextlib.contextmanager
def serving() -> Iterator[Bucket]:
    """A server with one empty bucket; the keys are the environment's."""
    # Both take a while, and most tests need neither.
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        address = "{}:{}".format(*server.get_host_and_port())
        # The servers of one process share their buckets, also with one that has ended.
        urllib.request.urlopen(f"http://{address}/moto-api/reset", data=b"", timeout=10).close()
        client = boto3.client("s3", endpoint_url=f"http://{address}", region_name="us-east-1")
        client.create_bucket(Bucket="bucket")
        yield Bucket(server, client, address)
    finally:
        server.stop()
