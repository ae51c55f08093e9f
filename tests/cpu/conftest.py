"""One local Ray and one set of prepared workers for each module: importing torch takes a while.

They end with the module: every attempt in a process leaves gloo threads behind that wake all the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from sandbox import Sandbox
from training import Workers


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def workers(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Workers:
    return Workers(2, Path(tmp_path_factory.mktemp("logs")))


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    sandbox = Sandbox(tmp_path)
    yield sandbox
    sandbox.close()
