from __future__ import annotations

import itertools
import random
import socket
from collections.abc import Sequence

import pytest
from planning import TINY, cpu, planned

from raytrain_llama3.config.plan import DeviceSupply
from raytrain_llama3.launch.placement import assign_ranks, choose_nodes, no_room, slots
from raytrain_llama3.launch.session import DEVICES, POD, STARTED, Node, address_key, certain, newest
from raytrain_llama3.messages import DeviceSlot, RankSpec

NOBODY = frozenset[str]()


def node(ip: str, devices: int = 8, free: int | None = None, node_id: str = "", resource: str = "GPU") -> Node:
    there = {resource: float(devices), "memory": 1e9}
    return Node(node_id or f"id-{ip}", ip, there, {resource: float(devices if free is None else free)})


def granted(*nodes: tuple[Node, Sequence[int], int]) -> list[DeviceSlot]:
    """The slots of nodes that hold these devices, of which so many are used."""
    return slots(
        {n.node_id: devices for n, devices, _ in nodes},
        {n.node_id: n for n, _, _ in nodes},
        {n.node_id: count for n, _, count in nodes},
    )


def ranks(found: Sequence[DeviceSlot]) -> list[RankSpec]:
    return [spec for _, spec in assign_ranks(found, attempt=0)]


def two_nodes_of_four() -> list[DeviceSlot]:
    """The node with the higher address first, devices counting down."""
    return granted((node("10.0.0.66"), [3, 2, 1, 0], 4), (node("10.0.0.7"), [3, 2, 1, 0], 4))


@pytest.mark.parametrize("seed", range(5))
def test_ranks_follow_node_then_device_in_whatever_order_slots_come(seed: int) -> None:
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


def test_local_ranks_count_from_zero_where_a_job_has_some_of_a_nodes_devices() -> None:
    found = ranks(granted((node("10.0.0.1"), [6, 2, 5], 3)))
    assert [(s.local_rank, s.device_index) for s in found] == [(0, 2), (1, 5), (2, 6)]


@pytest.mark.parametrize(
    ("devices", "count", "used"),
    [([0, 1, 2, 3], 2, [0, 1]), ([6, 2, 5], 2, [2, 5]), ([7, 4], 1, [4]), ([3, 1], 2, [1, 3])],
)
def test_fewer_ranks_than_devices_take_the_first(devices: list[int], count: int, used: list[int]) -> None:
    found = ranks(granted((node("10.0.0.1"), devices, count)))
    assert [s.device_index for s in found] == used
    assert {(s.world_size, s.local_world_size) for s in found} == {(count, count)}


def test_a_node_that_is_held_and_not_used_has_no_rank() -> None:
    first, spare = node("10.0.0.2"), node("10.0.0.1")
    found = slots(
        {n.node_id: [0, 1] for n in (first, spare)}, {n.node_id: n for n in (first, spare)}, {first.node_id: 2}
    )
    assert found == [DeviceSlot(first.node_id, "10.0.0.2", 0, device) for device in (0, 1)]


def test_two_raylets_at_one_address_stay_apart() -> None:
    first, second, third = (
        node(ip, node_id=name) for ip, name in [("10.0.0.1", "a"), ("10.0.0.1", "b"), ("9.0.0.1", "c")]
    )
    found = ranks(granted((second, [1, 0], 2), (first, [0, 1], 2), (third, [0], 1)))
    assert [s.node_id for s in found] == ["c", "a", "a", "b", "b"]
    assert [s.node_rank for s in found] == [0, 1, 1, 2, 2]
    assert [s.local_rank for s in found] == [0, 0, 1, 0, 1]
    assert [s.local_world_size for s in found] == [1, 2, 2, 2, 2]


def test_nodes_of_unequal_size_have_their_own_local_world() -> None:
    found = ranks(granted((node("10.0.0.2"), [0], 1), (node("10.0.0.1"), [0, 1], 2)))
    assert [(s.node_ip, s.local_world_size) for s in found] == [("10.0.0.1", 2), ("10.0.0.1", 2), ("10.0.0.2", 1)]


