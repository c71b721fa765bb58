"""Host pool: host memory that keeps loaded bytes for the next load of the same files.

    load ── reads into ──► PoolSegment (a memory file) ── mapped privately ──► tensors
                              └── the next load of the same version ──────► tensors of its own

While a pool is open, loads of this process read into its segments. Tensors are private mappings: a
write copies the page, and the segment keeps the bytes of the file. A segment stays when its last
tensor is freed, until the least recently used one makes room for others. Files are identified by
device, inode, size and times, so that a changed file is read again.
"""

from __future__ import annotations

import os
import resource
import time
from bisect import bisect_right
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from mmap import PAGESIZE
from typing import NamedTuple

from gdsload._native.cuda import CudaFailure, Device
from gdsload._native.memory import Lease, Region
from gdsload.checkpoint import Checkpoint, Identity
from gdsload.errors import PlacementError
from gdsload.memory import page_cache
from gdsload.memory.host_buffers import BufferView, pools
from gdsload.planning.read_plan import ByteRange, ReadPlan
from gdsload.system import available, gpu, quiesce
from gdsload.system.lifecycle import fork_safe_lock, in_child

# The unit in which memory is touched: targets of this size and more begin at one.
UNIT_BYTES = 2 << 20
# A segment whose bytes are dropped is reused for a new one of this share of its length or more.
_LEAST_REUSED_SHARE = 0.8
# Each segment has a descriptor: they take at most this part of those that the process may have.
_DESCRIPTOR_SHARE = 4
_FEW_DESCRIPTORS = (
    "segments were freed before the pool was full: each has a descriptor, and the process may have"
    " few (`ulimit -n`)"
)


class Held(NamedTuple):
    """The memory that a pool holds of one checkpoint, in bytes. `lent_bytes` are in segments with
    living tensors, `resident_bytes` are in memory according to the kernel. `idle_seconds` have
    passed since a load last used them."""

    source: str
    held_bytes: int
    lent_bytes: int
    resident_bytes: int
    pinned_bytes: int
    idle_seconds: float


class PoolSegment:
    """A memory file that holds the bytes of one batch of reads."""

    def __init__(self, length: int) -> None:
        """Raises OSError if the system has no memory files, or no descriptor left."""
        self.length = length
        self.fd = os.memfd_create("gdsload-pool", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, length)
            self.lease = Lease()
        except BaseException:
            os.close(self.fd)
            raise
        self.source = ""
        self.used = time.monotonic()
        self.stored: set[Identity] = set()  # the files with bytes in it
        self.inherited = False  # a child of fork() may have tensors in it, and see what it holds
        self.pinned: Region | None = None

    @property
    def idle(self) -> bool:
        """True if no tensor, `PoolBuffers` or read in progress refers to it."""
        return self.lease.lent == (self.pinned is not None)


class _StoredRange(NamedTuple):
    """Bytes of a file, and their offset in a segment."""

    start: int
    nbytes: int
    segment: PoolSegment
    offset: int


class PoolBuffers:
    """Buffers for the reads of one batch. The pool keeps their bytes if all reads succeed.

    Reads go to shared mappings of a segment. Tensors get a private one, so that no write to a
    tensor changes the bytes for the next load.
    """

    def __init__(self, pool: HostPool, segment: PoolSegment, plan: ReadPlan) -> None:
        """Raises OSError if the segment cannot be mapped, and PlacementError if a new one has no
        room in memory."""
        self._pool, self._segment, self._plan = pool, segment, plan
        self._offsets, _ = _layout(plan)
        lend = segment.lease.lend
        lengths: dict[Region, int] = {
            lend(segment.fd, offset, target.length, True): target.length
            for offset, target in zip(self._offsets, plan.targets, strict=True)
        }
        self.starts = [BufferView(region, 0) for region in lengths]
        self._private = lend(segment.fd, 0, segment.length, False)
        if not segment.source:  # new: its memory is taken as the reads progress
            available.take_room(lengths, plan.read_bytes)

    def views(self) -> dict[str, BufferView]:
        """The memory of each byte range of the plan, by name. Empty ranges are left out."""
        return {
            name: BufferView(self._private, self._offsets[location.target] + location.offset)
            for name, location in self._plan.locations.items()
            if location.target >= 0
        }

    def end(self, checkpoint: Checkpoint | None) -> None:
        """Gives the buffers to the pool: with the bytes of this checkpoint, or, with None, without
        any, because a read has failed."""
        self.starts.clear()
        rows: list[tuple[int, _StoredRange]] = []
        for transfer in self._plan.transfers:
            offset = self._offsets[transfer.target] + transfer.target_offset
            row = _StoredRange(transfer.offset, transfer.wanted, self._segment, offset)
            if rows:
                shard, last = rows[-1]
                end = last.start + last.nbytes, last.offset + last.nbytes
                if (shard, *end) == (transfer.shard, row.start, row.offset):
                    row = last._replace(nbytes=last.nbytes + row.nbytes)
                    rows.pop()
            rows.append((transfer.shard, row))
        self._pool._fill(self._segment, checkpoint, rows)


