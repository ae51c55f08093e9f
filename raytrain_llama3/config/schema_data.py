"""Options about data; see `schema`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from raytrain_llama3.config.schema_base import Options, option
from raytrain_llama3.config.values import Auto, Split


class Data(Options):
    """What it learns from."""

    tokenizer_arg: str = option("MOCK", "--tokenizer-model")
    """Tokenizer of the data: a name, a tokenizer.json or a Hugging Face folder; MOCK or empty: mock data."""
    tokenizer_type: Literal["auto", "NullTokenizer", "HuggingFaceTokenizer"] = "auto"
    """auto: NullTokenizer for mock data, else HuggingFaceTokenizer."""
    data_arg: str = option("MOCK", "--data-path")
    """Where the token ids are: a folder written by `data tokenize`, Arrow or Parquet files (a folder, a pattern, any
    URI of pyarrow.fs such as s3://bucket/folder), the prefix of Megatron's .bin and .idx; several with weights in one
    text are a blend ("0.7 a 0.3 b"). MOCK: tokens made up on the fly; PYTHON_STDLIB: this Python's own library."""
    data_column: str | None = None
    """Column of token ids; unset: input_ids, else tokens."""
    append_eod: Auto | bool = "auto"
    """Put the end-of-document id between documents while packing; auto: where they do not end with it yet."""
    eod_token: NonNegativeInt | None = None
    """The end-of-document id; unset: as the data's manifest or its tokenizer says."""
    shuffle: bool = True
    """Take windows in a random order, another in each epoch; off: as they lie."""
    reset_position_ids: bool = False
    """Accepted for Megatron-LM's sake: rotary positions count distances alone, which documents do not change."""
    reset_attention_mask: bool = False
    """Attend only within a document. On a CPU; a GPU's kernels as used here take no such mask."""
    read_ahead: PositiveInt = 4
    """Global batches that each node's feeders read ahead of the ranks (fewer where they would not fit in memory)."""
    data_retries: NonNegativeInt = 5
    """How often a read from a remote filesystem is tried again before the run gives up."""
    data_changed: Literal["refuse", "accept"] = "refuse"
    """At a resume with data that is not the checkpoint's: stop (exit 3), or go on with other samples."""
    trace_samples: bool = False
    """Write the number and a checksum of every sample that a rank trains on beside the rank's log."""
    split: Split = (99, 1, 0)
    """Parts of the documents for training, validation and test."""
    data_cache_path: Path | None = None
    """Scratch folder for data; unset: benchmark_cache_EXP_NAME."""
    num_workers: PositiveInt = 1
    """Feeders on each node: processes that read the data and hand it to the node's ranks."""
    tiktoken_pattern: Literal["v1", "v2"] = "v2"
    """Accepted for the script's sake: only Megatron-LM's tiktoken reader asks for it."""
    no_create_attention_mask_in_dataloader: bool = True
    """Accepted for the script's sake: the causal mask is always the kernel's own."""
    no_mmap_bin_files: bool = True
    """Accepted for the script's sake: it speaks of Megatron-LM's .bin files."""