def test_addresses_are_ordered_as_numbers() -> None:
    addresses = ["10.0.0.66", "9.255.0.1", "10.0.0.7", "10.0.0.100"]
    in_order = ["9.255.0.1", "10.0.0.7", "10.0.0.66", "10.0.0.100"]
    assert sorted(addresses, key=address_key) == in_order
    assert [s.node_ip for s in ranks(granted(*((node(ip), [0], 1) for ip in addresses)))] == in_order


def test_addresses_that_are_no_numbers_have_an_order_too() -> None:
    assert sorted(["fe80::2", "fe80::1"], key=address_key) == ["fe80::1", "fe80::2"]


@pytest.mark.parametrize(
    ("room", "wanted", "held", "chosen"),
    [
        ({"a": 8}, [8], "", {"a": 8}),
        ({"a": 8}, [3], "", {"a": 3}),
        ({"a": 8}, [9], "", None),
        ({}, [1], "", None),
        # The closest fit leaves the larger node for the larger need.
        ({"a": 4, "b": 8}, [4], "", {"a": 4}),
        ({"b": 8, "a": 4}, [4], "", {"a": 4}),
        ({"a": 4, "b": 8}, [4, 8], "", {"a": 4, "b": 8}),
        ({"b": 8, "a": 4}, [4, 8], "", {"a": 4, "b": 8}),
        ({"a": 4, "b": 8}, [5], "", {"b": 5}),
        # One need takes one node, whole needs are not split over several.
        ({"a": 4, "b": 8}, [12], "", None),
        ({"a": 8}, [4, 4], "", None),
        ({"a": 4, "b": 8}, [4, 4, 4], "", None),
        # Among equals the first in order; what comes out is in that order too.
        ({"a": 8, "b": 8, "c": 8}, [8, 8], "", {"a": 8, "b": 8}),
        ({"c": 8, "b": 8, "a": 8}, [8, 8], "", {"b": 8, "c": 8}),
        ({"a": 2, "b": 8}, [8, 2], "", {"a": 2, "b": 8}),
        # Nodes whose processes stand ready come first, before a closer fit and before the order.
        ({"a": 8, "b": 8}, [8], "b", {"b": 8}),
        ({"a": 4, "b": 8}, [4], "b", {"b": 4}),
        ({"a": 8, "b": 8, "c": 8}, [8, 8], "bc", {"b": 8, "c": 8}),
        ({"a": 8, "b": 8, "c": 8}, [8, 8], "c", {"a": 8, "c": 8}),
        ({"a": 8, "b": 8, "c": 8}, [8], "bc", {"b": 8}),
        # Among those that are held, the closest fit again.
        ({"a": 8, "b": 4, "c": 4}, [4], "ab", {"b": 4}),
        # One that is held and too small is no help; one that is gone is not chosen.
        ({"a": 8, "b": 4}, [8], "b", {"a": 8}),
        ({"a": 8}, [8], "b", {"a": 8}),
        ({"a": 8, "b": 4}, [8, 4], "a", {"a": 8, "b": 4}),
    ],
)  # fmt: skip
def test_which_nodes_serve(room: dict[str, float], wanted: list[int], held: str, chosen: dict[str, int] | None) -> None:
    found = choose_nodes(room, wanted, frozenset(held))
    assert found == chosen
    if found is not None:
        assert list(found) == [name for name in room if name in found]


def test_whatever_is_held_room_is_found_where_there_is_some() -> None:
    room = {"a": 1, "b": 2, "c": 3, "d": 3}
    for wanted in itertools.chain.from_iterable(itertools.product(range(1, 5), repeat=n) for n in (1, 2, 3)):
        fits = any(
            all(has >= count for has, count in zip(some, wanted, strict=True))
            for some in itertools.permutations(room.values(), len(wanted))
        )
        for held in ("", "a", "d", "cd", "abcd"):
            found = choose_nodes(room, wanted, frozenset(held))
            assert (found is not None) == fits, (wanted, held)
            if found is not None:
                assert sorted(found.values()) == sorted(wanted)
                assert all(room[name] >= count for name, count in found.items())