def _layout(plan: ReadPlan) -> tuple[list[int], int]:
    """The offset of each target in a segment, and the length of the segment."""
    offsets, end = [], 0
    for target in plan.targets:
        align = UNIT_BYTES if target.length >= UNIT_BYTES else PAGESIZE
        offsets.append(-(-end // align) * align)
        end = offsets[-1] + target.length
    return offsets, -(-end // UNIT_BYTES) * UNIT_BYTES


class HostPool(quiesce.Holder):
    """Host memory kept between loads. While it is open, all loads of this process that read to
    host memory put their bytes into it, and take from it the bytes that it holds. Files that are in
    the page cache are mapped and not copied; `prefetch(tier="pool")` copies them. Use it as a
    context, or close it.

    Loads that do not fit read past the page cache into memory of their own. A load that finds too
    little room in the pool, the machine or its cgroup frees memory without living tensors, the
    least recently used first. Between loads nothing is freed.

    Args:
        limit_bytes: the most that it holds, in use and idle.
        pinned: None pins memory with CUDA once it is filled, if this process has opened a device.
            True opens device 0 and fails without CUDA; False never pins.

    Attributes:
        limit_bytes: As it was given.
        notes: What the pool could not do, such as to pin its memory, in words.

    Raises:
        ValueError: a limit below 1.
        BackendUnavailable: `pinned` is True and there is no CUDA.

    Example:
        >>> with gdsload.warmup.HostPool(64 << 30):
        ...     first = gdsload.load_file("model")
        ...     again = gdsload.load_file("model")  # reads nothing
    """

    def __init__(self, limit_bytes: int, *, pinned: bool | None = None) -> None:
        if not limit_bytes >= 1:
            raise ValueError(f"limit_bytes={limit_bytes!r} must be at least 1")
        self.pid = os.getpid()
        self.limit_bytes = limit_bytes
        self.notes: list[str] = []  # refusals
        self._closed = False
        self._pinned = pinned
        self._device: Device | None = gpu.device(0) if pinned else None
        self._lock = fork_safe_lock(self)
        self._segments: list[PoolSegment] = []  # the least recently used first
        self._stored: dict[Identity, list[_StoredRange]] = {}
        try:
            quiesce.register(self)
            pools.append(self)
        except BaseException:  # Ctrl-C: nobody could close it
            self.close()
            raise

    @property
    def held_bytes(self) -> int:
        """Bytes of its segments, in use and idle."""
        with self._lock:
            return sum(segment.length for segment in self._segments)

    @property
    def idle_bytes(self) -> int:
        """Bytes of segments without living tensors."""
        with self._lock:
            return sum(segment.length for segment in self._segments if segment.idle)

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are registered with CUDA."""
        with self._lock:
            return sum(segment.length for segment in self._segments if segment.pinned)

    def held(self) -> list[Held]:
        """The memory that it holds, by checkpoint, the least recently used first."""
        with self._lock:
            groups: dict[str, list[PoolSegment]] = {}
            for segment in self._segments:
                groups.setdefault(segment.source, []).append(segment)
            now = time.monotonic()
            return [
                Held(
                    source,
                    sum(one.length for one in group),
                    sum(one.length for one in group if not one.idle),
                    sum(page_cache.estimated_bytes(one.fd, 0, one.length) for one in group),
                    sum(one.length for one in group if one.pinned),
                    now - max(one.used for one in group),
                )
                for source, group in groups.items()
            ]

    def find(
        self,
        checkpoint: Checkpoint,
        ranges: Iterable[ByteRange],
        mappings: dict[PoolSegment, Region],
        *,
        pinned: bool = False,
    ) -> dict[str, BufferView]:
        """Internal: the byte ranges that it holds.

        Args:
            checkpoint: the files of the ranges.
            ranges: the byte ranges to look for.
            mappings: the caller's private mappings; missing ones are added. They keep what the
                views refer to.
            pinned: return pinned memory itself, which must not be written to.

        Returns:
            The memory of the ranges that were found, by name.
        """
        views: dict[str, BufferView] = {}
        with self._lock:
            for wanted in ranges:
                rows = self._stored.get(checkpoint.shards[wanted.shard].original)
                if not rows or not wanted.nbytes:
                    continue
                row = rows[max(bisect_right(rows, wanted.offset, key=_start) - 1, 0)]
                skipped = wanted.offset - row.start
                if skipped < 0 or skipped + wanted.nbytes > row.nbytes:
                    continue
                segment = row.segment
                if segment not in mappings:
                    try:
                        lent = segment.lease.lend(segment.fd, 0, segment.length, False)
                    except OSError:  # no room to map it: the load reads the files
                        continue
                    mappings[segment] = lent
                # The lease does not count pinned memory: the mapping keeps the segment alive.
                region = (segment.pinned if pinned else None) or mappings[segment]
                views[wanted.name] = BufferView(region, row.offset + skipped)
                self._use(segment)
        return views

    def _use(self, segment: PoolSegment) -> None:
        segment.used = time.monotonic()
        if self._segments[-1] is not segment:
            self._segments.remove(segment)
            self._segments.append(segment)

    def require(self, ranges: Iterable[ByteRange]) -> None:
        """Internal: raises PlacementError if the pool, even when empty, is too small for these
        ranges."""
        wanted = sum(one.nbytes for one in ranges)
        if wanted > self.limit_bytes:
            raise PlacementError(
                f"{wanted:,} bytes do not fit into a pool of {self.limit_bytes:,} bytes",
                missing_bytes=wanted - self.limit_bytes,
            )

    def allocate(self, plan: ReadPlan) -> PoolBuffers | None:
        """Internal: buffers for these reads. None if the pool has no room for them, or if they fill
        the page cache: then their memory is a mapping of the file.

        Raises:
            PlacementError: the machine has too little memory.
        """
        if not plan.transfers or plan.mapped_targets:
            return None
        with self._lock:
            if self._closed:
                return None
            self.make_room(plan.read_bytes)
            segment = None
            try:
                segment = self._take(_layout(plan)[1])
                return None if segment is None else PoolBuffers(self, segment, plan)
            except BaseException as error:
                if segment is not None:
                    self._drop(segment)
                if not isinstance(error, OSError):
                    raise
                self._note(f"no memory for a load: {error.strerror}")
                return None

    def _note(self, refusal: str) -> None:
        if refusal not in self.notes:
            self.notes.append(refusal)

    def _too_many(self) -> bool:
        """Whether another segment would take too many of the process's descriptors."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return most != resource.RLIM_INFINITY and len(self._segments) >= most // _DESCRIPTOR_SHARE

    def _take(self, length: int) -> PoolSegment | None:
        if length > self.limit_bytes:
            return None
        while self.held_bytes + length > self.limit_bytes or self._too_many():
            idle = next((one for one in self._segments if one.idle), None)
            if idle is None:
                return None
            if self._too_many():
                self._note(_FEW_DESCRIPTORS)
            fits = idle.length * _LEAST_REUSED_SHARE <= length <= idle.length
            if fits and not idle.inherited:
                # Reused with its pages: fresh ones often take longer to touch than to read.
                self._forget(idle)
                return idle
            self._drop(idle)
        self._segments.append(PoolSegment(length))
        return self._segments[-1]

    def _fill(
        self,
        segment: PoolSegment,
        checkpoint: Checkpoint | None,
        rows: list[tuple[int, _StoredRange]],
    ) -> None:
        with self._lock:
            if checkpoint is None or segment not in self._segments:
                self._drop(segment)
                return
            segment.source = checkpoint.source
            for shard, row in rows:
                file = checkpoint.shards[shard].original
                _store(self._stored.setdefault(file, []), row)
                segment.stored.add(file)
            self._use(segment)
            if self._device is None and self._pinned is not False:
                # Opening a device would create a context, which loads to the CPU do not need.
                self._device = gpu.any_open()
            if self._pinned is False or self._device is None or segment.pinned is not None:
                return
            try:
                region = segment.lease.lend(segment.fd, 0, segment.length, True)
            except OSError as error:
                self._note(f"its memory is not pinned: {error}")
                return
        # Pinning takes 0.1 s for each GiB, so it is done without the lock.
        self._pin(segment, region, self._device)

    def _pin(self, segment: PoolSegment, region: Region, device: Device) -> None:
        try:
            device.pin(region.address, region.length)
        except CudaFailure as error:
            self._pinned = False
            self._note(f"its memory is not pinned: {error}")
            return
        except BaseException:
            segment.pinned = region  # Ctrl-C: it may be pinned, and must stay mapped until unpinned
            raise
        with self._lock:
            if segment in self._segments:
                segment.pinned = region
                return
        device.unpin(region.address)  # the segment was dropped meanwhile

    def _forget(self, segment: PoolSegment) -> None:
        """Drops the bytes of a segment, not its memory."""
        for file in segment.stored:
            stored = self._stored.pop(file, [])
            rows = [row for row in stored if row.segment is not segment]
            if rows:
                self._stored[file] = rows
        segment.stored.clear()

    def _drop(self, segment: PoolSegment) -> None:
        """Frees a segment. The pages of living tensors stay."""
        self._forget(segment)
        if segment in self._segments:
            pinned, segment.pinned = segment.pinned, None
            try:
                if pinned is not None and self._device is not None:
                    self._device.unpin(pinned.address)
            except CudaFailure as error:  # as after an error of a kernel: the memory goes anyway
                self._note(f"its memory is not unpinned: {error}")
            finally:
                try:
                    self._segments.remove(segment)
                finally:
                    os.close(segment.fd)

    def leave_to_child(self) -> None:
        """Internal: before a fork: no segment that there is now gets other bytes."""
        for segment in list(self._segments):
            segment.inherited = True

    def forget_parent(self) -> None:
        """Internal: in a child of fork(): lets the parent free what it drops. The memory of tensors
        stays, and so do pinned mappings, which only the parent may unpin."""
        segments, self._segments = self._segments, []
        self._stored = {}
        for segment in segments:
            if segment.pinned is not None:
                _of_parents.append(segment.pinned)
            with suppress(OSError):
                os.close(segment.fd)

    def make_room(self, nbytes: int) -> None:
        """Internal: frees idle segments while the machine or its cgroup has less than `nbytes`
        available."""
        with self._lock:
            for segment in list(self._segments):
                enough = nbytes + available.SPARE_BYTES
                room = available.available_bytes(enough)
                if room is None or enough <= room:
                    return
                if segment.idle:
                    self._drop(segment)

    def trim(self, most_bytes: int = 0) -> None:
        """Frees idle segments, the least recently used first, until at most `most_bytes` are held
        or no segment is idle."""
        with self._lock:
            for segment in list(self._segments):
                if self.held_bytes > most_bytes and segment.idle:
                    self._drop(segment)

    def close(self) -> None:
        """Frees all of it; the memory of living tensors is freed with them. May be called again."""
        pools[:] = [other for other in pools if other is not self]
        quiesce.unregister(self)
        self._closed = True
        self.quiesce()

    def quiesce(self) -> None:
        """Releases memory files and pins. The next loads fill the pool again."""
        if self.pid != os.getpid():
            return
        with self._lock, ExitStack() as stack:  # all of them, also if Ctrl-C ends one
            for segment in self._segments:
                stack.callback(self._drop, segment)

    def __enter__(self) -> HostPool:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.close()
        except BaseException:  # Ctrl-C, perhaps before its first step
            self.close()
            raise


def _store(rows: list[_StoredRange], row: _StoredRange) -> None:
    """Adds a row to those of its file, which are sorted. None is inside another one: so the last
    that begins at or before a range has the range, if any has."""
    at = bisect_right(rows, row.start, key=_start)
    if at and _end(rows[at - 1]) >= _end(row):
        return
    first = at - 1 if at and rows[at - 1].start == row.start else at
    last = at
    while last < len(rows) and _end(rows[last]) <= _end(row):
        last += 1
    rows[first:last] = [row]


def _end(row: _StoredRange) -> int:
    return row.start + row.nbytes


def _start(row: _StoredRange) -> int:
    return row.start


# Pinned mappings that this process has inherited: to end them is for the parent.
_of_parents: list[Region] = []


def _before_fork() -> None:
    for pool in list(pools):
        pool.leave_to_child()


def _in_child() -> None:
    for pool in pools:
        pool.forget_parent()


os.register_at_fork(before=_before_fork)
in_child(_in_child)
