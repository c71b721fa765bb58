"""The arithmetic over many byte ranges that runs in native code."""

from __future__ import annotations

import itertools
import random

import pytest

from gdsload._native import ranges
from gdsload.planning.read_plan import FILE_ORDER, ByteRange, Members


def items_at(*places: tuple[int, int, int]) -> list[ByteRange]:
    return [ByteRange(f"t{number}", *place) for number, place in enumerate(places)]


def members_of(items: list[ByteRange], target: int = 0, base: int = 0) -> Members:
    return Members(items, target, base, base, 0, 4096)


def test_items_in_file_order_are_not_copied() -> None:
    ordered = items_at((0, 0, 10), (0, 10, 0), (0, 10, 5), (1, 0, 5))
    assert ranges.in_file_order(ordered) is ordered
    # Stable: empty items may begin where another one does.
    assert ranges.in_file_order(ordered[::-1]) == [ordered[n] for n in (0, 2, 1, 3)]


@pytest.mark.parametrize(
    "item", [(1, 2, 3), ["t", 0, 0, 1], ("t", "a", "b", "c"), ("t", 0, 0, 1 << 64)]
)
def test_what_is_no_byte_range_raises(item: object) -> None:
    for function in (ranges.in_file_order, ranges.bytes_of):
        with pytest.raises((TypeError, OverflowError)):
            function([item])  # type: ignore[list-item]


def test_end_of_items_with_enough_bytes_is_the_nearest() -> None:
    items = items_at((0, 0, 10), (0, 10, 10), (0, 20, 10))
    assert ranges.bytes_of(items) == 30 and ranges.bytes_of([]) == 0
    assert [ranges.end_of(items, 0, nbytes) for nbytes in (0, 1, 10, 11, 30, 31)] == [
        0,
        1,
        1,
        2,
        3,
        3,
    ]
    assert ranges.end_of(items, 2, 11) == ranges.end_of(items, 3, 1) == 3


def test_items_below_the_least_size_are_not_rounded() -> None:
    items = items_at((0, 0, 10), (0, 10, 513), (0, 600, 512))
    assert ranges.rounded(items, 100, 512) == (2, 1536)
    assert ranges.rounded(items, 514, 512) == (0, 0)


def test_merged_items_have_no_gap_above_the_limit() -> None:
    dice = random.Random(7)
    places = [(dice.randrange(3), dice.randrange(5000), dice.randrange(40)) for _ in range(200)]
    items = sorted(items_at(*places), key=FILE_ORDER)
    found, empty = ranges.merged(items, 16)
    assert empty == [each for each in items if each.nbytes == 0] != []
    assert [each for *_, inside in found for each in inside] == [i for i in items if i.nbytes]
    for number, (shard, start, end, inside) in enumerate(found):
        assert {each.shard for each in inside} == {shard}
        assert start == inside[0].offset and end == max(i.offset + i.nbytes for i in inside)
        wanted = {byte for i in inside for byte in range(i.offset, i.offset + i.nbytes + 16)}
        assert wanted >= set(range(start, end)), "a larger gap was merged"
        if number and found[number - 1][0] == shard:
            last = found[number - 1][2]
            assert start > last + 16 or start < last, "a small gap was not"
        for one, other in itertools.pairwise(inside):
            assert one.offset + one.nbytes <= other.offset, "items that overlap were merged"
    assert ranges.merged([], 0) == ([], [])


def test_groups_exceed_the_limit_only_by_one_large_item() -> None:
    items = items_at(
        (0, 0, 100), (0, 100, 28), (0, 200, 0), (0, 200, 300), (0, 500, 1), (0, 501, 1)
    )
    assert ranges.laid_out(items, 64, 192) == [
        (192, {"t0": 0, "t1": 128}),
        (320, {"t3": 0}),
        (128, {"t4": 0, "t5": 64}),
    ]
    assert ranges.laid_out([], 64, 192) == []


def test_shares_join_neighbours_inside_an_allocation() -> None:
    items = items_at((0, 100, 50), (0, 150, 50), (0, 200, 50), (0, 300, 50))
    addresses = {"t0": 1000, "t1": 1050, "t2": 1100, "t3": 1200}
    allocations = {1000: (900, 200), 1100: (1100, 1000)}
    found = ranges.shares([members_of(items, base=100)], addresses, 1, allocations.__getitem__)
    # t2 is a neighbour of t1, but of another allocation; t3 is no neighbour of t2 in the file.
    assert found == [[(0, 100, 1000), (100, 50, 1100), (200, 50, 1200)]]


def test_shares_of_targets_are_apart() -> None:
    """Also if the memory of the second begins where that of the first ends."""
    members = [members_of(items_at((0, 0, 10))), members_of([ByteRange("u", 0, 10, 10)], 2, 10)]
    found = ranges.shares(members, {"t0": 100, "u": 110}, 3, lambda address: (0, 1000))
    assert found == [[(0, 10, 100)], [], [(0, 10, 110)]]


def test_item_without_an_address_raises() -> None:
    with pytest.raises(KeyError):
        ranges.shares([members_of(items_at((0, 0, 10)))], {}, 1, lambda address: (0, 0))
