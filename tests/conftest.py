"""What Ray reads once, set before any test imports it; and an S3 server for tests that read shards from one."""

import os
from collections.abc import Iterator

import pytest
from buckets import Bucket, serving

# Without it `ray.init()` leaves a token in the home folder, and every later `ray start` on the machine demands it.
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """An empty bucket, and the keys to it in this process's environment."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with serving() as made:
        yield made
