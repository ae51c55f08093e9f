"""These tests need a GPU and Transformer Engine; elsewhere they are skipped."""

from __future__ import annotations

import shutil

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shutil.which("nvidia-smi") is None:
        for item in items:
            if "tests/gpu" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
