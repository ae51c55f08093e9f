from __future__ import annotations

import random

import pytest

from raytrain_llama3.config.plan import Device
from raytrain_llama3.launch.placement import assign_ranks, choose_nodes, slots
from raytrain_llama3.launch.session import Node, address_key
from raytrain_llama3.messages import DeviceSlot


def node(ip: str, devices: int, free: int | None = None, node_id: str = "", resource: str = "GPU") -> Node:
    there = {resource: float(devices), "memory": 1e9}
    return Node(node_id or f"id-{ip}", ip, there, {resource: float(devices if free is None else free)})


def two_nodes_of_four() -> list[DeviceSlot]:
    """Bundles 0, 1, … alternate between the nodes, devices count down."""
    nodes = [node("10.0.0.66", 4), node("10.0.0.7", 4)] * 4
    return slots(nodes, [3, 3, 2, 2, 1, 1, 0, 0])


@pytest.mark.parametrize("seed", range(5))
def test_ranks_follow_node_then_device_however_bundles_are_numbered(seed: int) -> None:
    shuffled = two_nodes_of_four()
    random.Random(seed).shuffle(shuffled)
    specs = [spec for _, spec in assign_ranks(shuffled, attempt=2)]
    assert [s.rank for s in specs] == list(range(8))
    assert [s.node_ip for s in specs] == ["10.0.0.7"] * 4 + ["10.0.0.66"] * 4
    assert [s.device_index for s in specs] == [0, 1, 2, 3] * 2
    assert [s.local_rank for s in specs] == [0, 1, 2, 3] * 2
    assert [s.node_rank for s in specs] == [0] * 4 + [1] * 4
    assert {(s.world_size, s.local_world_size, s.attempt) for s in specs} == {(8, 4, 2)}


def test_a_rank_keeps_the_slot_that_it_was_given_for() -> None:
    for slot, spec in assign_ranks(two_nodes_of_four(), attempt=0):
        assert (slot.node_ip, slot.node_id, slot.device_index) == (spec.node_ip, spec.node_id, spec.device_index)
        assert slot.bundle_index % 2 == (spec.node_ip == "10.0.0.7")


def test_local_ranks_count_from_zero_where_a_job_has_some_of_a_nodes_devices() -> None:
    granted = slots([node("10.0.0.1", 8)] * 3, [6, 2, 5])
    assert [(s.local_rank, s.device_index) for _, s in assign_ranks(granted, 0)] == [(0, 2), (1, 5), (2, 6)]


def test_two_ray_nodes_on_one_host_stay_apart() -> None:
    first, second = node("10.0.0.1", 2, node_id="a"), node("10.0.0.1", 2, node_id="b")
    specs = [spec for _, spec in assign_ranks(slots([second, first, second, first], [0, 0, 1, 1]), 0)]
    assert [s.node_id for s in specs] == ["a", "a", "b", "b"]
    assert [s.node_rank for s in specs] == [0, 0, 1, 1]


def test_nodes_of_unequal_size_have_their_own_local_world() -> None:
    granted = slots([node("10.0.0.2", 1), node("10.0.0.1", 2), node("10.0.0.1", 2)], [0, 0, 1])
    assert [s.local_world_size for _, s in assign_ranks(granted, 0)] == [2, 2, 1]


def test_addresses_are_compared_as_numbers() -> None:
    addresses = ["10.0.0.66", "9.255.0.1", "10.0.0.7", "10.0.0.100"]
    assert sorted(addresses, key=address_key) == ["9.255.0.1", "10.0.0.7", "10.0.0.66", "10.0.0.100"]


def test_addresses_that_are_no_numbers_have_an_order_too() -> None:
    assert sorted(["fe80::2", "fe80::1"], key=address_key) == ["fe80::1", "fe80::2"]


A, B, C = "id-10.0.0.1", "id-10.0.0.2", "id-10.0.0.3"
SMALL, LARGE, BUSY = node("10.0.0.1", 4), node("10.0.0.2", 8), node("10.0.0.3", 8, free=2)


@pytest.mark.parametrize(
    ("nodes", "wanted", "free", "chosen"),
    [
        ([LARGE], [8], True, [B] * 8),
        ([LARGE], [3], True, [B] * 3),
        ([LARGE], [9], True, None),
        ([], [1], True, None),
        # The closest fit leaves the larger node for the larger need.
        ([SMALL, LARGE], [4], True, [A] * 4),
        ([SMALL, LARGE], [4, 8], True, [A] * 4 + [B] * 8),
        ([LARGE, SMALL], [8, 4], True, [B] * 8 + [A] * 4),
        ([SMALL, LARGE], [5], True, [B] * 5),
        # One need takes one node, whole needs are not split over several.
        ([SMALL, LARGE], [12], True, None),
        ([LARGE], [4, 4], True, None),
        ([SMALL, LARGE], [4, 4, 4], True, None),
        # What is free now, or in all.
        ([BUSY], [8], True, None),
        ([BUSY], [8], False, [C] * 8),
        ([BUSY], [2], True, [C] * 2),
        ([SMALL, LARGE, BUSY], [2], True, [C] * 2),
        # Among equals the first in order.
        ([LARGE, BUSY], [8], False, [B] * 8),
        ([BUSY, LARGE], [8], False, [C] * 8),
    ],
)
def test_each_need_gets_the_node_that_fits_it_closest(
    nodes: list[Node], wanted: list[int], free: bool, chosen: list[str] | None
) -> None:
    assert choose_nodes(nodes, "cuda", wanted, free=free) == chosen


@pytest.mark.parametrize(("device", "chosen"), [("cuda", None), ("cpu", [A] * 2)])
def test_a_bundle_asks_for_what_its_device_is(device: Device, chosen: list[str] | None) -> None:
    assert choose_nodes([node("10.0.0.1", 4, resource="CPU")], device, [2], free=True) == chosen


def test_every_bundle_needs_a_device() -> None:
    with pytest.raises(ValueError, match="shorter"):
        slots([node("10.0.0.1", 2)] * 2, [0])
