"""Each sample exactly once, through real feeders, real object stores and real training."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from buckets import Bucket
from feeding import checksums, feeders, in_order, links, trained_on
from sandbox import DEMO, Sandbox
from test_resume import publish
from training import Workers, plan

from raytrain_llama3.data.blend import Blend
from raytrain_llama3.data.feed import RankFeed
from raytrain_llama3.data.mixing import GOLDEN, MASK
from raytrain_llama3.data.order import SampleOrder, block_windows

SEQ = 160
END = 255


@pytest.fixture(scope="module")
def four(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Workers:
    return Workers(4, Path(tmp_path_factory.mktemp("logs")))


def documents(seed: int, count: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, END, rng.integers(4, 28)).tolist() for _ in range(count)]


def write_shards(folder: Path, all_documents: list[list[int]], shards: int = 3) -> Path:
    """Arrow and Parquet, in turn; no end-of-document ids, no manifest."""
    folder.mkdir()
    each = len(all_documents) // shards
    for number in range(shards):
        part = pa.table(
            {"input_ids": pa.array(all_documents[number * each : (number + 1) * each], pa.list_(pa.int32()))}
        )
        if number % 2:
            pq.write_table(part, folder / f"{number}.parquet", row_group_size=100)
            continue
        with pa.ipc.new_file(str(folder / f"{number}.arrow"), part.schema) as file:
            file.write_table(part, max_chunksize=100)
    return folder


def windows_of(all_documents: list[list[int]]) -> np.ndarray:
    """What packing must give, told in other words than the package's."""
    stream = np.array([token for document in all_documents for token in (*document, END)])
    count = (len(stream) - 1) // SEQ
    return np.stack([stream[i * SEQ : (i + 1) * SEQ + 1] for i in range(count)])


def in_epochs(windows: np.ndarray, seed: int, samples: np.ndarray) -> np.ndarray:
    return windows[SampleOrder(seed, len(windows), block_windows(SEQ)).locate(samples)]


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


FLAGS = ("--dtype", "fp32", "--seq-length", str(SEQ), "--tokenizer-arg", "ids", "--eod-token", str(END))
FLAGS += ("--split", "1,0,0", "--trace-samples")


