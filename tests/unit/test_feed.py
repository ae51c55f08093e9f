import numpy as np
import pytest

from raytrain_llama3.config.plan import Layout
from raytrain_llama3.data.feed import micro_batches
from raytrain_llama3.data.mock import MockSource
from raytrain_llama3.data.order import SampleOrder


class RecordingSource(MockSource):
    def __init__(self) -> None:
        super().__init__(1, 100, 4, 50)
        self.calls: list[list[int]] = []

    def windows(self, indices):
        self.calls.append(indices.tolist())
        return super().windows(indices)


def layout(dp: int, micro: int, batch: int = 24):
    return Layout(dp, 1, 1, 1, dp, None, False, micro, batch)


@pytest.mark.parametrize(("dp", "micro"), [(1, 1), (1, 24), (2, 3), (3, 2), (4, 6), (8, 1)])
@pytest.mark.parametrize("first", [0, 24, 24 * 40])
def test_a_global_batch_holds_the_same_samples_for_every_layout(dp, micro, first):
    order, source = SampleOrder(3, 50), RecordingSource()
    ranks = [list(micro_batches(source, order, first, layout(dp, micro), rank)) for rank in range(dp)]
    assert all(len(batches) == 24 // (dp * micro) for batches in ranks)
    dealt = np.concatenate([ranks[rank][m] for m in range(24 // (dp * micro)) for rank in range(dp)])
    expected = order.locate(np.arange(first, first + 24))
    assert np.array_equal(dealt, MockSource(1, 100, 4, 50).windows(expected))


def test_micro_batch_m_of_a_rank():
    order, source = SampleOrder(3, 50), RecordingSource()
    batches = list(micro_batches(source, order, 48, layout(2, 3), 1))
    assert [batch.shape for batch in batches] == [(3, 5)] * 4
    numbers = [[51, 52, 53], [57, 58, 59], [63, 64, 65], [69, 70, 71]]
    assert source.calls == [order.locate(np.array(n)).tolist() for n in numbers]


def test_nothing_is_read_before_it_is_asked_for():
    source = RecordingSource()
    batches = micro_batches(source, SampleOrder(3, 50), 0, layout(1, 6), 0)
    assert source.calls == []
    next(batches)
    assert len(source.calls) == 1
