"""From the options of a run to its samples."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytrain_llama3.data.mock import MockSource
from raytrain_llama3.data.samples import Samples
from raytrain_llama3.errors import DataError

if TYPE_CHECKING:
    from raytrain_llama3.config.plan import RunPlan
    from raytrain_llama3.data.catalog import Dataset
    from raytrain_llama3.data.manifest import Documents

PYTHON_STDLIB = "PYTHON_STDLIB"
"""A `data_arg` beside places and MOCK; see `prepare`."""
_MOCK_TRAIN_WINDOWS = 1 << 31
_MOCK_VALID_WINDOWS = 1 << 20
_MOCK_VALID_STREAM = 0x76616C6964
"""Sets validation's seed apart from any seed that people choose: "valid" in ASCII."""


@dataclass(frozen=True, slots=True)
class Sources:
    """What a run trains on, and what it is evaluated on. Can be sent to another process."""

    train: Samples
    valid: Samples
    end_of_document: int | None = None
    """The id between documents, where it is known and the same in all of a blend."""

    def fingerprint(self) -> dict[str, Any]:
        """What must not change for a resumed run to go on with the samples that it has not seen."""
        return self.train.fingerprint()


def prepare(plan: RunPlan, log: Callable[[str], None]) -> Sources:
    """Before any rank starts: make what can be made here, and open what the run reads.

    PYTHON_STDLIB is the Python library's own source, tokenized to bytes on first use: real text on every machine.
    Raises `DataError` for data that cannot be trained on.
    """
    if plan.config.data_arg == PYTHON_STDLIB and not (_stdlib_folder(plan) / "manifest.json").is_file():
        from raytrain_llama3.data.tokenize import tokenize

        library = Path(sysconfig.get_path("stdlib"))
        tokenize([str(library)], _stdlib_folder(plan), suffixes=(".py",), log=log)
    sources = open_sources(plan, log)
    if plan.config.reset_attention_mask and sources.end_of_document is None:
        raise DataError("reset_attention_mask: no end-of-document id is known for this data; give it with eod_token")
    # Too few tokens for one window is said here, not by every feeder.
    for samples in (sources.train, sources.valid):
        _ = samples.windows
    return sources


def open_sources(plan: RunPlan, log: Callable[[str], None] = lambda _: None) -> Sources:
    """The samples of a run: made-up tokens, or the training and validation parts of what `data_arg` names.

    A run without evaluations needs no validation part; `valid` is then the training part. Raises `DataError` when
    the data is none, or a part that the run needs is empty.
    """
    c = plan.config
    if plan.mock_data:
        train = MockSource(c.seed, c.vocab_size, c.seq_length, _MOCK_TRAIN_WINDOWS)
        valid = MockSource(c.seed ^ _MOCK_VALID_STREAM, c.vocab_size, c.seq_length, _MOCK_VALID_WINDOWS)
        return Sources(Samples([train], ["1"], c.seed), Samples([valid], ["1"], c.seed))
    from raytrain_llama3.data.packed import PackedSource

    weights, places = parse_blend(str(_stdlib_folder(plan)) if c.data_arg == PYTHON_STDLIB else c.data_arg)
    datasets = _datasets(plan, places, log)
    parts = [_parts(plan, dataset) for dataset in datasets]
    ends = {dataset.end_of_document for dataset in datasets}

    def samples(part: int) -> Samples:
        sources = [PackedSource(d, ranges[part], c.seq_length, c.vocab_size) for d, ranges in parts]
        return Samples(sources, weights, c.seed, shuffle=c.shuffle)

    return Sources(samples(0), samples(1), ends.pop() if len(ends) == 1 else None)


def parse_blend(data_arg: str) -> tuple[list[str], list[list[str]]]:
    """Weights and places of `0.7 a 0.3 b`; without weights several places are one dataset.

    Raises `DataError` where weights and places do not alternate.
    """
    items = data_arg.split()
    if len(items) < 2 or Path(data_arg).exists():
        return ["1"], [[data_arg.strip()]]
    if not any(map(_is_number, items)):
        return ["1"], [items]
    weights, places = items[0::2], items[1::2]
    if len(items) % 2 or not all(map(_is_number, weights)) or any(map(_is_number, places)):
        raise DataError(f"data_arg {data_arg!r}: a blend is WEIGHT PLACE WEIGHT PLACE …, such as '0.7 a 0.3 b'")
    return weights, [[place] for place in places]


def _datasets(plan: RunPlan, places: list[list[str]], log: Callable[[str], None]) -> list[Dataset]:
    from raytrain_llama3.data.catalog import open_dataset, with_ends

    c = plan.config
    found = [open_dataset(uris, c.data_column, c.data_retries, plan.paths.data_cache, log) for uris in places]
    return [with_ends(d, c.append_eod, _end_of_document(plan, d)) for d in found]


def _end_of_document(plan: RunPlan, dataset: Dataset) -> int | None:
    """The id as given, or as the manifest or the tokenizer says; None where nobody does."""
    c = plan.config
    if c.eod_token is not None or dataset.end_of_document is not None:
        return c.eod_token
    from raytrain_llama3.data.encoders import open_encoder

    try:
        return open_encoder(c.tokenizer_arg).end_of_document
    except DataError:
        return None


def _parts(plan: RunPlan, dataset: Dataset) -> tuple[Dataset, tuple[Documents, Documents]]:
    """The dataset and its documents for training and for validation."""
    from raytrain_llama3.data.manifest import split_documents

    c = plan.config
    train, valid, _ = split_documents(dataset.documents, c.split)
    if train[0] == train[1]:
        raise DataError(
            f"split {c.split} leaves no documents of {dataset.name} to train on: raise its first number above 0"
        )
    if valid[0] == valid[1]:
        if c.eval_interval > 0:
            raise DataError(
                f"split {c.split} leaves no documents of {dataset.name} to evaluate on, and eval_interval is "
                f"{c.eval_interval}: make the second number of split more than 0, or set eval_interval to 0"
            )
        valid = train
    return dataset, (train, valid)


def _stdlib_folder(plan: RunPlan) -> Path:
    return plan.paths.data_cache / "python_stdlib"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
