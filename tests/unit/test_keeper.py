from __future__ import annotations

from collections.abc import Iterator

import pytest

from raytrain_llama3.checkpoint.keeper import Keeper, KeeperLink, Refused, SetFacts
from raytrain_llama3.launch.keepers import newest_whole
from raytrain_llama3.messages import KeeperAddress, KeptPart

A, B = KeeperAddress("10.0.0.1", 1, "a"), KeeperAddress("10.0.0.2", 2, "b")


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    keeper = Keeper("127.0.0.1")
    yield keeper
    keeper.close()


def link_to(keeper: Keeper) -> KeeperLink:
    return KeeperLink(KeeperAddress("127.0.0.1", *keeper.address()))


def put(
    link: KeeperLink, rank: int, attempt: int, step: int, content: bytes, whole: tuple[int, int] | None = None
) -> None:
    table = f"{rank} {attempt} {step}".encode()
    about = SetFacts(2, step * 8, whole)
    link.put(rank, (attempt, step), about, table, [memoryview(content[:3]), memoryview(content[3:])])


def test_what_was_put_is_there_as_bytes_of_the_keepers_own(keeper: Keeper) -> None:
    link = link_to(keeper)
    put(link, 1, 0, 5, b"0123456789")
    link.close()
    other = link_to(keeper)
    assert other.table(1, (0, 5)) == b"1 0 5"
    assert other.content(1, (0, 5), 2, 4) == b"2345"
    assert keeper.holdings() == {1: {(0, 5): (2, 40)}}
    assert keeper.bytes_held() == 10
    other.close()


def test_two_generations_are_held_and_no_third(keeper: Keeper) -> None:
    link = link_to(keeper)
    for step in (5, 10, 15):
        put(link, 0, 0, step, bytes(100), (0, step - 5))
    assert keeper.holdings()[0].keys() == {(0, 10), (0, 15)}
    assert keeper.bytes_held() == 200
    link.close()


def test_the_newest_whole_set_outlives_those_that_lack_a_part(keeper: Keeper) -> None:
    link = link_to(keeper)
    for step in (5, 10, 15, 20):
        put(link, 0, 0, step, bytes(100), (0, 5))
    assert keeper.holdings()[0].keys() == {(0, 5), (0, 20)}
    # The next attempt goes on from there, and this one's parts may be of more ranks.
    put(link, 1, 0, 5, bytes(100))
    put(link, 7, 0, 5, bytes(100))
    put(link, 7, 0, 20, bytes(100), (0, 5))
    put(link, 0, 1, 10, bytes(100), (0, 5))
    assert {rank: set(parts) for rank, parts in keeper.holdings().items()} == {
        0: {(0, 5), (1, 10)},
        1: {(0, 5)},
        7: {(0, 5)},
    }
    # A rank that outlived its attempt harms nothing.
    put(link, 0, 0, 25, bytes(100), (0, 20))
    assert keeper.holdings()[0].keys() >= {(0, 5), (1, 10)}
    put(link, 0, 1, 20, bytes(100), (1, 10))
    assert {rank: set(parts) for rank, parts in keeper.holdings().items() if parts} == {0: {(1, 10), (1, 20)}}
    link.close()


def test_a_part_that_breaks_off_does_not_count(keeper: Keeper) -> None:
    link = link_to(keeper)
    put(link, 0, 0, 5, bytes(10))

    class Breaks:
        nbytes = 10

    with pytest.raises(TypeError):
        link.put(0, (0, 10), SetFacts(2, 80, (0, 5)), b"", [Breaks()])  # type: ignore[list-item]
    link.close()
    assert keeper.holdings() == {0: {(0, 5): (2, 40)}}


def test_who_has_not_the_token_is_not_answered(keeper: Keeper) -> None:
    link = KeeperLink(KeeperAddress("127.0.0.1", keeper.address()[0], "wrong"))
    with pytest.raises(Refused, match="keeper 127"):
        put(link, 0, 0, 5, b"abc")
    link.close()
    assert keeper.holdings() == {}


def test_a_keeper_that_is_gone_or_lacks_a_part_says_so(keeper: Keeper) -> None:
    link = link_to(keeper)
    with pytest.raises(Refused):
        link.table(3, (0, 1))
    link.close()
    port = keeper.address()[0]
    keeper.close()
    with pytest.raises(Refused):
        KeeperLink(KeeperAddress("127.0.0.1", port, "x")).table(0, (0, 1))


@pytest.mark.parametrize(
    ("held", "newest"),
    [
        ({}, None),
        ({A: {0: {(0, 5): (2, 40)}}}, None),
        ({A: {0: {(0, 5): (2, 40)}}, B: {1: {(0, 5): (2, 40)}}}, (5, 0)),
        # The newer set lacks a part.
        ({A: {0: {(0, 5): (2, 40), (0, 10): (2, 80)}}, B: {1: {(0, 5): (2, 40)}}}, (5, 0)),
        # Parts of two attempts are no set.
        ({A: {0: {(0, 5): (2, 40)}}, B: {1: {(1, 5): (2, 40)}}}, None),
        ({A: {0: {(0, 10): (1, 80), (1, 5): (2, 40)}, 1: {(1, 5): (2, 40)}}}, (10, 0)),
        ({A: {0: {(0, 5): (2, 40), (1, 5): (2, 40)}, 1: {(0, 5): (2, 40), (1, 5): (2, 40)}}}, (5, 1)),
    ],
)
def test_the_newest_whole_set_is_chosen(held: dict, newest: tuple[int, int] | None) -> None:
    found = newest_whole(held)
    assert (found and (found.step, found.kept_in_attempt)) == newest
    if found:
        assert found.samples == 8 * found.step
        assert [part.rank for part in found.kept] == list(range(len(found.kept)))
        assert all(isinstance(part, KeptPart) for part in found.kept)
