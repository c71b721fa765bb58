"""Which rank reads and sends which bytes: arithmetic, checked against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from gdsload.checkpoint import TensorInfo
from gdsload.distribution.exchange import box_of, boxes_of
from gdsload.distribution.shares import (
    Box,
    Layout,
    even_part,
    layout_of,
    messages_of,
    shares_of,
    wanted_bytes_of,
    windows_of,
)

BLOCK = 4096


def info(name: str, shape: tuple[int, ...], offset: int = 128, dtype: str = "I16") -> TensorInfo:
    return TensorInfo(name, dtype, shape, 0, offset, int(np.prod(shape)) * 2)


@st.composite
def wants(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], list[list[Box | None]], int, int]:
    """Shapes, the box of each rank by tensor, the number of ranks and the size of a window."""
    ranks = draw(st.integers(1, 5))
    shapes = draw(st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), max_size=5))
    ends = st.tuples(st.integers(0, 6), st.integers(0, 6))
    boxes: list[list[Box | None]] = []
    for shape in shapes:
        box = st.tuples(
            *[ends.map(lambda e, n=n: tuple(sorted(min(x, n) for x in e))) for n in shape]
        )
        boxes.append(
            [draw(st.none() | st.just(box_of(info("", shape), None)) | box) for _ in range(ranks)]
        )
    return shapes, boxes, ranks, draw(st.integers(1, 200))


@settings(max_examples=100, deadline=None)
@given(wants())
def test_every_rank_receives_each_wanted_byte_once(
    case: tuple[list[tuple[int, ...]], list[list[Box | None]], int, int],
) -> None:
    shapes, boxes, ranks, window_bytes = case
    layouts: list[Layout] = []
    offset = 128
    for number, shape in enumerate(shapes):
        layouts.append(layout_of(info(str(number), shape, offset), boxes[number]))
        offset += layouts[-1].info.nbytes
    files = [np.arange(int(np.prod(s)), dtype="<i2").view(np.uint8) for s in shapes]
    canonical = [
        raw.reshape(layout.rows, *layout.row_shape)
        for raw, layout in zip(files, layouts, strict=True)
    ]
    got = [{n: [] for n in range(len(shapes))} for _ in range(ranks)]  # type: ignore[var-annotated]
    read = [np.zeros(layout.rows, dtype=int) for layout in layouts]
    for window in windows_of(layouts, window_bytes):
        shares = shares_of(layouts, window, ranks)
        for share in shares:
            for rows in share:
                read[rows.tensor][rows.start : rows.stop] += 1
            for rank in range(ranks):
                for message in messages_of(layouts, share, rank):
                    nbytes = 0
                    for _, rows in message.parts:
                        box = layouts[rows.tensor].boxes[rank] or ()
                        index = (slice(rows.start, rows.stop), *[slice(*e) for e in box[1:]])
                        got[rank][rows.tensor].append((rows.start, canonical[rows.tensor][index]))
                        nbytes += got[rank][rows.tensor][-1][1].size
                    assert nbytes == message.nbytes
    assert all((times <= 1).all() for times in read)
    for rank in range(ranks):
        for number, shape in enumerate(shapes):
            box = boxes[number][rank]
            parts = [part.reshape(-1) for _, part in sorted(got[rank][number], key=lambda p: p[0])]
            ours = np.concatenate([np.zeros(0, np.uint8), *parts])
            want = np.zeros(0, np.uint8)
            if box is not None:
                tensor = files[number].view("<i2").reshape(shape)
                want = np.ascontiguousarray(tensor[tuple(slice(*e) for e in box)]).reshape(-1)
            assert ours.tobytes() == want.tobytes()
            assert layouts[number].wanted_bytes(rank) == want.nbytes
    sums = [sum(layout.wanted_bytes(rank) for layout in layouts) for rank in range(ranks)]
    assert wanted_bytes_of(layouts, ranks) == sums


def test_bytes_of_a_tensor_that_all_ranks_want_are_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[int] = []
    real = Layout.wanted_bytes

    def wanted_bytes(self: Layout, rank: int) -> int:
        counted.append(rank)
        return real(self, rank)

    monkeypatch.setattr(Layout, "wanted_bytes", wanted_bytes)
    whole: list[Box | None] = [None, *[((0, 8), (0, 4))] * 3]
    layouts = [layout_of(info(name, (8, 4)), whole) for name in "ab"]
    assert wanted_bytes_of(layouts, 4) == [0, 128, 128, 128]
    assert counted == [1, 1]


def test_shares_of_a_window_have_equal_bytes_and_end_at_blocks() -> None:
    whole: list[Box | None] = [((0, 1_000_000),)] * 4
    layouts = [layout_of(info("a", (1_000_000,), 136), whole)]
    (window,) = windows_of(layouts, 1 << 30)
    shares = shares_of(layouts, window, 4)
    sizes = [sum(rows.stop - rows.start for rows in share) for share in shares]
    assert sum(sizes) == 2_000_000
    assert max(sizes) - min(sizes) <= 2 * BLOCK
    assert all((136 + share[0].start) % BLOCK == 0 for share in shares[1:])


def test_more_ranks_than_rows_leave_ranks_without_a_share() -> None:
    boxes: list[Box | None] = [((0, 2), (rank, rank + 1)) for rank in range(8)]
    layouts = [layout_of(info("a", (2, 8)), boxes)]
    (window,) = windows_of(layouts, 1 << 30)
    shares = shares_of(layouts, window, 8)
    assert sum(rows.stop - rows.start for share in shares for rows in share) == 2
    assert sum(not share for share in shares) == 6


def test_rows_that_no_rank_wants_are_not_read() -> None:
    layouts = [layout_of(info("a", (100, 10)), [((10, 20), (0, 10)), ((15, 30), (0, 10)), None])]
    ((rows,),) = windows_of(layouts, 1 << 30)
    assert (rows.start, rows.stop) == (10, 30)
    apart = layout_of(info("a", (100, 10)), [((90, 100), (0, 10)), None, ((5, 10), (0, 10))])
    (window,) = windows_of([apart], 1 << 30)
    assert [(rows.start, rows.stop) for rows in window] == [(5, 10), (90, 100)]


def test_large_tensor_is_divided_into_windows() -> None:
    layouts = [layout_of(info("a", (100, 10)), [((0, 100), (0, 10)), ((0, 50), (0, 10))])]
    assert [len(window) for window in windows_of(layouts, 600)] == [1, 1, 1, 1]


def test_even_parts_are_those_of_chunk() -> None:
    assert [even_part(10, number, 4) for number in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert [even_part(2, number, 4) for number in range(4)] == [(0, 1), (1, 2), (2, 2), (2, 2)]


def test_box_of_a_dimension_or_an_index() -> None:
    tensor = info("a", (10, 6))
    assert box_of(tensor, -1, 1, 3) == ((0, 10), (2, 4))
    assert box_of(tensor, np.int64(1), 1, 3) == ((0, 10), (2, 4))
    assert box_of(tensor, (slice(2, 100),)) == ((2, 10), (0, 6))
    assert box_of(tensor, slice(2, 4)) == ((2, 4), (0, 6))
    assert boxes_of([tensor], {"a": 0}, 3, 4) == [((9, 10), (0, 6))]


@pytest.mark.parametrize(
    "shard,text",
    [(2, "has no dim 2"), ((slice(None, None, 2),), "has a step"), ((slice(1),) * 3, "has 2")],
)
def test_wrong_shard_is_refused(shard: int | tuple[slice, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        box_of(info("a", (10, 6)), shard)


@pytest.mark.parametrize("shard", [True, 1.0, "0", (0,), (..., slice(1)), ...])
def test_shard_of_another_type_is_refused_with_the_name_of_its_tensor(shard: Any) -> None:
    with pytest.raises(TypeError, match=r"shard of tensor 'a' .* a tuple of slices"):
        box_of(info("a", (10, 6)), shard)


def test_elements_that_share_a_byte_are_not_divided() -> None:
    tensor = TensorInfo("a", "F4", (4, 8), 0, 128, 16)
    with pytest.raises(ValueError, match="elements share bytes"):
        layout_of(tensor, [((0, 4), (0, 4)), ((0, 4), (4, 8))])
    assert layout_of(tensor, [((0, 2), (0, 8)), None]).row_bytes == 4
