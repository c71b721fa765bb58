"""Slices of tensors, and the byte ranges that hold them. Pure arithmetic, without torch.

    whole      t[...]          one range
    rows       t[a:b]          one range: only these rows are read
    columns    t[:, a:b]       one range per row if the gaps between them are worth skipping,
                               else all of these rows, sliced in memory

Only rows that the index names are read. If ranges are read one by one, each may read one direct-I/O
block more at either end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import prod
from operator import index as whole_number, mul
from typing import TYPE_CHECKING, Any, NamedTuple

from gdsload.dtypes import DTYPES
from gdsload.errors import CheckpointError, shown
from gdsload.planning.read_plan import GAP_BYTES, ByteRange, ranges_of

if TYPE_CHECKING:
    from gdsload.checkpoint import TensorInfo

# A slice of more ranges is read by whole rows: more reads would cost more than the gaps.
MAX_RANGES = 8192


class PartName(str):
    """The name of a part of a tensor, such as `w[0:2]`.

    Never equal to a `str`: a checkpoint may have a tensor named `w[0:2]`. Equal to a PartName of
    the same tensor and part.
    """

    __slots__ = ("_made_of",)
    _made_of: tuple[str, str]

    def __new__(cls, tensor: str, part: str) -> PartName:
        made = super().__new__(cls, tensor + part)
        made._made_of = tensor, part
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PartName) and self._made_of == other._made_of

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((PartName, self._made_of))

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return self._made_of


class TensorSlice(NamedTuple):
    """The wanted part of a tensor.

    Attributes:
        key: Differs between different slices.
        parts: The byte ranges, each described as a tensor.
        shape: If not None: the parts are stacked and viewed in this shape. If None, there is one.
        index: If not None: an index to apply to the result in memory.
    """

    key: str
    parts: tuple[TensorInfo, ...]
    shape: tuple[int, ...] | None = None
    index: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return sum([part.nbytes for part in self.parts])


def part_ranges(slices: Iterable[TensorSlice]) -> list[ByteRange]:
    """The byte ranges of these slices, with the names of their parts."""
    return ranges_of(part for each in slices for part in each.parts)


def read_the_same(slices: Iterable[TensorSlice]) -> bool:
    """Whether these slices of a tensor are read from the same bytes, each by its `index`."""
    read = set()
    for one in slices:
        if one.index is None:
            return False
        read.add((one.shape, *(part._replace(name="") for part in one.parts)))
    return len(read) < 2


def whole(info: TensorInfo) -> TensorSlice:
    """All of a tensor."""
    return TensorSlice(info.name, (info,))


def slice_of(info: TensorInfo, index: Any = ...) -> TensorSlice:
    """The slice for `tensor[index]`. What ranges cannot express is applied in memory.

    Args:
        info: The tensor.
        index: Whatever torch accepts between brackets.

    Example:
        >>> slice_of(TensorInfo("w", "F32", (4, 6), 0, 128, 96), slice(1, 3)).nbytes
        48
    """
    items = index if isinstance(index, tuple) else (index,)
    if index is Ellipsis or not items:
        return whole(info)
    if DTYPES[info.dtype].bits % 8 or len(items) > len(info.shape):
        return _in_memory(info, index)
    ranges: list[tuple[int, int]] = []
    for item, size in zip(items, info.shape, strict=False):
        if not isinstance(item, slice) or item.step not in (None, 1):
            if ranges:
                first, rows = slice(None), ranges[0]
            elif isinstance(item, slice) and item.step > 1:
                first, rows = slice(None, None, item.step), _bounds(item, size)
            else:
                return _in_memory(info, items)
            # The index begins with a range of rows: only these are read.
            found = _in_memory(rows_of(info, *rows), (first, *items[1:]))
            key = PartName(info.name, f"[{items}]")
            return found._replace(key=key, parts=(found.parts[0]._replace(name=key),))
        start, stop, _ = item.indices(size)
        ranges.append((start, max(stop, start)))
    ranges += [(0, size) for size in info.shape[len(ranges) :]]
    return _ranged(info, ranges)


def _bounds(item: slice, size: int) -> tuple[int, int]:
    """The first row of a range with steps, and the one after its last; equal if it is empty."""
    rows = range(*item.indices(size))
    return (rows[0], rows[-1] + 1) if rows else (0, 0)


def _in_memory(info: TensorInfo, index: Any) -> TensorSlice:
    key = PartName(info.name, f"[{index}]")
    return TensorSlice(key, (info._replace(name=key),), index=index)


def _ranged(info: TensorInfo, ranges: list[tuple[int, int]]) -> TensorSlice:
    shape = info.shape
    lengths = tuple(stop - start for start, stop in ranges)
    if lengths == shape:
        return whole(info)
    part = ", ".join(f"{start}:{stop}" for start, stop in ranges)
    key = PartName(info.name, f"[{part}]")
    if 0 in lengths:
        return TensorSlice(key, (info._replace(name=key, shape=lengths, nbytes=0),))
    strides = [info.nbytes // prod(shape[: d + 1]) for d in range(len(shape))]
    partial = [d for d in range(len(shape)) if lengths[d] != shape[d]]
    # The innermost dimension whose gaps are worth skipping; inner ones are sliced in memory.
    depth = next(
        (
            d
            for d in reversed(partial)
            if (shape[d] - lengths[d]) * strides[d] > GAP_BYTES and prod(lengths[:d]) <= MAX_RANGES
        ),
        0,
    )
    index = None
    if partial[-1] > depth:
        inner = ranges[depth + 1 : partial[-1] + 1]
        index = (*[slice(None)] * (depth + 1), *[slice(*ends) for ends in inner])
    start, stop = ranges[depth]
    if depth == 0:
        return TensorSlice(key, (rows_of(info, start, stop)._replace(name=key),), index=index)
    parts = tuple(
        info._replace(
            name=PartName(key, f"#{number}"),
            shape=(stop - start, *shape[depth + 1 :]),
            offset=info.offset + sum(map(mul, (*outer, start), strides)),
            nbytes=(stop - start) * strides[depth],
        )
        for number, outer in enumerate(product(*(range(*ends) for ends in ranges[:depth])))
    )
    return TensorSlice(key, parts, (*lengths[: depth + 1], *shape[depth + 1 :]), index)


class WantedTensor(NamedTuple):
    """A tensor that a caller wants, or a slice of one.

    Attributes:
        info: The whole tensor.
        slice: What is read of it.
        kept: The shape of the slice, with the dimensions that a number in the index removes.
        removed: These dimensions, each of length 1 in `kept`.
    """

    info: TensorInfo
    slice: TensorSlice
    kept: tuple[int, ...]
    removed: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result, in elements as in the header."""
        return tuple(n for d, n in enumerate(self.kept) if d not in self.removed)

    @property
    def nbytes(self) -> int:
        """The size of the result in bytes, at most what is read."""
        return prod(self.kept) * DTYPES[self.info.dtype].bits // 8


