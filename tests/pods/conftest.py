"""Hosts for the tests of this folder; what runs commands and reads curves is shared with tests/cpu."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))

from hosts import Network, require_namespaces


@pytest.fixture(scope="session", autouse=True)
def _hosts_go_also_when_the_tests_are_ended() -> Iterator[None]:
    """A SIGTERM (a time limit of whoever started the tests) unwinds the fixtures: no namespace or process stays."""
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.exit("ended by SIGTERM", returncode=143))
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    require_namespaces()
    network = Network(tmp_path_factory.mktemp("home"))
    try:
        yield network
    finally:
        network.close()