def test_exactly_once_over_stops_epochs_and_layouts(four: Workers, tmp_path: Path) -> None:
    all_documents = documents(1, 3000)
    data = write_shards(tmp_path / "data", all_documents)
    windows = windows_of(all_documents)
    samples = 640
    assert 200 < len(windows) <= samples / 2
    resume, seen = None, []
    for attempt, (dp, until) in enumerate(((2, 200), (4, 400), (1, samples))):
        iters = ("--train-iters", str(until // 8), "--micro-batch-size", "1" if dp == 4 else "2")
        run_plan = plan(tmp_path, *FLAGS, "--data-arg", str(data), *iters, world=dp)
        with feeders(run_plan) as made:
            _, records = four.run(run_plan, resume, attempt, links(made, run_plan))
        resume = publish(run_plan, records)
        found = trained_on(run_plan, attempt)
        assert sorted(found) == list(range(dp))
        seen += in_order(list(found.values()))
    assert resume.samples == samples
    assert [sample for sample, _ in seen] == list(range(samples))
    # Twice through the documents, each window once a time, in another order.
    first, second = ([crc for _, crc in seen[i * len(windows) : (i + 1) * len(windows)]] for i in range(2))
    assert sorted(first) == sorted(second) == sorted(checksums(windows))
    assert first[:50] != second[:50]
    assert [crc for _, crc in seen] == checksums(in_epochs(windows, 1234, np.arange(samples)))
    whole = plan(tmp_path / "whole", *FLAGS, "--data-arg", str(data), "--train-iters", str(samples // 8), world=2)
    with feeders(whole) as made:
        four.run(whole, None, 0, links(made, whole))
    assert in_order(list(trained_on(whole, 0).values())) == seen


def test_a_blend_with_a_feeder_killed_and_groups_that_share_reads(four: Workers, tmp_path: Path) -> None:
    parts = [documents(2, 900), documents(3, 300)]
    data = [write_shards(tmp_path / name, part) for name, part in zip("ab", parts, strict=True)]
    blend = f"0.7 {data[0]} 0.3 {data[1]}"
    run_plan = plan(tmp_path, *FLAGS, "--data-arg", blend, "--train-iters", "40", "--tp-size", "2", world=4)
    with feeders(run_plan) as made:
        [post] = made._held["node"].posts
        refs = four.start(run_plan, None, 0, links(made, run_plan))
        killed = ray.get(post.actor.pid.remote())
        reports = []
        while not any(step.step >= 5 for report in reports for step in report.steps):
            reports.append(four.poll(0))
            time.sleep(0.02)
        os.kill(killed, signal.SIGKILL)
        ray.get(refs)
        assert ray.get(post.actor.pid.remote()) != killed
        asked, read, kept = ray.get(post.actor.counts.remote())
        # Two tensor-parallel ranks share each read; where they stop, one may have asked for a share more.
        assert kept <= run_plan.config.read_ahead
        assert asked == 2 * read - kept
    found = trained_on(run_plan, 0)
    assert found[0] == found[1] != found[2] == found[3]
    seen = in_order([found[0], found[2]])
    numbers = np.arange(320)
    sources, own = Blend(["0.7", "0.3"]).locate(numbers)
    expected = np.empty((320, SEQ + 1), dtype=np.int64)
    for source, seed in enumerate((1234, (1234 + GOLDEN) & MASK)):
        expected[sources == source] = in_epochs(windows_of(parts[source]), seed, own[sources == source])
    assert seen == list(zip(numbers.tolist(), checksums(expected), strict=True))
    assert (sources == 0).sum() == 224


def test_only_the_ends_of_a_pipeline_are_given_tokens(four: Workers, tmp_path: Path) -> None:
    alone = plan(tmp_path / "one", "--dtype", "fp32", "--train-iters", "3")
    losses = four.run(alone)[1].losses
    run_plan = plan(tmp_path, "--dtype", "fp32", "--train-iters", "3", "--pp-size", "4", "--trace-samples", world=4)
    with feeders(run_plan) as made:
        _, records = four.run(run_plan, None, 0, links(made, run_plan))
        [post] = made._held["node"].posts
        asked, read, kept = ray.get(post.actor.counts.remote())
    assert records.losses == pytest.approx(losses, abs=1e-4)
    found = trained_on(run_plan, 0)
    assert sorted(found) == [0, 3]
    assert found[0] == found[3]
    assert asked == 2 * read - kept > 0


def test_a_paused_feeder_is_used_up_to_its_depth_then_waited_for(local_ray: None, tmp_path: Path) -> None:
    run_plan = plan(tmp_path, "--read-ahead", "3")
    with feeders(run_plan) as made:
        [post] = made._held["node"].posts
        [link] = links(made, run_plan).values()
        feed = RankFeed(link, run_plan.layout, 0)
        expected = made._sources.train
        feed.begin("train", 0)
        ahead = feed._ahead["train"]
        deadline = time.monotonic() + 30
        while len(ahead) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        pid = ray.get(post.actor.pid.remote())
        os.kill(pid, signal.SIGSTOP)
        try:
            taken = [np.concatenate(list(feed.micro_batches("train", 8 * i))) for i in range(3)]
            time.sleep(1)
            assert len(ahead) == 0
        finally:
            os.kill(pid, signal.SIGCONT)
        # The object store's memory is handed on, not a copy of it.
        assert not next(iter(feed.micro_batches("train", 24))).flags.writeable
        taken.append(expected.read(np.arange(24, 32)))
        taken += [np.concatenate(list(feed.micro_batches("train", 8 * i))) for i in range(4, 12)]
        feed.close()
    assert np.array_equal(np.concatenate(taken), expected.read(np.arange(96)))


def test_a_feeder_that_does_not_answer_is_replaced_before_the_next_attempt(local_ray: None, tmp_path: Path) -> None:
    run_plan = plan(tmp_path)
    with feeders(run_plan) as made:
        [hung] = made._held["node"].posts
        pid = ray.get(hung.pid)
        made.man({"node": made._held["node"].reservation})
        assert made._held["node"].posts == [hung]
        os.kill(pid, signal.SIGSTOP)
        made.man({"node": made._held["node"].reservation})
        [link] = links(made, run_plan).values()
        feed = RankFeed(link, run_plan.layout, 0)
        found = np.concatenate(list(feed.micro_batches("train", 16)))
        assert np.array_equal(found, made._sources.train.read(np.arange(16, 24)))
        # What is left of it may wait for its raylet to notice.
        deadline = time.monotonic() + 20
        while is_alive(pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not is_alive(pid)
        assert made._held["node"].posts != [hung]


def test_shards_behind_s3_reach_a_rank_by_the_drivers_keys(local_ray: None, tmp_path: Path, bucket: Bucket) -> None:
    # Ray was started without the keys.
    place = bucket.upload(write_shards(tmp_path / "data", documents(6, 300)))
    run_plan = plan(tmp_path, *FLAGS, "--data-arg", place)
    with feeders(run_plan) as made:
        [link] = links(made, run_plan).values()
        feed = RankFeed(link, run_plan.layout, 0)
        feed.begin("train", 0)
        found = np.concatenate([np.concatenate(list(feed.micro_batches("train", 8 * i))) for i in range(3)])
        feed.close()
    assert np.array_equal(found, in_epochs(windows_of(documents(6, 300)), 1234, np.arange(24)))


def test_the_command_survives_its_feeder_and_refuses_other_data(sandbox: Sandbox) -> None:
    data = write_shards(sandbox.work / "data", documents(4, 300))
    run = (*DEMO, "--data-arg", "data", "--tokenizer-arg", "ids", "--eod-token", "255", "--eval-interval", "0")
    run += ("--gpus-per-node", "1", "--save-interval", "0", "--log-interval", "1")
    command = sandbox.start(*run, "--train-iters", "60")
    command.wait_for(r"^step +3/")
    [feeder] = [p for p in sandbox._processes() if "Feeder" in " ".join(p.cmdline())]
    assert not any("torch" in m.path for m in feeder.memory_maps())
    assert str(data / "0.arrow") in {m.path for m in feeder.memory_maps()}
    rank = sandbox.rank_process(0, 0)
    opened = {m.path for m in rank.memory_maps()} | {f.path for f in rank.open_files()}
    assert not any(path.startswith(str(data)) for path in opened)
    feeder.kill()
    assert command.wait() == 0, command.output
    assert sandbox.leftovers() == []
    pq.write_table(pq.read_table(data / "1.parquet").slice(1), data / "1.parquet")
    refused = sandbox.start(*run, "--train-iters", "80")
    assert refused.wait() == 3
    assert "shard 1.parquet had 100 documents" in refused.output
    assert "--data-changed accept" in refused.output
    (data / "0.arrow").write_bytes((data / "0.arrow").read_bytes()[:-9])
    damaged = sandbox.start(*run, "--train-iters", "80", "--data-changed", "accept")
    assert damaged.wait() == 2
    assert "0.arrow is not an Arrow IPC file" in damaged.output
