"""Which bytes to read, in which order, and where to: arithmetic, and nothing but.

    pieces (in the caller's order)
      -> windows   so many bytes of pieces at a time, so that the first wanted come first
      -> merged_ranges   inside a window: sorted by file and offset, joined over small gaps
      -> transfers aligned to the direct-I/O block, cut to the backend's largest request
      -> targets   the memory that merged_ranges of a window land in, congruent to their file
      offsets

The same input gives the same plan. Nothing is read and no memory is taken here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from gdsload.errors import CheckpointError, shown
from gdsload.system.gc_control import collector_paused

if TYPE_CHECKING:
    from gdsload.checkpoint import Checkpoint, TensorInfo

# Two pieces are read as one where no more than this lies between them: at 2 to 14 GB/s it costs
# 5 to 30 us, which is what one more request costs (benchmarks/gap.py).
GAP_BYTES = 64 << 10
# Extents that lie further apart than this do not share a target: address space is cheap, but a
# system that does not overcommit counts it.
TARGET_GAP_BYTES = 64 << 20
# The alignment of direct I/O where a file does not say, and of cuFile. It is not the page size.
DEFAULT_BLOCK_BYTES = 4096


class ByteRange(NamedTuple):
    """Bytes that somebody wants: a tensor, or consecutive rows of one."""

    name: str
    shard: int
    offset: int
    nbytes: int


# What puts pieces in the order of the files; plans sort a hundred thousand of them by it.
FILE_ORDER = attrgetter("shard", "offset")


class MergedRange(NamedTuple):
    """A run of bytes in one shard."""

    shard: int
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


class Target(NamedTuple):
    """Memory that a stretch of a shard lands in: byte 0 of it is byte `offset` of the file."""

    shard: int
    offset: int
    length: int


class Transfer(NamedTuple):
    """One read. `wanted` bytes must arrive; `length` may reach past them, and past the file's end,
    to the next multiple of the block. `road` is "direct" or "buffered"; `tag` is its number."""

    shard: int
    offset: int
    length: int
    wanted: int
    target: int
    target_offset: int
    io_mode: str
    tag: int


class Location(NamedTuple):
    """Where a piece will be: its target, the place in it, and the transfers that bring it (both
    ends included; first > last for a piece of no bytes)."""

    target: int
    offset: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What a backend accepts. Bytes, except `depth`: how many requests it keeps in flight."""

    max_request: int = 4 << 20
    block: int = DEFAULT_BLOCK_BYTES
    depth: int = 16

    def __post_init__(self) -> None:
        if self.block < 1 or self.block & (self.block - 1):
            raise ValueError(f"a block of {self.block} bytes is not a power of two")
        if self.max_request < self.block or self.max_request % self.block:
            raise ValueError(f"requests of {self.max_request} bytes do not fit {self.block}")
        if self.depth < 1:
            raise ValueError(f"a depth of {self.depth} reads nothing")


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The ordered transfers and what each completes. `windows` are (first, end) of transfers."""

    transfers: tuple[Transfer, ...] = ()
    targets: tuple[Target, ...] = ()
    merged_ranges: tuple[MergedRange, ...] = ()
    locations: dict[str, Location] = field(default_factory=dict)
    windows: tuple[tuple[int, int], ...] = ()
    wanted_bytes: int = 0

    @property
    def read_bytes(self) -> int:
        """Bytes that will come from storage: the wanted ones, gaps and aligned edges."""
        return sum(transfer.wanted for transfer in self.transfers)

    def summary(self) -> str:
        """A few lines for people."""
        sizes = [transfer.length for transfer in self.transfers]
        over = self.read_bytes - self.wanted_bytes
        lines = [
            f"{len(self.locations)} tensors, {self.wanted_bytes:,} bytes wanted",
            f"{len(self.merged_ranges)} merged_ranges in {len(self.targets)} targets,"
            f" {len(self.windows)} windows",
            f"{len(sizes)} requests, {self.read_bytes:,} bytes to read"
            f" ({over / max(self.wanted_bytes, 1):.3%} over)",
        ]
        if sizes:
            lines.append(f"request sizes {min(sizes):,} to {max(sizes):,} bytes")
        return "\n".join(lines)


@collector_paused()
def byte_ranges_of(checkpoint: Checkpoint, names: Iterable[str] | None = None) -> list[ByteRange]:
    """The whole tensors of these names, in that order; all, in file order, where None.

    Raises CheckpointError for a name that the checkpoint does not have.
    """
    return [
        ByteRange(info.name, info.shard, info.offset, info.nbytes)
        for info in wanted_infos(checkpoint, names)
    ]


def wanted_infos(checkpoint: Checkpoint, names: Iterable[str] | None) -> list[TensorInfo]:
    """The tensors of these names, each once, in that order; all, in file order, where None.

    Raises CheckpointError for a name that the checkpoint does not have.
    """
    if names is None:
        return list(checkpoint.tensors.values())
    if isinstance(names, str):
        raise TypeError(f"names is a list of tensor names, not the string {names!r}")
    return [wanted_info(checkpoint, name) for name in dict.fromkeys(names)]


def wanted_info(checkpoint: Checkpoint, name: str) -> TensorInfo:
    """One tensor. Raises CheckpointError for a name that the checkpoint does not have."""
    info = checkpoint.tensors.get(name)
    if info is None:
        raise CheckpointError(
            f"{checkpoint.source}: there is no tensor {shown(str(name))} in it", tensor=str(name)
        )
    return info


@collector_paused()
def plan_reads(
    pieces: Sequence[ByteRange],
    sizes: Sequence[int],
    limits: Limits,
    *,
    blocks: Sequence[int] | None = None,
    window_bytes: int = 0,
    gap_bytes: int = GAP_BYTES,
    io_mode_of: Callable[[int, int, int], str] | None = None,
) -> ReadPlan:
    """Plans the reads that bring `pieces`, given in the order in which they will be asked for.

    `sizes` are the shards' file sizes, `blocks` their direct-I/O blocks where they differ from
    `limits.block`. A window closes when it holds `window_bytes` (0: one window for all).
    `io_mode_of(shard, offset, length)` says "direct" or "buffered" for each transfer.
    """
    transfers: list[Transfer] = []
    targets: list[Target] = []
    merged_ranges: list[MergedRange] = []
    locations: dict[str, Location] = {}
    windows: list[tuple[int, int]] = []
    wanted = 0
    for window in _windows(pieces, window_bytes):
        first = len(transfers)
        ordered = sorted(window, key=FILE_ORDER)
        for extent, members in _extents(ordered, gap_bytes, limits.block):
            wanted += sum(piece.nbytes for piece in members)
            merged_ranges.append(extent)
            block = blocks[extent.shard] if blocks else limits.block
            align = max(block, DEFAULT_BLOCK_BYTES)
            start = extent.offset // align * align
            end = -(-extent.end // align) * align
            fresh = len(transfers) == first
            target = _place_target(targets, extent.shard, start, end, fresh=fresh)
            base = targets[target].offset
            number = len(transfers)
            step = max(limits.max_request // align * align, align)
            for offset in range(start, end, step):
                length = min(step, end - offset)
                road = io_mode_of(extent.shard, offset, length) if io_mode_of else "direct"
                need = min(offset + length, sizes[extent.shard]) - offset
                transfers.append(
                    Transfer(
                        extent.shard, offset, length, need, target, offset - base, road,
                        len(transfers),
                    )
                )  # fmt: skip
            for name, _, offset, nbytes in members:
                locations[name] = Location(
                    target,
                    offset - base,
                    number + (offset - start) // step,
                    number + (offset + nbytes - 1 - start) // step,
                )
        for piece in ordered:
            if piece.nbytes == 0:
                locations[piece.name] = Location(-1, 0, 0, -1)
        if len(transfers) > first:
            windows.append((first, len(transfers)))
    return ReadPlan(
        tuple(transfers), tuple(targets), tuple(merged_ranges), locations, tuple(windows), wanted
    )


def merged_ranges_of(pieces: Sequence[ByteRange], gap_bytes: int = GAP_BYTES) -> list[MergedRange]:
    """The runs of bytes that these pieces make up, in file order."""
    ordered = sorted(pieces, key=FILE_ORDER)
    return [extent for extent, _ in _extents(ordered, gap_bytes, DEFAULT_BLOCK_BYTES)]


def _windows(pieces: Sequence[ByteRange], window_bytes: int) -> Iterator[Sequence[ByteRange]]:
    if not window_bytes:
        yield pieces
        return
    window: list[ByteRange] = []
    held = 0
    for piece in pieces:
        if window and held + piece.nbytes > window_bytes:
            yield window
            window, held = [], 0
        window.append(piece)
        held += piece.nbytes
    if window:
        yield window


def _extents(
    ordered: Sequence[ByteRange], gap_bytes: int, block: int
) -> Iterator[tuple[MergedRange, list[ByteRange]]]:
    """Joins pieces that lie close together. Pieces of no bytes are left out.

    The merge gap is at least one block. Otherwise two ranges could both read a shared block, and
    the later read would overwrite a tensor that its owner has modified already.
    """
    gap = max(gap_bytes, 2 * max(block, DEFAULT_BLOCK_BYTES))
    members: list[ByteRange] = []
    shard = start = end = -1
    for piece in ordered:
        _, its_shard, offset, nbytes = piece
        if nbytes == 0:
            continue
        if members and its_shard == shard and offset <= end + gap:
            members.append(piece)
            end = max(end, offset + nbytes)
            continue
        if members:
            yield MergedRange(shard, start, end - start), members
        members = [piece]
        shard, start, end = its_shard, offset, offset + nbytes
    if members:
        yield MergedRange(shard, start, end - start), members


def _place_target(targets: list[Target], shard: int, start: int, end: int, *, fresh: bool) -> int:
    """The target for file bytes start to end: the last one where they lie close to it.

    Every window has targets of its own (`fresh`): its reads must not touch memory that was handed
    out with an earlier one.
    """
    if targets and not fresh:
        last = targets[-1]
        reach = last.offset + last.length
        if last.shard == shard and reach <= start <= reach + TARGET_GAP_BYTES:
            targets[-1] = last._replace(length=end - last.offset)
            return len(targets) - 1
    targets.append(Target(shard, start, end - start))
    return len(targets) - 1
