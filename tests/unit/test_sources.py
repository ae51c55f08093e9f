import numpy as np
import pytest
from dataset import random_documents, write_dataset

from raytrain_llama3.config.load import load
from raytrain_llama3.config.plan import DeviceSupply
from raytrain_llama3.config.rules import plan_run
from raytrain_llama3.data import open_sources
from raytrain_llama3.errors import DataError

TINY = """
--device cpu --num-layers 2 --hidden-size 64 --ffn-hidden-size 176 --num-attention-heads 4 --num-query-groups 2
--kv-channels 16 --seq-length 16 --vocab-size 300 --micro-batch-size 1 --global-batch-size 4 --lr-warmup-samples 4
--lr-decay-samples 80
"""


def plan(*flags):
    return plan_run(load(["train", *TINY.split(), *flags], {}), DeviceSupply("cpu", (1,)))


@pytest.fixture
def folder(tmp_path):
    write_dataset(tmp_path / "data", random_documents(0, 100, 300), 300)
    return tmp_path / "data"


def from_folder(folder, split, eval_interval, *flags):
    return plan(
        "--data-arg",
        str(folder),
        "--tokenizer-arg",
        "bytes",
        "--split",
        split,
        "--eval-interval",
        str(eval_interval),
        *flags,
    )


def test_mock_trains_on_one_stream_and_evaluates_on_another():
    sources = open_sources(plan("--data-arg", "MOCK"))
    indices = np.arange(3)
    train, valid = sources.train.read(indices), sources.valid.read(indices)
    assert train.shape == valid.shape == (3, 17)
    assert not np.array_equal(train, valid)
    assert train.max() < 300
    assert sources.train.windows > 10**9
    other = open_sources(plan("--data-arg", "MOCK", "--seed", "5"))
    assert other.train.fingerprint() != sources.train.fingerprint()


def test_a_dataset_is_split_by_documents(folder):
    sources = open_sources(from_folder(folder, "80,20,0", 10))
    documents = random_documents(0, 100, 300)
    for source, part in ((sources.train, documents[:80]), (sources.valid, documents[80:])):
        stream = np.concatenate(part)
        assert source.windows == (len(stream) - 1) // 16
        assert np.array_equal(source.sources[0].windows(np.array([1]))[0], stream[16:33])


def test_no_validation_part(folder):
    with pytest.raises(DataError, match=r"to evaluate on, and eval_interval is 10.*second number of split"):
        open_sources(from_folder(folder, "100,0,0", 10))
    sources = open_sources(from_folder(folder, "100,0,0", 0))
    assert sources.valid.fingerprint() == sources.train.fingerprint()


def test_no_dataset(tmp_path):
    with pytest.raises(DataError, match="is not a dataset"):
        open_sources(from_folder(tmp_path, "99,1,0", 10))
