"""Hosts for the tests of this folder; what runs commands and reads curves is shared with tests/cpu."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))

from hosts import Network, require_namespaces


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    require_namespaces()
    network = Network(tmp_path_factory.mktemp("home"))
    yield network
    network.close()
