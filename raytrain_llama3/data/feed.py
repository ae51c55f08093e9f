"""From sample numbers to the micro-batches of one data-parallel rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from raytrain_llama3.data.order import SampleOrder
from raytrain_llama3.data.source import Tokens, TokenSource

if TYPE_CHECKING:
    from raytrain_llama3.config.plan import Layout


def micro_batches(
    source: TokenSource, order: SampleOrder, first_sample: int, layout: Layout, dp_rank: int
) -> Iterator[Tokens]:
    """Yield the rank's micro-batches of the global batch that starts at `first_sample`.

    The global batch is cut into micro-batches in sample order and dealt out like cards: micro-batch m of rank r is
    number m * dp + r. So a global batch holds the same samples for every dp, and so does a resumed run.

    Yields `layout.num_micro_batches` arrays of token ids, `[micro_batch_size, seq_length + 1]`, int64; each is read
    when it is asked for. Raises `DataError` from `source`, naming file and row.
    """
    size = layout.micro_batch_size
    for m in range(layout.num_micro_batches):
        first = first_sample + (m * layout.dp + dp_rank) * size
        yield source.windows(order.locate(np.arange(first, first + size, dtype=np.int64)))
