"""A plan is arithmetic: whatever is wanted of whatever file, each byte comes once, to its place."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from unittest import mock

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
    byte_ranges_of,
    grouped,
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
            ranges,
            sizes,
            limits,
            blocks=blocks,
            window_bytes=window_bytes,
            gap_bytes=gap_bytes,
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
        align = max(blocks[read.shard] if blocks else 0, limits.block, PAGE)
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
    ("bad", "fault"),
    [
        ({"block": 0}, "block=0 must be a power of two"),
        ({"block": 1000}, "block=1000 must be a power of two"),
        ({"max_request": 0}, "max_request=0 must be a positive multiple of block=4096"),
        ({"max_request": 4097}, "max_request=4097 must be a positive multiple of block=4096"),
        ({"max_request": 512}, "max_request=512 must be a positive multiple of block=4096"),
        ({"depth": 0}, "depth=0 must be at least 1"),
    ],
)
def test_invalid_limits_raise(bad: dict[str, int], fault: str) -> None:
    with pytest.raises(ValueError) as caught:
        Limits(**bad)
    assert str(caught.value) == fault


def test_smallest_limits_are_accepted() -> None:
    least = Limits(max_request=1, block=1, depth=1, io_modes=("direct",))
    assert (least.max_request, least.block, least.depth) == (1, 1, 1)
    assert least.io_modes == ("direct",)
    assert set(Limits().io_modes) == {"direct", "buffered"}
    assert (Limits().max_request, Limits().block, Limits().depth) == (4 << 20, 4096, 16)


@pytest.mark.parametrize(
    ("sizes", "most", "groups"),
    [
        ([3, 4, 9, 1], 8, [[3, 4], [9], [1]]),
        ([4, 4, 1], 8, [[4, 4], [1]]),
        ([9], 8, [[9]]),
        ([0, 0, 8, 0], 8, [[0, 0, 8, 0]]),
        ([], 8, []),
    ],
)
def test_items_are_grouped_up_to_a_size(
    sizes: list[int], most: int, groups: list[list[int]]
) -> None:
    assert list(grouped(sizes, most, size=int)) == groups
    ranges = [ByteRange(str(number), 0, 0, size) for number, size in enumerate(sizes)]
    assert [[each.nbytes for each in group] for group in grouped(ranges, most)] == groups


def test_small_plan_is_as_computed_by_hand() -> None:
    ranges = [
        ByteRange("late", 1, 100, 9000),
        ByteRange("far", 0, 1_000_000, 10),
        ByteRange("near", 0, 8, 5000),
        ByteRange("empty", 0, 8, 0),
    ]
    plan = plan_reads(ranges, [1_000_010, 9100], Limits(max_request=8192))
    assert plan.transfers == (
        (0, 0, 8192, 8192, 0, 0, "direct", 0),
        (0, 999_424, 4096, 586, 0, 999_424, "direct", 1),
        (1, 0, 8192, 8192, 1, 0, "direct", 2),
        (1, 8192, 4096, 908, 1, 8192, "direct", 3),
    )
    assert plan.targets == ((0, 0, 1_003_520), (1, 0, 12_288))
    assert plan.merged_ranges == ((0, 8, 5000), (0, 1_000_000, 10), (1, 100, 9000))
    assert plan.windows == ((0, 4),)
    assert plan.locations == {
        "near": Location(0, 8, 0, 0),
        "far": Location(0, 1_000_000, 1, 1),
        "late": Location(1, 100, 2, 3),
        "empty": Location(-1, 0, 0, -1),
    }
    assert plan.locations.get("gone") is None
    assert plan.locations.get("gone", 5) == 5
    assert plan.locations.get("late") == plan.locations["late"]
    assert list(plan.locations) == ["near", "far", "late", "empty"] and len(plan.locations) == 4
    assert plan.summary() == (
        "4 tensors, 14.01 kB wanted\n"
        "3 merged ranges in 2 targets, 1 window\n"
        "4 reads of 4.10 kB to 8.19 kB, 17.88 kB to read (27.609% over)"
    )
    assert [each.name for each in plan.ranges] == ["near", "far", "late"]
    assert (plan.wanted_bytes, plan.read_bytes) == (14_010, 8192 + 586 + 8192 + 908)
    windows = plan_reads(ranges, [1_000_010, 9100], Limits(), window_bytes=5010).windows
    assert windows == ((0, 1), (1, 3))


def test_summary_of_the_smallest_plans_has_no_division_by_zero() -> None:
    assert ReadPlan().summary().endswith("0 reads of 0 B to 0 B, 0 B to read (0.000% over)")
    one = plan_reads([ByteRange("a", 0, 0, 1)], [3], Limits())
    assert one.summary().endswith("of 4.10 kB to 4.10 kB, 3 B to read (200.000% over)")


def test_requests_are_aligned_to_the_block_of_the_backend_too() -> None:
    limits = Limits(block=65_536)
    plan = plan_reads([ByteRange("a", 0, 70_000, 100)], [80_000], limits, blocks=[512])
    assert [transfer[:4] for transfer in plan.transfers] == [(0, 65_536, 65_536, 14_464)]


def test_shared_block_of_two_shards_is_that_of_each() -> None:
    ranges = [ByteRange("a", 0, 5000, 100), ByteRange("b", 1, 5000, 100)]
    plan = plan_reads(ranges, [70_000, 70_000], Limits(), blocks=[65_536, 512])
    assert [transfer[:4] for transfer in plan.transfers] == [
        (0, 0, 65_536, 65_536),
        (1, 4096, 4096, 4096),
    ]


@pytest.mark.parametrize(
    ("second", "blocks", "target"),
    [(65_541, [65_536], (0, 0, 131_072)), (1_000_000, None, (0, 4096, 999_424))],
    ids=["neighbours", "beyond the first block"],
)
def test_target_spans_the_transfers_of_its_shard(
    second: int, blocks: list[int] | None, target: tuple[int, int, int]
) -> None:
    first = 0 if blocks else 5000
    ranges = [ByteRange("a", 0, first, 10), ByteRange("b", 0, second, 10)]
    plan = plan_reads(ranges, [2_000_000], Limits(), blocks=blocks, gap_bytes=0)
    assert plan.targets == (target,)
    assert len(plan.transfers) == len(plan.merged_ranges) == 2


def test_large_range_behind_a_gap_is_read_in_steps_of_its_target() -> None:
    ranges = [ByteRange("a", 0, 0, 4096), ByteRange("b", 0, 81_920, 20_000)]
    plan = plan_reads(ranges, [101_920], Limits(max_request=16_384), gap_bytes=0)
    starts = [(read.target_offset, read.wanted) for read in plan.transfers]
    assert starts == [(0, 4096), (81_920, 16_384), (98_304, 3616)]
    ranges[1] = ByteRange("b", 0, 73_728, 20_000)  # between two steps
    plan = plan_reads(ranges, [93_728], Limits(max_request=16_384), gap_bytes=0)
    starts = [(read.target_offset, read.wanted) for read in plan.transfers]
    assert starts == [(0, 4096), (73_728, 8192), (81_920, 11_808)]
    assert plan.locations["b"][2:] == (1, 2)
    ranges[1] = ByteRange("b", 0, 73_728, 16_000)  # one request is enough
    plan = plan_reads(ranges, [89_728], Limits(max_request=16_384), gap_bytes=0)
    assert len(plan.transfers) == 2


@pytest.mark.parametrize(("more", "targets"), [(0, 1), (PAGE, 2)])
def test_gap_of_the_limit_is_inside_a_target_wherever_it_begins(more: int, targets: int) -> None:
    second = 80_000_000 // PAGE * PAGE
    third = second + PAGE + TARGET_GAP_BYTES + more
    ranges = [ByteRange("a", 0, second, 10), ByteRange("b", 0, third, 10)]
    assert len(plan_reads(ranges, [third + PAGE], Limits()).targets) == targets


def test_empty_ranges_of_all_windows_have_locations() -> None:
    ranges = [ByteRange(name, 0, 0, 4096 * (name in "bd")) for name in "abcd"]
    plan = plan_reads(ranges, [4096], Limits(), window_bytes=4096)
    assert len(plan.windows) == 2
    assert plan.locations["a"] == plan.locations["c"] == Location(-1, 0, 0, -1)


def test_mapped_transfers_need_no_buffer() -> None:
    ranges = [ByteRange("a", 0, 0, 8192), ByteRange("b", 1, 0, 5000)]
    plan = plan_reads(
        ranges, [8192, 5000], Limits(), io_mode_of=lambda shard, *_: ["mapped", "direct"][shard]
    )
    assert plan.mapped_targets == {0}
    assert (plan.buffer_bytes, plan.read_bytes) == (5000, 13_192)


def test_byte_ranges_are_those_of_tensors_in_the_order_of_names(tiny_checkpoint: Path) -> None:
    with gdsload.Checkpoint.open(tiny_checkpoint) as checkpoint:
        every = [
            ByteRange(info.name, info.shard, info.offset, info.nbytes)
            for info in checkpoint.tensors.values()
        ]
        assert byte_ranges_of(checkpoint) == every
        assert byte_ranges_of(checkpoint, [every[-1].name, every[0].name]) == [every[-1], every[0]]


def test_merged_ranges_keep_two_blocks_of_distance() -> None:
    ranges = [ByteRange("a", 0, 0, 10), ByteRange("b", 0, 8202, 10)]
    assert merged_ranges_of(ranges, gap_bytes=0) == [(0, 0, 8212)]
    apart = [ranges[0], ByteRange("b", 0, 8203, 10)]
    assert merged_ranges_of(apart, gap_bytes=0) == [(0, 0, 10), (0, 8203, 10)]
    assert merged_ranges_of(apart, gap_bytes=8193) == [(0, 0, 8213)]
    wide = plan_reads(apart, [9000], Limits(65_536, 65_536), gap_bytes=0)
    assert len(wide.merged_ranges) == 1


def test_plan_that_fits_into_no_memory_is_refused(tmp_path: Path) -> None:
    """A sparse file may declare a tensor of any size."""
    path, nbytes = tmp_path / "model.safetensors", 8 << 40
    header = json.dumps({"w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}})
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    try:
        os.truncate(path, path.stat().st_size + nbytes)
    except OSError as error:
        pytest.skip(f"no sparse file of this size: {error}")
    no_room = gdsload.PlacementError("no room")
    with (
        mock.patch("gdsload.loading.session.require_room", side_effect=no_room),
        pytest.raises(gdsload.PlacementError, match="no room"),
    ):
        gdsload.plan(path)


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


def test_negative_read_window_is_refused(tiny_checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="window_bytes=-1 must be at least 0"):
        gdsload.plan(tiny_checkpoint, window_bytes=-1)
