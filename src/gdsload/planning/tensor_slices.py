"""Parts of a tensor, and the runs of bytes that bring them: arithmetic, without torch.

    whole      t[...]          one run
    rows       t[a:b]          one run: only these rows are read
    columns    t[:, a:b]       one run per row where what lies between them is worth skipping,
                               else the rows that hold them, cut in memory

Never more than the rows that the index names is read. Where runs are read one by one, each brings
at most one direct-I/O block more at either end than was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from gdsload.dtypes import DTYPES
from gdsload.planning.read_plan import GAP_BYTES, ByteRange
from gdsload.system.gc_control import collector_paused

if TYPE_CHECKING:
    from gdsload.checkpoint import TensorInfo

# A tensor that falls into more runs than this is read by whole rows: the requests would cost more
# than the bytes between them.
MAX_RUNS = 8192


class TensorSlice(NamedTuple):
    """What is wanted of a tensor.

    `parts` are runs of the file, each a small tensor of its own; there is one, or they are stacked
    and seen as `shape`. `index` is what remains to be applied in memory, None for nothing. `key`
    tells two slices apart.
    """

    key: str
    parts: tuple[TensorInfo, ...]
    shape: tuple[int, ...] | None = None
    index: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of the runs."""
        parts = self.parts
        return parts[0].nbytes if len(parts) == 1 else sum(part.nbytes for part in parts)


@collector_paused()
def runs_of(slices: Iterable[TensorSlice]) -> list[ByteRange]:
    """The runs of bytes that these slices are made of, by the names of their parts."""
    return [
        ByteRange(p.name, p.shard, p.offset, p.nbytes)
        for tensor_slice in slices
        for p in tensor_slice.parts
    ]


def whole(info: TensorInfo) -> TensorSlice:
    """All of a tensor."""
    return TensorSlice(info.name, (info,))


def slice_of(info: TensorInfo, index: Any = ...) -> TensorSlice:
    """What `tensor[index]` needs. An index that is not made of ranges is applied in memory."""
    if index is Ellipsis or index == () or not info.shape:
        return whole(info) if index is Ellipsis or index == () else _in_memory(info, index)
    items = index if isinstance(index, tuple) else (index,)
    if DTYPES[info.dtype].bits % 8 or len(items) > len(info.shape):
        return _in_memory(info, index)
    ranges: list[tuple[int, int]] = []
    for item, size in zip(items, info.shape, strict=False):
        if not isinstance(item, slice) or item.step not in (None, 1):
            return _leading_rows(info, items, ranges)
        start, stop, _ = item.indices(size)
        ranges.append((start, max(stop, start)))
    ranges += [(0, size) for size in info.shape[len(ranges) :]]
    return _ranged(info, ranges)


def _leading_rows(
    info: TensorInfo, items: tuple[Any, ...], known: list[tuple[int, int]]
) -> TensorSlice:
    """An index that only begins with a range of rows, or not even with that."""
    if not known:
        return _in_memory(info, items)
    rows = _in_memory(rows_of(info, *known[0]), (slice(None), *items[1:]))
    key = f"{info.name}[{items}]"
    return rows._replace(key=key, parts=(rows.parts[0]._replace(name=key),))


def _in_memory(info: TensorInfo, index: Any) -> TensorSlice:
    key = f"{info.name}[{index}]"
    return TensorSlice(key, (info._replace(name=key),), index=index)


def _ranged(info: TensorInfo, ranges: list[tuple[int, int]]) -> TensorSlice:
    shape = info.shape
    partial = [d for d, (start, stop) in enumerate(ranges) if stop - start != shape[d]]
    if not partial:
        return whole(info)
    key = f"{info.name}[{', '.join(f'{start}:{stop}' for start, stop in ranges)}]"
    if any(start == stop for start, stop in ranges):
        lengths = tuple(stop - start for start, stop in ranges)
        return TensorSlice(key, (info._replace(name=key, shape=lengths, nbytes=0),))
    depth = _depth(info, ranges, partial)
    rest = tuple(
        slice(None) if d <= depth else slice(*ranges[d])
        for d in range(max(partial) + 1)
    )  # fmt: skip
    index = rest if max(partial) > depth else None
    if depth == 0:
        return TensorSlice(key, (rows_of(info, *ranges[0])._replace(name=key),), index=index)
    inner = info.nbytes // prod(shape[: depth + 1])
    start, stop = ranges[depth]
    parts = []
    for number, place in enumerate(product(*(range(*ranges[d]) for d in range(depth)))):
        line = 0
        for d, at in enumerate(place):
            line = line * shape[d] + at
        parts.append(
            info._replace(
                name=f"{key}#{number}",
                shape=(stop - start, *shape[depth + 1 :]),
                offset=info.offset + (line * shape[depth] + start) * inner,
                nbytes=(stop - start) * inner,
            )
        )
    lengths = tuple(ranges[d][1] - ranges[d][0] for d in range(depth + 1))
    return TensorSlice(key, tuple(parts), (*lengths, *shape[depth + 1 :]), index)


def _depth(info: TensorInfo, ranges: list[tuple[int, int]], partial: list[int]) -> int:
    """The dimension down to which bytes are picked out; what lies deeper is read and cut."""
    for depth in reversed(partial):
        inner = info.nbytes // prod(info.shape[: depth + 1])
        length = ranges[depth][1] - ranges[depth][0]
        runs = prod(ranges[d][1] - ranges[d][0] for d in range(depth))
        if (info.shape[depth] - length) * inner > GAP_BYTES and runs <= MAX_RUNS:
            return depth
    return 0


def rows_of(info: TensorInfo, start: int, stop: int) -> TensorInfo:
    """The tensor that rows `start` to `stop` (excluded) of `info` are."""
    row = info.nbytes // info.shape[0] if info.shape[0] else 0
    return info._replace(
        shape=(stop - start, *info.shape[1:]),
        offset=info.offset + start * row,
        nbytes=(stop - start) * row,
    )
