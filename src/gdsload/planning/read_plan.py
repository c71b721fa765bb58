"""Plans reads: which bytes, in which order, to which memory. Pure arithmetic.

    byte ranges (in the caller's order)
      -> windows        up to `window_bytes` each: the first wanted are read first
      -> merged ranges  inside a window: sorted by file and offset, joined over small gaps
      -> transfers      aligned to the direct-I/O block, split at the backend's largest read
      -> targets        the memory for merged ranges, congruent to their file offsets

The same input gives the same plan. Nothing is read and no memory is allocated here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from gdsload._native import ranges as native
from gdsload.report import count, size
from gdsload.system.gc_control import collector_paused

if TYPE_CHECKING:
    from gdsload.checkpoint import Checkpoint, TensorInfo
    from gdsload.checkpoint.selection import Names

# Byte ranges are read together if the gap between them is at most this: at 2 to 14 GB/s it costs 5
# to 30 us, as much as one more read (benchmarks/gap.py).
GAP_BYTES = 64 << 10
# The same for remote files, where a read is a round trip. Not measured beyond loopback.
REMOTE_GAP_BYTES = 1 << 20
# Merged ranges with a larger gap do not share a target: address space is cheap, but a system that
# does not overcommit counts it.
TARGET_GAP_BYTES = 64 << 20
# The alignment of direct I/O if a file does not report one, and of cuFile. Not the page size.
DEFAULT_BLOCK_BYTES = 4096


Item = TypeVar("Item")


class ByteRange(NamedTuple):
    """Wanted bytes in one file: a tensor, or consecutive rows of one."""

    name: str
    shard: int
    offset: int
    nbytes: int


# The sort key for file order, of byte ranges and of tensors.
FILE_ORDER = attrgetter("shard", "offset")


class MergedRange(NamedTuple):
    """Bytes of one shard that are read together."""

    shard: int
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


class Target(MergedRange):
    """Memory to read into. Its byte 0 is byte `offset` of the file."""


class Transfer(NamedTuple):
    """One read: `length` bytes of a file to `target_offset` in a target.

    `length` is a multiple of the block and may reach past the end of the file; `wanted` bytes must
    arrive. `io_mode` is "direct", "buffered" or "mapped": then the target is part of a private
    mapping of the file, and its pages are read into the page cache. `tag` is the number of the
    transfer.
    """

    shard: int
    offset: int
    length: int
    wanted: int
    target: int
    target_offset: int
    io_mode: str
    tag: int


class Location(NamedTuple):
    """Where a byte range is read to: a target, and the offset in it.

    Transfers `first` to `last` (included) read it; first > last if it is empty.
    """

    target: int
    offset: int
    first: int
    last: int


class Members(NamedTuple):
    """The byte ranges of one merged range.

    Attributes:
        ranges: The byte ranges in file order, without empty ones.
        target: The number of the target.
        base: The file offset of the target.
        start: A file offset that the transfers are counted from: `first` reads the `step` bytes
            there, or the last of them.
        first: The number of the first transfer.
        step: The size of the transfers in bytes.
    """

    ranges: Sequence[ByteRange]
    target: int
    base: int
    start: int
    first: int
    step: int


class Locations(Mapping[str, Location]):
    """The locations of byte ranges by name, made when the first one is asked for. A load into a
    device asks for none, unless a read fails."""

    def __init__(self, members: Sequence[Members], empty: Sequence[ByteRange]) -> None:
        self._members, self._empty = members, empty

    @cached_property
    @collector_paused()
    def _found(self) -> dict[str, Location]:
        found: dict[str, Location] = {}
        make = tuple.__new__
        for ranges, target, base, start, first, step in self._members:
            for name, _, offset, nbytes in ranges:
                byte = offset - start
                first_read, last_read = first + byte // step, first + (byte + nbytes - 1) // step
                found[name] = make(Location, (target, offset - base, first_read, last_read))
        found.update((each.name, Location(-1, 0, 0, -1)) for each in self._empty)
        return found

    def __getitem__(self, name: str) -> Location:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    # Those of Mapping cost a call more for each of 100,000 tensors.
    def get(self, name: str, default: Any = None) -> Any:
        return self._found.get(name, default)

    def items(self) -> Any:
        return self._found.items()


class Limits:
    """The reads that a backend accepts.

    Attributes:
        max_request: The largest read in bytes.
        block: The alignment of reads in bytes, a power of two.
        depth: The number of reads in flight.
        io_modes: The I/O modes of transfers that it accepts. "direct" and "mapped" are optional.
    """

    def __init__(
        self,
        max_request: int = 4 << 20,
        block: int = DEFAULT_BLOCK_BYTES,
        depth: int = 16,
        io_modes: Collection[str] = ("direct", "buffered"),
    ) -> None:
        if block < 1 or block & (block - 1):
            raise ValueError(f"block={block!r} must be a power of two")
        if max_request < block or max_request % block:
            raise ValueError(
                f"max_request={max_request!r} must be a positive multiple of block={block}"
            )
        if depth < 1:
            raise ValueError(f"depth={depth!r} must be at least 1")
        self.max_request, self.block, self.depth = max_request, block, depth
        self.io_modes = io_modes


class ReadPlan(NamedTuple):
    """The ordered transfers, and the locations of the wanted byte ranges by name.

    Each of `windows` is (first, end), a range of transfers. `members` are the byte ranges of each
    of the merged ranges.
    """

    transfers: tuple[Transfer, ...] = ()
    targets: tuple[Target, ...] = ()
    merged_ranges: tuple[MergedRange, ...] = ()
    locations: Mapping[str, Location] = MappingProxyType({})
    windows: tuple[tuple[int, int], ...] = ()
    wanted_bytes: int = 0
    members: tuple[Members, ...] = ()

    @property
    def ranges(self) -> list[ByteRange]:
        """The byte ranges that are read, in the order of the reads."""
        return [each for members in self.members for each in members.ranges]

    @property
    def read_bytes(self) -> int:
        """Bytes to read from storage: the wanted ones, gaps and aligned edges."""
        return sum(transfer.wanted for transfer in self.transfers)

    @property
    def mapped_targets(self) -> frozenset[int]:
        """The numbers of the targets that are mappings of their files."""
        return frozenset(each.target for each in self.transfers if each.io_mode == "mapped")

    @property
    def buffer_bytes(self) -> int:
        """Bytes to read into buffers: all but those that go to the page cache."""
        return sum(each.wanted for each in self.transfers if each.io_mode != "mapped")

    def summary(self) -> str:
        """A few lines of text for the user."""
        lengths = [transfer.length for transfer in self.transfers] or [0]
        over = (self.read_bytes - self.wanted_bytes) / max(self.wanted_bytes, 1)
        return (
            f"{count(len(self.locations), 'tensor')}, {size(self.wanted_bytes)} wanted\n"
            f"{count(len(self.merged_ranges), 'merged range')} in"
            f" {count(len(self.targets), 'target')}, {count(len(self.windows), 'window')}\n"
            f"{count(len(self.transfers), 'read')} of {size(min(lengths))} to"
            f" {size(max(lengths))}, {size(self.read_bytes)} to read ({over:.3%} over)"
        )


def grouped(
    items: Iterable[Item], most_bytes: int, size: Callable[[Any], int] = attrgetter("nbytes")
) -> Iterator[list[Item]]:
    """Yields lists of consecutive items, each of at most `most_bytes`, or of one larger item.

    Args:
        items: The items to group.
        most_bytes: The largest size of a group.
        size: Returns the size of an item in bytes; by default its `nbytes`.

    Example:
        >>> list(grouped([3, 4, 9, 1], 8, size=int))
        [[3, 4], [9], [1]]
    """
    group: list[Item] = []
    total = 0
    for item in items:
        nbytes = size(item)
        if group and total + nbytes > most_bytes:
            yield group
            group, total = [], 0
        group.append(item)
        total += nbytes
    if group:
        yield group


def byte_ranges_of(checkpoint: Checkpoint, names: Names = None) -> list[ByteRange]:
    """The byte ranges of whole tensors, in the order of `names`; all, in file order, if None.

    Raises CheckpointError for a name or a pattern that no tensor has.
    """
    return ranges_of(checkpoint.infos(names))


@collector_paused()
def ranges_of(infos: Iterable[TensorInfo]) -> list[ByteRange]:
    """The byte ranges of these tensors, in their order."""
    make = tuple.__new__  # for 100,000 tensors, half the time of the constructor
    return [make(ByteRange, (name, shard, at, size)) for name, _, _, shard, at, size in infos]


@collector_paused()
def plan_reads(
    ranges: Sequence[ByteRange],
    sizes: Sequence[int],
    limits: Limits,
    *,
    blocks: Sequence[int] | None = None,
    window_bytes: int = 0,
    gap_bytes: int = GAP_BYTES,
    io_mode_of: Callable[[int, int, int], str] | None = None,
) -> ReadPlan:
    """Plans the reads of byte ranges.

    Args:
        ranges: The wanted byte ranges, in the order in which they will be used.
        sizes: The file size of each shard in bytes.
        limits: The reads that the backend accepts.
        blocks: The direct-I/O block of each shard in bytes. Reads are aligned to it and to
            `limits.block`.
        window_bytes: The size of a read window; 0 for one window.
        gap_bytes: The largest gap in bytes that is read rather than skipped.
        io_mode_of: Returns the I/O mode for (shard, offset, length), None for "direct". If it is
            "mapped", it is that of the whole shard.

    Example:
        >>> plan = plan_reads([ByteRange("w", 0, 100, 5000)], [5100], Limits())
        >>> [(transfer.offset, transfer.length, transfer.wanted) for transfer in plan.transfers]
        [(0, 8192, 5100)]
    """
    transfers: list[Transfer] = []
    targets: list[Target] = []
    merged_ranges: list[MergedRange] = []
    members: list[Members] = []
    empty: list[ByteRange] = []
    windows: list[tuple[int, int]] = []
    make = tuple.__new__
    for window in grouped(ranges, window_bytes) if window_bytes else (ranges,):
        first = len(transfers)
        found, none = _merged(window, gap_bytes, limits.block)
        empty += none
        for merged, inside in found:
            merged_ranges.append(merged)
            shard = merged.shard
            align = max(blocks[shard] if blocks else 0, limits.block, DEFAULT_BLOCK_BYTES)
            start = merged.offset // align * align
            end = -(-merged.end // align) * align
            number = len(transfers)
            # A window shares no target with another one: its reads must not touch memory that was
            # handed out with an earlier window.
            shares = number > first and targets[-1].shard == shard
            gap = start - targets[-1].end if shares else -1
            if 0 <= gap <= TARGET_GAP_BYTES:
                targets[-1] = targets[-1]._replace(length=end - targets[-1].offset)
            else:
                targets.append(Target(shard, start, end - start))
            target, base = len(targets) - 1, targets[-1].offset
            step = max(limits.max_request // align * align, align)
            size = sizes[shard]
            # In steps of the target, a read is of whole units of its memory: otherwise each unit
            # belongs to two reads, and none of them can touch it as a huge page.
            origin = base if end - start > step else start
            grid = origin + (start - origin) // step * step
            for tag, at in enumerate(range(grid, end, step), number):
                offset = max(at, start)
                length = min(at + step, end) - offset
                wanted = min(length, size - offset)
                mode = io_mode_of(shard, offset, length) if io_mode_of else "direct"
                row = (shard, offset, length, wanted, target, offset - base, mode, tag)
                transfers.append(make(Transfer, row))
            members.append(Members(inside, target, base, grid, number, step))
        if len(transfers) > first:
            windows.append((first, len(transfers)))
    return ReadPlan(
        tuple(transfers),
        tuple(targets),
        tuple(merged_ranges),
        Locations(members, empty),
        tuple(windows),
        native.bytes_of(list(ranges)),
        tuple(members),
    )


def merged_ranges_of(ranges: Sequence[ByteRange], gap_bytes: int = GAP_BYTES) -> list[MergedRange]:
    """Byte ranges in file order, joined over gaps of up to `gap_bytes`."""
    found, _ = _merged(ranges, gap_bytes, DEFAULT_BLOCK_BYTES)
    return [merged for merged, _ in found]


def _merged(
    ranges: Sequence[ByteRange], gap_bytes: int, block: int
) -> tuple[list[tuple[MergedRange, list[ByteRange]]], list[ByteRange]]:
    """Joins ranges with small gaps: each with its members, in file order; and the empty ranges.

    The gap is at least two blocks. Otherwise two merged ranges could both read a shared block, and
    the later read would overwrite a tensor that its owner has already modified.
    """
    gap = min(max(gap_bytes, 2 * max(block, DEFAULT_BLOCK_BYTES)), sys.maxsize)
    found, empty = native.merged(native.in_file_order(list(ranges)), gap)
    return [
        (MergedRange(shard, start, end - start), inside) for shard, start, end, inside in found
    ], empty
