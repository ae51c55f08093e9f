"""Training data: where tokens come from, and in which order they are read."""

from __future__ import annotations

from raytrain_llama3.data.sources import PYTHON_STDLIB, Sources, open_sources, prepare

__all__ = ["PYTHON_STDLIB", "Sources", "open_sources", "prepare"]