BUSY = "something else holds them: see `ray status`, or wait longer with --placement-timeout-s"
SMALL = "the cluster is too small: add nodes, or lower --num-nodes or --gpus-per-node"


@pytest.mark.parametrize(
    ("there", "remedy"),
    [
        ([node("10.0.0.1", 4, free=1), node("10.0.0.2", 4)], BUSY),
        ([node("10.0.0.1", 4), node("10.0.0.2", 2)], SMALL),
        ([node("10.0.0.1", 8)], SMALL),
        ([], SMALL),
    ],
)
def test_without_room_it_is_told_what_was_wanted_and_what_there_is(there: list[Node], remedy: str) -> None:
    plan = planned([*TINY, "--placement-timeout-s", "7"], DeviceSupply("cuda", (4, 4), "H100"))
    text = no_room(there, plan, "GPU")
    assert text.startswith("no room for the ranks after 7 s: wanted GPU 4 + 4 on 2 nodes; ")
    for n in there:
        assert f"{n.ip}: {n.free['GPU']:g} of {n.total['GPU']:g} free" in text
    assert text.endswith(remedy)


def test_without_room_for_processes_cpus_are_counted() -> None:
    there = [node("10.0.0.1", 4, free=1, resource="CPU"), node("10.0.0.2", 8)]
    text = no_room(there, planned(TINY, cpu(2)), "CPU")
    assert "wanted CPU 2 on 1 node; 10.0.0.1: 1 of 4 free; " in text
    assert "10.0.0.2: 0 of 0 free" in text
    assert text.endswith(BUSY)


def of_pod(pod: int, ip: str, started: float) -> Node:
    labels = {POD: str(pod), STARTED: f"{started:.3f}", DEVICES: "2"}
    return Node(f"{pod}-{started:g}", ip, {"CPU": 2.0}, {"CPU": 2.0}, 1, labels)


def test_ranks_follow_the_pods_numbers_whatever_their_addresses() -> None:
    nodes = [of_pod(1, "10.0.0.1", 5), of_pod(0, "10.0.0.9", 5), of_pod(2, "10.0.0.5", 5), node("10.0.0.2", 2)]
    found = ranks(granted(*((n, [0, 1], 2) for n in nodes)))
    assert [s.node_ip for s in found[::2]] == ["10.0.0.9", "10.0.0.1", "10.0.0.5", "10.0.0.2"]


def test_of_a_pod_that_came_back_only_the_newest_node_counts() -> None:
    former, newer, other = of_pod(1, "10.0.0.1", 5), of_pod(1, "10.0.0.1", 9), of_pod(0, "10.0.0.9", 2)
    foreign = node("10.0.0.2", 2)
    assert newest([former, foreign, newer, other]) == [foreign, newer, other]


def test_a_node_waits_for_the_end_of_the_former_one_at_its_address() -> None:
    former, newer = (Node(name, "10.0.0.2", {}, {}, port=7001) for name in ("former", "newer"))
    beside, unknown = Node("beside", "10.0.0.2", {}, {}, port=7002), Node("unknown", "10.0.0.2", {}, {})
    assert certain([newer, beside, unknown], [former, newer, beside, unknown]) == [beside, unknown]
    assert certain([newer, beside, unknown], [newer, beside, unknown]) == [newer, beside, unknown]


def test_a_raylet_that_refused_is_gone_whoever_listens_at_its_port_later() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        refused = set[str]()
        former, newer = (Node(name, "127.0.0.1", {}, {}, port, refused=refused) for name in ("former", "newer"))
        assert not former.is_gone()
    assert former.is_gone()
    with socket.create_server(("127.0.0.1", port)):
        assert former.is_gone()
        assert not newer.is_gone()
    # Nothing answers there: perhaps only for now.
    silent = Node("silent", "255.255.255.255", {}, {}, port, refused=refused)
    assert silent.is_gone(timeout_s=0.05)
    assert refused == {"former"}
