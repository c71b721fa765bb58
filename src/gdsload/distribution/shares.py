"""The byte ranges that each rank reads, and the parts of them that it sends to each other rank.

    tensors and boxes of all ranks
      -> layouts    each tensor as rows, cut so that the box of every rank is simple
      -> windows    rows that are read and exchanged together, up to `window_bytes`
      -> shares     the rows of a window that one rank reads: contiguous in file order
      -> messages   what a reader sends to one other rank

The same input gives the same plan on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from gdsload.checkpoint import TensorInfo
from gdsload.dtypes import DTYPES
from gdsload.planning.read_plan import DEFAULT_BLOCK_BYTES
from gdsload.planning.tensor_slices import PartName

# From start to stop (excluded), for each dimension.
Box = tuple[tuple[int, int], ...]
# Rows of at least this size are a message of their own, without copies into a larger message.
SEPARATE_BYTES = 1 << 20


class Layout(NamedTuple):
    """A tensor as `rows` of bytes, and the part of it that each rank wants.

    Attributes:
        info: The tensor.
        rows: The number of rows.
        row_shape: The shape of one row; its last dimension is in bytes.
        boxes: By rank: the wanted part of (rows, *row_shape), None if nothing is wanted.
        shapes: By rank: the shape of the wanted part in elements, None if nothing is wanted.
    """

    info: TensorInfo
    rows: int
    row_shape: tuple[int, ...]
    boxes: tuple[Box | None, ...]
    shapes: tuple[tuple[int, ...] | None, ...]

    @property
    def row_bytes(self) -> int:
        """Size of one row."""
        return prod(self.row_shape)

    def rows_of(self, rank: int) -> range:
        """The rows of which this rank wants at least one byte."""
        box = self.boxes[rank]
        if box is None or any(start == stop for start, stop in box):
            return range(0)
        return range(*box[0])

    def wanted_row_bytes(self, rank: int) -> int:
        """The bytes of each wanted row that this rank wants."""
        box = self.boxes[rank]
        return 0 if box is None else prod(stop - start for start, stop in box[1:])

    def wanted_bytes(self, rank: int) -> int:
        """The bytes of the tensor that this rank wants."""
        box = self.boxes[rank]
        return 0 if box is None else prod(stop - start for start, stop in box)


def wanted_bytes_of(layouts: Sequence[Layout], ranks: int) -> list[int]:
    """By rank: the bytes of all tensors that it wants."""
    wanted = [0] * ranks
    for layout in layouts:
        before: Box | None = None
        nbytes = 0
        for rank, box in enumerate(layout.boxes):
            if box is not before:  # most tensors are wanted by all ranks as a whole: one box
                before, nbytes = box, layout.wanted_bytes(rank)
            wanted[rank] += nbytes
    return wanted


class Rows(NamedTuple):
    """Consecutive rows of a tensor: its number among the layouts, the first row, the last + 1."""

    tensor: int
    start: int
    stop: int


class Message(NamedTuple):
    """Bytes from one reader to one rank.

    Attributes:
        parts: The rows as they were read, and those of them that the rank wants.
        nbytes: Size of the message.
    """

    parts: tuple[tuple[Rows, Rows], ...]
    nbytes: int


def layout_of(info: TensorInfo, boxes: Sequence[Box | None]) -> Layout:
    """The layout of a tensor, given the box that each rank wants of it (None: nothing).

    Raises:
        ValueError: A box is outside of the tensor, or divides elements that share a byte.
    """
    shape = info.shape
    for box in boxes:
        if box is not None and not (
            len(box) == len(shape)
            and all(0 <= lo <= hi <= size for (lo, hi), size in zip(box, shape, strict=True))
        ):
            raise ValueError(f"{box} is no part of tensor {info.name!r} of shape {list(shape)}")
    cut = [
        dim
        for dim, size in enumerate(shape)
        if any(box is not None and box[dim] != (0, size) for box in boxes)
    ]
    shapes = tuple(None if box is None else tuple(hi - lo for lo, hi in box) for box in boxes)
    if not cut or not info.nbytes:
        whole: Box = ((0, info.nbytes),)
        parts = tuple(None if box is None else whole for box in boxes)
        return Layout(info, info.nbytes, (), parts, shapes)
    first, last = cut[0], cut[-1]
    outer, tail = prod(shape[:first]), info.nbytes // prod(shape[: last + 1])
    if last == len(shape) - 1 and DTYPES[info.dtype].bits % 8:
        raise ValueError(
            f"tensor {info.name!r} of dtype {info.dtype} cannot be divided in its last dimension:"
            " elements share bytes"
        )
    head = ((0, outer),) if outer > 1 else ()
    dims = (*(stop for _, stop in head), *shape[first : last + 1], tail)
    parts = tuple(
        None if box is None else (*head, *box[first : last + 1], (0, tail)) for box in boxes
    )
    return Layout(info, dims[0], dims[1:], parts, shapes)


def windows_of(layouts: Sequence[Layout], window_bytes: int) -> Iterator[list[Rows]]:
    """Groups of rows to read and exchange together, in the order of the layouts.

    Rows that no rank wants are left out. A tensor that is larger than a window is divided.
    """
    window: list[Rows] = []
    left = window_bytes
    for number, layout in enumerate(layouts):
        size = layout.row_bytes
        for rows in _wanted_rows(layout):
            step = max(window_bytes // size, 1)
            for first in range(rows.start, rows.stop, step):
                last = min(first + step, rows.stop)
                if window and (last - first) * size > left:
                    yield window
                    window, left = [], window_bytes
                window.append(Rows(number, first, last))
                left -= (last - first) * size
    if window:
        yield window


def _wanted_rows(layout: Layout) -> list[range]:
    """The rows of a tensor that at least one rank wants, in order."""
    found: list[range] = []
    wanted = {layout.rows_of(rank) for rank in range(len(layout.boxes))}
    for rows in sorted(wanted, key=lambda rows: rows.start):
        if found and rows.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, rows.stop))
        elif rows:
            found.append(rows)
    return found


def shares_of(layouts: Sequence[Layout], window: Sequence[Rows], ranks: int) -> list[list[Rows]]:
    """The rows of a window that each rank reads: as many bytes for each as whole rows allow.

    Every share is contiguous in file order. Where a row is a byte, shares end at blocks of direct
    I/O, so that no block is read twice.
    """
    ordered = sorted(window, key=lambda r: (layouts[r.tensor].info.shard, _offset(layouts, r)))
    total = sum((r.stop - r.start) * layouts[r.tensor].row_bytes for r in ordered)
    shares: list[list[Rows]] = [[] for _ in range(ranks)]
    rank = before = 0  # bytes of the window before this row
    for tensor, start, stop in ordered:
        size = layouts[tensor].row_bytes
        while start < stop:
            end = stop
            if rank < ranks - 1:
                left = total * (rank + 1) // ranks - before
                end = start + max((left + size // 2) // size, 0)
                if size == 1 and end < stop:
                    end += -(layouts[tensor].info.offset + end) % DEFAULT_BLOCK_BYTES
                end = min(end, stop)
            if end > start:
                shares[rank].append(Rows(tensor, start, end))
                before += (end - start) * size
                start = end
            if start < stop:
                rank += 1
    return shares


def _offset(layouts: Sequence[Layout], rows: Rows) -> int:
    layout = layouts[rows.tensor]
    return layout.info.offset + rows.start * layout.row_bytes


def info_of(layouts: Sequence[Layout], rows: Rows) -> TensorInfo:
    """Rows as a tensor of bytes, to be read."""
    layout = layouts[rows.tensor]
    nbytes = (rows.stop - rows.start) * layout.row_bytes
    return layout.info._replace(
        name=PartName(layout.info.name, f"[rows {rows.start}:{rows.stop}]"),
        dtype="U8",
        shape=(nbytes,),
        offset=_offset(layouts, rows),
        nbytes=nbytes,
    )


def messages_of(layouts: Sequence[Layout], share: Sequence[Rows], rank: int) -> list[Message]:
    """The messages from the reader of a share to one rank: large parts first, each by itself, then
    all small ones together."""
    large: list[Message] = []
    small: list[tuple[Rows, Rows]] = []
    small_bytes = 0
    for rows in share:
        layout = layouts[rows.tensor]
        wanted = layout.rows_of(rank)
        start, stop = max(rows.start, wanted.start), min(rows.stop, wanted.stop)
        if start >= stop:
            continue
        nbytes = (stop - start) * layout.wanted_row_bytes(rank)
        part = rows, Rows(rows.tensor, start, stop)
        if nbytes >= SEPARATE_BYTES:
            large.append(Message((part,), nbytes))
        else:
            small.append(part)
            small_bytes += nbytes
    return [*large, Message(tuple(small), small_bytes)] if small else large


def even_part(size: int, number: int, parts: int) -> tuple[int, int]:
    """Part `number` of a dimension, divided as torch.chunk and DTensor divide it: the last parts
    may be smaller, or empty."""
    step = -(-size // parts)
    return min(number * step, size), min((number + 1) * step, size)
