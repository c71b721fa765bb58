"""A plan is arithmetic: whatever is wanted of whatever file, each byte comes once, to its place."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import gdsload
from gdsload.planning.read_plan import (
    GAP_BYTES,
    TARGET_GAP_BYTES,
    ByteRange,
    Limits,
    Location,
    ReadPlan,
    merged_ranges_of,
    plan_reads,
)

PAGE = 4096


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[ByteRange], list[int]]:
    """Byte ranges of up to three files, in any order, with gaps of all sizes."""
    sizes, ranges = [], []
    for shard in range(draw(st.integers(1, 3))):
        at = draw(st.integers(8, 5000))
        for number in range(draw(st.integers(0, 12))):
            at += draw(
                st.sampled_from([0, 0, 0, 1, 4095, 4096, 70_000, GAP_BYTES, 300_000])
                | st.integers(0, 100_000)
            )
            nbytes = draw(st.sampled_from([0, 1, 4096]) | st.integers(0, 60_000))
            ranges.append(ByteRange(f"{shard}.{number}", shard, at, nbytes))
            at += nbytes
        sizes.append(at + draw(st.integers(0, 3)))
    return draw(st.permutations(ranges)), sizes


limits = st.builds(
    lambda block, requests: Limits(max_request=requests * block, block=block),
    st.sampled_from([512, 4096, 65536]),
    st.integers(1, 20),
)


@given(
    layouts(),
    limits,
    st.sampled_from([0, 0, 1, 4096, 50_000, 1 << 20]),
    st.sampled_from([0, 1, 4096, GAP_BYTES, 1 << 20]),
    st.none() | st.lists(st.sampled_from([1, 512, 4096, 65536]), min_size=3, max_size=3),
)
def test_random_ranges_give_a_valid_plan(
    layout: tuple[list[ByteRange], list[int]],
    limits: Limits,
    window_bytes: int,
    gap_bytes: int,
    blocks: list[int] | None,
) -> None:
    ranges, sizes = layout

    def made() -> ReadPlan:
        return plan_reads(
            ranges, sizes, limits, blocks=blocks, window_bytes=window_bytes, gap_bytes=gap_bytes
        )

    plan = made()
    assert plan == made(), "the same input gives the same plan"
    assert set(plan.locations) == {item.name for item in ranges}
    assert plan.wanted_bytes == sum(item.nbytes for item in ranges)
    check_transfers(plan, sizes, limits, blocks)
    check_locations(plan, ranges)
    check_windows(plan, ranges, window_bytes)
    check_gaps(plan, ranges, max(gap_bytes, 2 * max(limits.block, PAGE)))


def check_transfers(
    plan: ReadPlan, sizes: list[int], limits: Limits, blocks: list[int] | None
) -> None:
    """Aligned, within limits, inside the file and its target, in order, and never twice to the
    same memory."""
    taken: dict[int, list[tuple[int, int]]] = {}
    for number, read in enumerate(plan.transfers):
        align = max(blocks[read.shard] if blocks else limits.block, PAGE)
        target = plan.targets[read.target]
        assert read.tag == number and read.shard == target.shard
        assert read.offset % align == 0 == read.length % align == read.target_offset % PAGE
        assert 0 < read.wanted <= read.length <= max(limits.max_request, align)
        assert read.offset + read.wanted <= sizes[read.shard]
        # Short of its length only where the file ends.
        assert read.wanted == read.length or read.offset + read.wanted == sizes[read.shard]
        assert read.offset - target.offset == read.target_offset, "congruent to the file"
        assert read.target_offset + read.length <= target.length
        taken.setdefault(read.target, []).append((read.target_offset, read.length))
    for target in plan.targets:
        assert target.offset % PAGE == 0 == target.length % PAGE
    for runs in taken.values():
        runs.sort()
        for (start, length), (following, _) in itertools.pairwise(runs):
            assert start + length <= following
            assert following - start - length <= TARGET_GAP_BYTES


def check_locations(plan: ReadPlan, ranges: list[ByteRange]) -> None:
    """The transfers of each location read all bytes of its range, and no others."""
    for item in ranges:
        location = plan.locations[item.name]
        if item.nbytes == 0:
            assert location == Location(-1, 0, 0, -1)
            continue
        target = plan.targets[location.target]
        assert target.shard == item.shard
        assert target.offset + location.offset == item.offset
        at = item.offset
        for read in plan.transfers[location.first : location.last + 1]:
            assert read.target == location.target
            assert read.offset <= at < read.offset + read.wanted, "no read that it does not need"
            at = read.offset + read.wanted
        assert at >= item.offset + item.nbytes


def check_windows(plan: ReadPlan, ranges: list[ByteRange], window_bytes: int) -> None:
    """Windows follow the caller's order and share no memory."""
    assert [first for first, _ in plan.windows] == [0, *(end for _, end in plan.windows)][:-1] or (
        not plan.windows
    )
    assert (plan.windows[-1][1] if plan.windows else 0) == len(plan.transfers)
    place = {read: number for number, window in enumerate(plan.windows) for read in range(*window)}
    locations = [plan.locations[item.name] for item in ranges if item.nbytes]
    order = [place[location.first] for location in locations]
    assert order == sorted(order)
    for location in locations:
        assert place[location.first] == place[location.last]
    owners: dict[int, int] = {}
    for read in plan.transfers:
        assert owners.setdefault(read.target, place[read.tag]) == place[read.tag]
    for number, window in enumerate(plan.windows):
        shard_offsets = [
            (plan.transfers[i].shard, plan.transfers[i].offset) for i in range(*window)
        ]
        assert shard_offsets == sorted(shard_offsets), "file order inside a window"
        held = [
            p.nbytes for p in ranges if p.nbytes and place[plan.locations[p.name].first] == number
        ]
        assert not window_bytes or sum(held) <= window_bytes or len(held) == 1
    if not window_bytes:
        assert len(plan.windows) <= 1


