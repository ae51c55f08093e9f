import threading
import time

import numpy as np
import pytest
from planning import TINY, cpu, planned

from raytrain_llama3.config.plan import Layout
from raytrain_llama3.data.feed import LocalLink, Nobody, RankFeed, ReadAhead, needs_tokens, read_share, share_of
from raytrain_llama3.data.mock import MockSource
from raytrain_llama3.data.samples import Samples
from raytrain_llama3.data.sources import Sources
from raytrain_llama3.errors import DataError
from raytrain_llama3.train.reporter import Reporter

SAMPLES = Samples([MockSource(1, 100, 4, 50)], ["1"], 3)


class FakeLink(LocalLink):
    """Answers when it is let; notes what it was asked for."""

    read_ahead = 3

    def __init__(self) -> None:
        super().__init__(Sources(SAMPLES, SAMPLES))
        self.asked: list[int] = []
        self.is_open = threading.Event()
        self.is_open.set()

    def take(self, request, is_given_up):
        while not self.is_open.wait(0.01):
            if is_given_up():
                raise DataError("given up")
        self.asked.append(request.first_sample)
        if request.first_sample >= 24 * 100:
            raise DataError("shard x, row 5")
        return super().take(request, is_given_up)


def layout(dp: int, micro: int, batch: int = 24):
    return Layout(dp, 1, 1, 1, dp, None, False, micro, batch)


def settled(ahead, count):
    deadline = time.monotonic() + 10
    while len(ahead) < count and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.05)
    return len(ahead)


@pytest.mark.parametrize(("dp", "micro"), [(1, 1), (1, 24), (2, 3), (3, 2), (4, 6), (8, 1)])
@pytest.mark.parametrize("first", [0, 24, 24 * 40])
def test_a_global_batch_holds_the_same_samples_for_every_layout(dp, micro, first):
    ranks = [list(RankFeed(FakeLink(), layout(dp, micro), rank).micro_batches("train", first)) for rank in range(dp)]
    assert all(len(batches) == 24 // (dp * micro) for batches in ranks)
    dealt = np.concatenate([ranks[rank][m] for m in range(24 // (dp * micro)) for rank in range(dp)])
    assert np.array_equal(dealt, SAMPLES.read(np.arange(first, first + 24)))


def test_micro_batch_m_of_a_rank():
    request = share_of("train", 48, layout(2, 3), 1)
    assert request.numbers().tolist() == [51, 52, 53, 57, 58, 59, 63, 64, 65, 69, 70, 71]
    share = read_share(SAMPLES, request)
    assert share.shape == (4, 3, 5)
    assert share.dtype == np.int32
    assert request.following().first_sample == 72


def test_it_reads_exactly_so_far_ahead_and_goes_on_when_some_is_used():
    link = FakeLink()
    ahead = ReadAhead(link, share_of("train", 0, layout(1, 6), 0), Nobody())
    assert settled(ahead, 3) == 3
    assert link.asked == [0, 24, 48]
    ahead.take(0)
    assert settled(ahead, 3) == 3
    assert link.asked == [0, 24, 48, 72]
    ahead.close()
    assert len(ahead) == 0


def test_a_feeder_that_pauses_is_waited_for_and_nothing_is_lost_or_doubled(monkeypatch):
    monkeypatch.setattr("raytrain_llama3.data.feed._FIRST_WORD_S", 0.1)
    link, reporter = FakeLink(), Reporter()
    waited_for = []
    monkeypatch.setattr(reporter, "waits_for", waited_for.append)
    feed = RankFeed(link, layout(1, 6), 0, told=reporter)
    feed.begin("train", 0)
    settled(feed._ahead["train"], 3)
    link.is_open.clear()
    # One request may have been on its way in when the door was shut.
    before = [np.concatenate(list(feed.micro_batches("train", 24 * i))) for i in range(3)]
    threading.Timer(1.5, link.is_open.set).start()
    after = [np.concatenate(list(feed.micro_batches("train", 24 * i))) for i in range(3, 8)]
    assert np.array_equal(np.concatenate(before + after), SAMPLES.read(np.arange(24 * 8)))
    assert "for data: samples 72 to 95, asked of this process" in reporter.poll().warnings[0]
    # What keeps the wait from being taken for a hang; over when the data is there.
    assert waited_for[0] == "samples 72 to 95, asked of this process"
    assert waited_for[-1] == ""
    feed.close()


def test_an_error_reaches_the_rank_at_its_sample_and_not_before():
    link = FakeLink()
    feed = RankFeed(link, layout(1, 6), 0)
    feed.begin("train", 24 * 98)
    for i in (98, 99):
        assert len(list(feed.micro_batches("train", 24 * i))) == 4
    with pytest.raises(DataError, match="shard x, row 5"):
        list(feed.micro_batches("train", 24 * 100))
    feed.close()


def test_closing_ends_a_thread_that_waits_for_the_feeder():
    link = FakeLink()
    link.is_open.clear()
    feed = RankFeed(link, layout(1, 6), 0)
    feed.begin("train", 0)
    feed.begin("valid", 0, 48)
    feed.close()
    assert not [t for t in threading.enumerate() if t.name == "read-ahead"]


def test_a_sequence_with_an_end_reads_no_further():
    link = FakeLink()
    ahead = ReadAhead(link, share_of("valid", 0, layout(1, 6), 0), Nobody(), stop=48)
    assert settled(ahead, 2) == 2
    assert link.asked == [0, 24]
    ahead.close()


def test_the_middle_of_a_pipeline_asks_for_nothing():
    plan = planned([*TINY, "--pp-size", "4", "--device", "cpu"], cpu(4))
    assert [needs_tokens(plan, stage) for stage in range(4)] == [True, False, False, True]
    masked = planned([*TINY, "--pp-size", "4", "--device", "cpu", "--reset-attention-mask"], cpu(4))
    assert all(needs_tokens(masked, stage) for stage in range(4))
    link = FakeLink()
    feed = RankFeed(link, layout(1, 6), 0, has_need=False)
    feed.begin("train", 0)
    assert list(feed.micro_batches("train", 0)) == [None] * 4
    assert link.asked == []


def test_shares_out_of_order_are_refused():
    ahead = ReadAhead(FakeLink(), share_of("train", 0, layout(1, 6), 0), Nobody())
    with pytest.raises(ValueError, match="begins at sample 0, not 24"):
        ahead.take(24)
    ahead.close()
