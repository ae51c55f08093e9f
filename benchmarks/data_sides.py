"""One side of the comparison in a process of its own: shuffled batches of 8 samples, for so many seconds.

    python benchmarks/data_sides.py SIDE FOLDER SECONDS

Prints one line of JSON: tokens, seconds, seconds of CPU, and the peak of anonymous memory in bytes. Every batch is an
array of the ids that a step would be given, `[8, 8193]`: int32 (torch embeds no uint16), or `GPTDataset`'s own int64.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

BATCH, SEQ = 8, 8192
_SAMPLED_S = 0.02


def resident_bytes(pid: int, kind: str) -> int:
    """Resident memory of a process, in bytes: `RssAnon`, which is no file's, or `RssShmem`, the object store's."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


class Peak:
    """The most anonymous memory that some processes took together while the block ran, less what they had before.

    `shared_bytes` is the most that the first of them touched of the object store.
    """

    def __init__(self, pids: list[int]) -> None:
        self._pids, self._ended = pids, threading.Event()
        self._before = self._anonymous()
        self.bytes = self.shared_bytes = 0

    def __enter__(self) -> Peak:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_SAMPLED_S):
            self.bytes = max(self.bytes, self._anonymous() - self._before)
            self.shared_bytes = max(self.shared_bytes, resident_bytes(self._pids[0], "RssShmem"))

    def _anonymous(self) -> int:
        return sum(resident_bytes(pid, "RssAnon") for pid in self._pids)


def ours(folder: Path) -> Iterator[np.ndarray]:
    """What a feeder does, without Ray."""
    samples = our_samples(folder)
    for first in itertools.count(0, BATCH):
        yield samples.read(np.arange(first, first + BATCH))


def our_samples(folder: Path) -> object:
    """The samples of our dataset."""
    from data_files import VOCAB

    from raytrain_llama3.data.catalog import open_dataset
    from raytrain_llama3.data.packed import PackedSource
    from raytrain_llama3.data.samples import Samples

    dataset = open_dataset([str(folder)], None, 0)
    return Samples([PackedSource(dataset, (0, dataset.documents), SEQ, VOCAB)], ["1"], 1)


def hugging_face(folder: Path) -> Iterator[np.ndarray]:
    """`datasets`, memory-mapped Arrow of packed rows, shuffled, as numpy."""
    from datasets import Dataset

    rows = Dataset.from_file(str(folder / "rows.arrow")).with_format("numpy")
    order = np.random.default_rng(1).permutation(len(rows))
    for first in itertools.cycle(range(0, len(rows) - BATCH, BATCH)):
        yield rows[order[first : first + BATCH].tolist()]["input_ids"].astype(np.int32)


def mosaic(folder: Path) -> Iterator[np.ndarray]:
    """MosaicML `streaming`, local MDS of packed rows, shuffled."""
    from streaming import StreamingDataset

    rows = StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH, shuffle_seed=1)
    while True:
        batch = []
        for row in rows:
            batch.append(row["tokens"])
            if len(batch) == BATCH:
                yield np.stack(batch).astype(np.int32)
                batch = []


def megatron(folder: Path) -> Iterator[np.ndarray]:
    """Megatron-core's `GPTDataset` on .bin and .idx, which packs and shuffles."""
    from data_files import VOCAB
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    class Tokenizer:
        eod, pad, vocab_size, unique_identifiers = 0, 0, VOCAB, {"name": "ids"}

    prefix = str(folder / "text")
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=SEQ, blend=([prefix], None), split="1,0,0", reset_position_ids=False,
        reset_attention_mask=False, eod_mask_loss=False, tokenizer=Tokenizer(), create_attention_mask=False,
        path_to_cache=str(folder / "cache"),
    )  # fmt: skip
    indexed = IndexedDataset(prefix)
    rows = GPTDataset(indexed, prefix, np.arange(len(indexed), dtype=np.int32), None, Split.train, config)
    for first in itertools.cycle(range(0, len(rows) - BATCH, BATCH)):
        samples = [rows[first + i] for i in range(BATCH)]
        yield np.stack([np.append(s["tokens"].numpy(), s["labels"].numpy()[-1]) for s in samples])


SIDES: dict[str, Callable[[Path], Iterator[np.ndarray]]] = {
    "ours": ours,
    "datasets": hugging_face,
    "streaming": mosaic,
    "GPTDataset": megatron,
}


def main() -> int:
    """Measure one side."""
    side, folder, seconds = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    with Peak([os.getpid()]) as peak:
        batches = SIDES[side](folder)
        # Opening, and an index that a side builds first, are not a rate.
        next(batches)
        began, cpu, tokens, total = time.perf_counter(), time.process_time(), 0, 0
        while (took := time.perf_counter() - began) < seconds:
            batch = next(batches)
            # Every id is looked at, so that none is left in a file that was only mapped.
            total += int(batch.max())
            tokens += batch.shape[0] * (batch.shape[1] - 1)
        cpu_s = time.process_time() - cpu
    print(json.dumps({"tokens": tokens, "seconds": took, "cpu_s": cpu_s, "peak_bytes": peak.bytes, "sum": total}))
    return 0


if __name__ == "__main__":
    # Peers leave threads and shared memory to their own finalizers, which may wait.
    code = main()
    sys.stdout.flush()
    os._exit(code)