def check_gaps(plan: ReadPlan, ranges: list[ByteRange], gap: int) -> None:
    """Merged ranges begin and end with a wanted byte range."""
    for merged in plan.merged_ranges:
        inside = sorted(
            (item.offset, item.offset + item.nbytes)
            for item in ranges
            if item.shard == merged.shard
            and item.nbytes
            and merged.offset <= item.offset
            and item.offset + item.nbytes <= merged.end
        )
        assert inside[0][0] == merged.offset and max(end for _, end in inside) == merged.end


def test_close_ranges_are_read_once() -> None:
    ranges = [ByteRange(str(i), 0, 100 + 5000 * i, 4000) for i in range(50)]
    plan = plan_reads(ranges, [260_000], Limits())
    assert plan.read_bytes <= 260_000
    assert len(plan.merged_ranges) == len(plan.transfers) == len(plan.targets) == 1


@pytest.mark.parametrize(
    ("gap", "merged_ranges"),
    [(GAP_BYTES, 1), (GAP_BYTES + 1, 2), (0, 1), (TARGET_GAP_BYTES * 2, 2)],
)
def test_gap_decides_merging_and_targets(gap: int, merged_ranges: int) -> None:
    ranges = [ByteRange("a", 0, 0, 10_000), ByteRange("b", 0, 10_000 + gap, 10_000)]
    plan = plan_reads(ranges, [gap + 20_000], Limits())
    assert len(plan.merged_ranges) == len(merged_ranges_of(ranges)) == merged_ranges
    assert len(plan.targets) == (2 if gap > TARGET_GAP_BYTES else 1)


def test_io_mode_is_asked_for_each_transfer() -> None:
    asked: list[tuple[int, int, int]] = []

    def io_mode_of(shard: int, offset: int, length: int) -> str:
        asked.append((shard, offset, length))
        return "buffered" if offset else "direct"

    plan = plan_reads(
        [ByteRange("a", 0, 10, 20_000)], [20_010], Limits(8192), io_mode_of=io_mode_of
    )
    assert asked == [(0, 0, 8192), (0, 8192, 8192), (0, 16384, 4096)]
    assert [read.io_mode for read in plan.transfers] == ["direct", "buffered", "buffered"]
    assert [read.wanted for read in plan.transfers] == [8192, 8192, 20_010 - 16384]


def test_no_bytes_wanted_gives_no_transfers() -> None:
    assert plan_reads([], [], Limits()) == ReadPlan()
    plan = plan_reads([ByteRange("empty", 0, 100, 0)], [100], Limits())
    assert not plan.transfers and plan.locations == {"empty": Location(-1, 0, 0, -1)}


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Limits(block=0),
        lambda: Limits(block=1000),
        lambda: Limits(max_request=0),
        lambda: Limits(max_request=4097),
        lambda: Limits(max_request=512, block=4096),
        lambda: Limits(depth=0),
    ],
)
def test_invalid_limits_raise(bad: Callable[[], Limits]) -> None:
    with pytest.raises(ValueError, match=r"block|requests|depth"):
        bad()


def test_plan_of_a_checkpoint_has_its_tensors(tiny_checkpoint: Path) -> None:
    plan = gdsload.plan(tiny_checkpoint)
    with gdsload.Checkpoint.open(tiny_checkpoint) as checkpoint:
        assert list(plan.locations) == list(checkpoint.tensors)
        assert plan.wanted_bytes == checkpoint.total_bytes
        last = list(checkpoint.tensors)[-1]
    assert f"{len(plan.locations)} tensors" in plan.summary()
    backwards = gdsload.plan(tiny_checkpoint, [last, last], window_bytes=1)
    assert list(backwards.locations) == [last]
    with pytest.raises((KeyError, gdsload.CheckpointError)):
        gdsload.plan(tiny_checkpoint, ["nonsense"])
