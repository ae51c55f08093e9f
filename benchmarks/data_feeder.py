"""One real feeder to one rank through Ray's object store: speed, memory and the rank's wait.

    python benchmarks/data_feeder.py FOLDER BATCHES STEPS

Prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from data_sides import BATCH, SEQ, Peak, our_samples

from raytrain_llama3.config.plan import Layout
from raytrain_llama3.data.feed import RankFeed
from raytrain_llama3.data.sources import Sources
from raytrain_llama3.launch.feeders import Feeder, FeederLink

STEP_S = 0.1


def main() -> int:
    """Measure a free run, then a run of steps of 100 ms."""
    folder, batches, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR", address="local")
    samples: Any = our_samples(folder)
    put = [ray.put((Sources(samples, samples), {}))]
    feeder = ray.remote(Feeder).options(num_cpus=0).remote()
    ray.get(feeder.begin.remote(put))
    link = FeederLink(feeder, put, 1, 8, 4, {}, 1, None, "the feeder")
    layout = Layout(1, 1, 1, 1, 1, None, False, 1, BATCH)
    feed = RankFeed(link, layout, 0)
    process = psutil.Process(ray.get(feeder.pid.remote()))
    told: dict[str, Any] = {}
    with Peak([process.pid, os.getpid()]) as peak:
        feed.begin("train", 0)
        list(feed.micro_batches("train", 0))
        began, cpu, first = time.perf_counter(), sum(process.cpu_times()[:2]), BATCH
        total = 0
        while first <= batches * BATCH:
            total += sum(int(batch.max()) for batch in feed.micro_batches("train", first))
            first += BATCH
        told |= {
            "tokens": (first - BATCH) * SEQ,
            "seconds": time.perf_counter() - began,
            "cpu_s": sum(process.cpu_times()[:2]) - cpu,
            "sum": total,
        }
    told |= {"peak_bytes": peak.bytes, "stored_bytes": peak.shared_bytes}
    waits = []
    for _ in range(steps):
        time.sleep(STEP_S)
        began = time.perf_counter()
        list(feed.micro_batches("train", first))
        waits.append(time.perf_counter() - began)
        first += BATCH
    told["wait_share"] = sum(waits) / (steps * STEP_S)
    told["longest_wait_s"] = max(waits)
    feed.close()
    ray.shutdown()
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
