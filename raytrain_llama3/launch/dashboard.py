"""The Ray dashboard of a Ray of our own, started once the ranks are at work."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def put_off() -> Iterator[None]:
    """Inside, `ray.init` starts no API server: it would wait seconds for it before anything else may start."""
    from ray._private.node import Node

    def start_api_server(node: Any, **_options: object) -> None:
        node._webui_url = ""

    with mock.patch.object(Node, "start_api_server", start_api_server):
        yield


class Dashboard:
    """Starts Ray's own API server in a thread, and knows its address when it serves."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._url = ""
        self._told = False

    @property
    def url(self) -> str:
        """host:port, or empty as long as it does not serve."""
        return self._url

    def open(self) -> None:
        """Start it, once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._start, name="dashboard", daemon=True)
            self._thread.start()

    def news(self) -> str:
        """Its address, the first time that it is asked for once it serves; empty otherwise."""
        if self._told or not self._url:
            return ""
        self._told = True
        return self._url

    def _start(self) -> None:
        from ray._private.worker import _global_node

        # Nothing that happens here may end a run: the session can close meanwhile, and training needs no dashboard.
        with contextlib.suppress(Exception):
            node: Any = _global_node
            node.start_api_server(include_dashboard=True, raise_on_failure=False)
            self._url = node.webui_url or ""
        # Ray has its processes die with the thread that started them, so this one lives as long as the run.
        threading.Event().wait()
