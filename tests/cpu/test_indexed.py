"""Megatron's own format, read and written beside Megatron's own code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets import gpt_dataset
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split

from raytrain_llama3.data.catalog import open_dataset
from raytrain_llama3.data.convert import to_arrow, to_indexed
from raytrain_llama3.data.packed import PackedSource
from raytrain_llama3.data.samples import Samples
from raytrain_llama3.errors import DataError

SEQ, END = 64, 256


def write(prefix: Path, dtype: type, count: int = 300) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    documents = [np.append(rng.integers(0, END, rng.integers(1, 90)), END).astype(dtype) for _ in range(count)]
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.idx")
    return documents


class Tokenizer:
    """As little of one as GPTDataset asks for."""

    eod, pad, vocab_size, unique_identifiers = END, 0, 300, {"name": "ids"}


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_the_same_tokens_as_gpt_dataset_without_shuffling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: type
) -> None:
    write(tmp_path / "text", dtype)

    class InOrder(np.random.RandomState):
        def shuffle(self, x: object) -> None:
            """Orders are meant to agree."""

    monkeypatch.setattr(gpt_dataset.numpy.random, "RandomState", InOrder)
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=SEQ, blend=([str(tmp_path / "text")], None), split="1,0,0",
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, tokenizer=Tokenizer(),
        path_to_cache=str(tmp_path / "cache"), create_attention_mask=False,
    )  # fmt: skip
    theirs_in = IndexedDataset(str(tmp_path / "text"))
    indices = np.arange(len(theirs_in), dtype=np.int32)
    theirs = GPTDataset(theirs_in, str(tmp_path / "text"), indices, None, Split.train, config)
    dataset = open_dataset([str(tmp_path / "text")], None, 0)
    ours = Samples([PackedSource(dataset, (0, 300), SEQ, 300)], ["1"], 1, shuffle=False)
    assert ours.windows == len(theirs)
    for i, window in enumerate(ours.read(np.arange(ours.windows))):
        sample = theirs[i]
        assert np.array_equal(window[:-1], sample["tokens"].numpy())
        assert np.array_equal(window[1:], sample["labels"].numpy())


def test_there_and_back(tmp_path: Path) -> None:
    documents = write(tmp_path / "text", np.uint16)
    manifest = to_arrow(str(tmp_path / "text"), tmp_path / "arrow", "bytes", log=print)
    assert (manifest.documents, manifest.has_ends) == (300, True)
    to_indexed(str(tmp_path / "arrow"), tmp_path / "back", log=print)
    for end in (".bin", ".idx"):
        assert (tmp_path / f"back{end}").read_bytes() == (tmp_path / f"text{end}").read_bytes()
    back = IndexedDataset(str(tmp_path / "back"))
    assert all(np.array_equal(back[i], document) for i, document in enumerate(documents))
    with pytest.raises(DataError, match=r"back\.bin and .*back\.idx: there already.*--overwrite"):
        to_indexed(str(tmp_path / "arrow"), tmp_path / "back", log=print)
    with pytest.raises(DataError, match="holds a dataset already"):
        to_arrow(str(tmp_path / "text"), tmp_path / "arrow", "bytes", log=print)