def wanted_tensors(
    infos: Sequence[TensorInfo], slices: Mapping[str, Any] | None = None
) -> list[WantedTensor]:
    """What is wanted of each tensor.

    Args:
        infos: The tensors.
        slices: The index of each tensor that is not wanted as a whole, by name: a number, a slice,
            an ellipsis, or a tuple of these.

    Raises:
        CheckpointError: A tensor with an index is not among `infos`, or has elements of less than
            a byte and an index in its last dimension.
        IndexError: An index is outside its tensor, or has too many dimensions.
        TypeError: An index is of another type.
    """
    rest = dict(slices or {})
    wanted = []
    for info in infos:
        if info.name in rest:
            wanted.append(_indexed(info, rest.pop(info.name)))
        else:
            wanted.append(WantedTensor(info, whole(info), info.shape))
    for name in rest:
        raise CheckpointError(
            f"slices has an index for {shown(name)}, which is not among the tensors to load",
            tensor=name,
        )
    return wanted


def _indexed(info: TensorInfo, index: Any) -> WantedTensor:
    items = index if isinstance(index, tuple) else (index,)
    shape = info.shape
    text = f"the index {index!r} of tensor {shown(info.name)}, of shape {list(shape)}"
    # By identity: arrays among the items compare element by element.
    before = next((position for position, item in enumerate(items) if item is Ellipsis), None)
    if before is not None:
        after = len(items) - before - 1
        middle = (slice(None),) * (len(shape) - before - after)
        items = (*items[:before], *middle, *items[before + 1 :])
    if len(items) > len(shape):
        raise IndexError(f"{text}, has too many dimensions")
    ranges, removed = [], []
    for dimension, (item, size) in enumerate(zip(items, shape, strict=False)):
        if isinstance(item, slice):
            if item.step is not None and item.step < 1:
                raise IndexError(f"{text}, goes backwards")
            start, stop, step = item.indices(size)
            # torch computes with the step: one beyond the end, of any size, is the same.
            ranges.append(slice(start, stop, min(step, max(size, 1))))
            continue
        if isinstance(item, bool) or not hasattr(item, "__index__"):
            raise TypeError(f"{text}, has {item!r}: numbers, slices and one ellipsis are allowed")
        number = whole_number(item)
        if not -size <= number < size:
            raise IndexError(f"{text}, is outside it")
        ranges.append(slice(number % size, number % size + 1, 1))
        removed.append(dimension)
    kept = (
        *(len(range(*r.indices(n))) for r, n in zip(ranges, shape, strict=False)),
        *shape[len(ranges) :],
    )
    if DTYPES[info.dtype].bits % 8 and kept[-1:] != shape[-1:]:
        raise CheckpointError(
            f"{text}: its elements share bytes in the last dimension", tensor=info.name
        )
    found = slice_of(info, tuple(ranges))
    return WantedTensor(info, found, kept, tuple(removed))


def rows_of(info: TensorInfo, start: int, stop: int) -> TensorInfo:
    """Rows `start` to `stop` (excluded) of a tensor, as a tensor."""
    row = info.nbytes // info.shape[0] if info.shape[0] else 0
    return info._replace(
        shape=(stop - start, *info.shape[1:]),
        offset=info.offset + start * row,
        nbytes=(stop - start) * row,
    )
