"""Training data: where tokens come from, and in which order they are read."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from raytrain_llama3.data.arrow import ArrowSource
from raytrain_llama3.data.manifest import MANIFEST_FILE, read_manifest, split_documents
from raytrain_llama3.data.mock import MockSource
from raytrain_llama3.data.source import TokenSource
from raytrain_llama3.errors import DataError

if TYPE_CHECKING:
    from raytrain_llama3.config.plan import RunPlan

PYTHON_STDLIB = "PYTHON_STDLIB"
"""A `data_arg` beside folders and MOCK; see `prepare`."""
_MOCK_TRAIN_WINDOWS = 1 << 31
_MOCK_VALID_WINDOWS = 1 << 20
_MOCK_VALID_STREAM = 0x76616C6964
"""Sets validation's seed apart from any seed that people choose: "valid" in ASCII."""


@dataclass(frozen=True, slots=True)
class Sources:
    """What a run trains on, and what it is evaluated on."""

    train: TokenSource
    valid: TokenSource


def dataset_folder(plan: RunPlan) -> Path:
    """Where the Arrow shards of `data_arg` are."""
    if plan.config.data_arg == PYTHON_STDLIB:
        return plan.paths.data_cache / "python_stdlib"
    return Path(plan.config.data_arg).expanduser().absolute()


def prepare(plan: RunPlan, log: Callable[[str], None]) -> None:
    """Before any rank starts: make what can be made here, and raise `DataError` for data that cannot be trained on.

    PYTHON_STDLIB is the Python library's own source, tokenized to bytes on first use: real text on every machine.
    """
    if plan.config.data_arg == PYTHON_STDLIB and not (dataset_folder(plan) / MANIFEST_FILE).is_file():
        from raytrain_llama3.data.tokenize import tokenize

        library = Path(sysconfig.get_path("stdlib"))
        tokenize([library], dataset_folder(plan), suffixes=frozenset({".py"}), log=log)
    sources = open_sources(plan)
    # Too few tokens for one window is said here, not by every rank.
    for source in (sources.train, sources.valid):
        len(source)


def open_sources(plan: RunPlan) -> Sources:
    """The sources of a run: made-up tokens, or the training and validation parts of the dataset in `data_arg`.

    A run without evaluations needs no validation part; `valid` is then the training part. Raises `DataError` when
    the folder is no dataset, or a part that the run needs is empty.
    """
    c = plan.config
    if plan.mock_data:
        return Sources(
            MockSource(c.seed, c.vocab_size, c.seq_length, _MOCK_TRAIN_WINDOWS),
            MockSource(c.seed ^ _MOCK_VALID_STREAM, c.vocab_size, c.seq_length, _MOCK_VALID_WINDOWS),
        )
    folder = dataset_folder(plan)
    train, valid, _ = split_documents(read_manifest(folder), c.split)
    if train[0] == train[1]:
        raise DataError(f"split {c.split} leaves no documents of {folder} to train on: raise its first number above 0")
    if valid[0] == valid[1]:
        if c.eval_interval > 0:
            raise DataError(
                f"split {c.split} leaves no documents of {folder} to evaluate on, and eval_interval is "
                f"{c.eval_interval}: make the second number of split more than 0, or set eval_interval to 0"
            )
        valid = train
    return Sources(
        ArrowSource(folder, train, c.seq_length, c.vocab_size), ArrowSource(folder, valid, c.seq_length, c.vocab_size)
    )
