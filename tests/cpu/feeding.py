"""Feeders of their own for tests, and what ranks say that they trained on."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from training import spec

from raytrain_llama3.config.plan import RunPlan
from raytrain_llama3.data import prepare
from raytrain_llama3.launch.crew import Member
from raytrain_llama3.launch.feeders import FeederLink, Feeders
from raytrain_llama3.launch.reservation import Reservation


@contextmanager
def feeders(plan: RunPlan) -> Iterator[Feeders]:
    """The run's feeders on this machine, without a placement group to hold them."""
    made = Feeders(prepare(plan, print), plan, f"test-{id(plan)}")
    anywhere = SimpleNamespace(node=SimpleNamespace(node_id="node"), inside=lambda: "DEFAULT")
    made.man({"node": cast(Reservation, anywhere)})
    yield made
    made.close()


def links(made: Feeders, plan: RunPlan) -> dict[int, FeederLink]:
    world = plan.layout.world_size
    return made.links(plan, [Member(spec(rank, world), cast(Any, None)) for rank in range(world)])


def trained_on(plan: RunPlan, attempt: int) -> dict[int, list[list[tuple[int, int]]]]:
    """(sample, checksum) of each step's samples on each rank that was given tokens, in the order of training."""
    found = {}
    for path in sorted(plan.paths.rank_log(attempt, 0).parent.glob("rank_*.samples.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        number = int(path.name.split("_")[1].split(".")[0])
        train = [line for line in lines if line["part"] == "train"]
        found[number] = [list(zip(line["samples"], line["crc32"], strict=True)) for line in train]
    return found


def in_order(ranks: list[list[list[tuple[int, int]]]]) -> list[tuple[int, int]]:
    """All samples of all steps; a step's are those of its data-parallel ranks, by number."""
    return [pair for step in zip(*ranks, strict=True) for pair in sorted(p for rank in step for p in rank)]


def checksums(windows: np.ndarray) -> list[int]:
    return [zlib.crc32(window.astype(np.int32).tobytes()) for window in windows]
