"""Host memory that keeps what was loaded, for the next load of the same files.

    load ── reads into ──► Segment (a memory file) ── mapped privately ──► tensors
                              └── the next load of the same version ──────► tensors of its own

While a pool is open, loads of this process read into segments of it. Tensors are private mappings:
who writes to one gets a copy of that page, and the segment stays what the file was. When the last
tensor is gone the segment stays, until the least recently used makes room for others. Files are
told apart by their identity, so that a changed one is read anew.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from gdsload._native.cuda import CudaFailure, Device
from gdsload._native.memory import Region
from gdsload.checkpoint import Checkpoint, Identity
from gdsload.errors import GdsloadError, PlacementError
from gdsload.memory import host_buffers, page_cache
from gdsload.memory.host_buffers import BufferView
from gdsload.memory.pool_segments import Intake, Run, Segment, whole_units
from gdsload.planning.read_plan import ByteRange, ReadPlan
from gdsload.system import gpu, quiesce
from gdsload.system.lifecycle import fork_safe_lock

# A segment whose content made room is used again for one that is smaller by a fifth at most.
_WASTE = 1.25


class Held(NamedTuple):
    """What a pool has of one checkpoint. `lent_bytes` are in segments that tensors live in;
    `resident_bytes` is what the kernel says; `idle_seconds` since a load last took from it."""

    source: str
    held_bytes: int
    lent_bytes: int
    resident_bytes: int
    pinned_bytes: int
    idle_seconds: float


class _Stored(NamedTuple):
    """Bytes of a file: where they start, how many, and where they are."""

    start: int
    nbytes: int
    segment: Segment
    place: int


class HostPool:
    """Host memory kept between models: while it is open, all loads of this process read into it,
    and a load of what it holds takes it from there. Use it as a context, or close it.

    It holds `limit_bytes` at most, in use and idle; what does not fit is loaded as without a pool.
    What no tensor lives in is given back, the least recently used first, to make room, and where
    the machine or the cgroup runs short. Where this process has opened a CUDA device, memory is
    pinned once it is filled; `pinned` False leaves that, True opens one and refuses to do without.
    """

    def __init__(self, limit_bytes: int, *, pinned: bool | None = None) -> None:
        """Raises ValueError for a limit below 1, BackendUnavailable for `pinned` without CUDA."""
        if limit_bytes < 1:
            raise ValueError(f"a pool of {limit_bytes} bytes holds nothing")
        self.pid = os.getpid()
        self.limit_bytes = limit_bytes
        self.notes: list[str] = []  # what it has to do without
        self._pinned = pinned
        self._device: Device | None = gpu.device(0) if pinned else None
        self._lock = fork_safe_lock(self)
        self._segments: list[Segment] = []  # the least recently used first
        self._stored: dict[Identity, list[_Stored]] = {}
        host_buffers.use_pool(self)
        quiesce.register(self)

    @property
    def held_bytes(self) -> int:
        """Bytes of its segments, in use and idle."""
        with self._lock:
            return sum(segment.length for segment in self._segments)

    @property
    def idle_bytes(self) -> int:
        """Bytes of segments that no tensor lives in."""
        with self._lock:
            return sum(segment.length for segment in self._segments if segment.idle)

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are registered with CUDA."""
        with self._lock:
            return sum(segment.length for segment in self._segments if segment.pinned)

    def held(self) -> list[Held]:
        """What it holds, checkpoint by checkpoint, the least recently used first."""
        with self._lock:
            groups: dict[str, list[Segment]] = {}
            for segment in self._segments:
                groups.setdefault(segment.source, []).append(segment)
            now = time.monotonic()
            return [
                Held(
                    source,
                    sum(one.length for one in some),
                    sum(one.length for one in some if not one.idle),
                    sum(page_cache.resident_bytes(one.fd) for one in some),
                    sum(one.length for one in some if one.pinned),
                    now - max(one.used for one in some),
                )
                for source, some in groups.items()
            ]

    def find(
        self, checkpoint: Checkpoint, pieces: Iterable[ByteRange], mappings: dict[Segment, Region],
        *, pinned: bool = False,
    ) -> dict[str, BufferView]:  # fmt: skip
        """Where those of the pieces are that it holds. `mappings` are the caller's own, by segment;
        with `pinned`, what is pinned is that memory itself, which nobody may write to."""
        views: dict[str, BufferView] = {}
        with self._lock:
            for piece in pieces:
                found = self._at(checkpoint.shards[piece.shard].identity, piece)
                if found is None:
                    continue
                segment = found.segment
                region = (segment.pinned if pinned else None) or mappings.get(segment)
                if region is None:
                    try:
                        region = segment.lease.lend(segment.fd, 0, segment.length, False)
                    except OSError:  # no room to map it: the load reads the files
                        continue
                    mappings[segment] = region
                views[piece.name] = BufferView(region, found.place + piece.offset - found.start)
                self._use(segment)
        return views

    def _at(self, file: Identity, piece: ByteRange) -> _Stored | None:
        rows = self._stored.get(file)
        if not rows or not piece.nbytes:
            return None
        found = rows[max(bisect_right(rows, piece.offset, key=_start) - 1, 0)]
        inside = found.start <= piece.offset
        return (
            found if inside and piece.offset + piece.nbytes <= found.start + found.nbytes else None
        )

    def _use(self, segment: Segment) -> None:
        segment.used = time.monotonic()
        if self._segments[-1] is not segment:
            self._segments.remove(segment)
            self._segments.append(segment)

    def keep(self, plan: ReadPlan) -> Intake | None:
        """Memory of the pool for these reads; None where it has no room for them. Raises
        PlacementError where the machine has none."""
        length = sum(whole_units(target.length) for target in plan.targets)
        with self._lock:
            self.make_room(plan.read_bytes)
            segment = self._take(length, plan.read_bytes)
            if segment is None:
                return None
            self._segments.append(segment)
            try:
                return Intake(segment, plan, self._fill)
            except BaseException as error:
                self._drop(segment)
                if not isinstance(error, OSError):
                    raise
                self.notes.append(f"a segment of {length} bytes is not mapped: {error.strerror}")
                return None

    def _take(self, length: int, wanted_bytes: int) -> Segment | None:
        if length > self.limit_bytes:
            return None
        used = None
        while used is None and self.held_bytes + length > self.limit_bytes:
            victim = next((one for one in self._segments if one.idle), None)
            if victim is None:
                return None
            if length <= victim.length <= length * _WASTE:
                used = victim
            else:
                self._drop(victim)
        if used is None:
            host_buffers.require_room(wanted_bytes)
            try:
                return Segment(length)
            except OSError as error:
                self.notes.append(f"no segment of {length} bytes: {error.strerror}")
                return None
        # Its memory is there already, which on many machines is the dearer half of a read.
        self._forget(used)
        self._segments.remove(used)
        return used

    def _fill(self, segment: Segment, checkpoint: Checkpoint | None, runs: Sequence[Run]) -> None:
        with self._lock:
            if checkpoint is None or segment not in self._segments:
                self._drop(segment)
                return
            segment.source = checkpoint.source
            for shard, offset, nbytes, place in runs:
                file = checkpoint.shards[shard].identity
                row = _Stored(offset, nbytes, segment, place)
                insort(self._stored.setdefault(file, []), row, key=_start)
                segment.stored.append(file)
            self._use(segment)
            pinner = self._pinner()
            if pinner is None or segment.pinned is not None:
                return
            try:
                region = segment.lease.lend(segment.fd, 0, segment.length, True)
            except OSError as error:
                self.notes.append(f"its memory is not pinned: {error}")
                return
        # Pinning takes 0.1 s for each GiB: other loads do not wait for it.
        self._pin(segment, region, pinner)

    def _pinner(self) -> Device | None:
        """The device that memory is pinned by: one that is open, since opening one makes a context
        there, which a load to the CPU has no use for."""
        if self._pinned is False:
            return None
        if self._device is None:
            self._device = gpu.any_open()
        return self._device

    def _pin(self, segment: Segment, region: Region, device: Device) -> None:
        try:
            device.pin(region.address, region.length)
        except CudaFailure as error:
            self._pinned = False
            self.notes.append(f"its memory is not pinned: {error}")
            return
        with self._lock:
            if segment in self._segments:
                segment.pinned = region
                return
        device.unpin(region.address)  # it was given back meanwhile

    def _unpin(self, segment: Segment) -> None:
        if segment.pinned is not None and self._device is not None:
            self._device.unpin(segment.pinned.address)
            segment.pinned = None

    def _forget(self, segment: Segment) -> None:
        for file in set(segment.stored):
            rows = [row for row in self._stored.get(file, ()) if row.segment is not segment]
            if rows:
                self._stored[file] = rows
            else:
                self._stored.pop(file, None)
        segment.stored.clear()

    def _drop(self, segment: Segment) -> None:
        """Forgets a segment. What tensors have of it stays theirs."""
        self._forget(segment)
        if segment in self._segments:
            self._segments.remove(segment)
            self._unpin(segment)
            os.close(segment.fd)

    def make_room(self, nbytes: int) -> None:
        """Gives idle memory back where the machine, or its cgroup, would run short of it."""
        with self._lock:
            for segment in list(self._segments):
                available = host_buffers.available_bytes()
                if available is None or nbytes + host_buffers.SPARE_BYTES <= available:
                    return
                if segment.idle:
                    self._drop(segment)

    def trim(self, most_bytes: int = 0) -> None:
        """Gives idle memory back, the least recently used first, until no more than so many bytes
        are held."""
        with self._lock:
            for segment in list(self._segments):
                if self.held_bytes > most_bytes and segment.idle:
                    self._drop(segment)

    def close(self) -> None:
        """Gives all of it back; what tensors live in, when they die. May be called again."""
        host_buffers.drop_pool(self)
        quiesce.unregister(self)
        self.quiesce()

    def busy(self) -> str:
        """For `quiesce`: whoever reads into it says so himself."""
        return ""

    def quiesce(self) -> None:
        """Lets go of what a dump cannot carry: its memory files and its pins."""
        if self.pid != os.getpid():
            return
        with self._lock:
            for segment in list(self._segments):
                self._drop(segment)

    def resume(self) -> None:
        """It fills again with the next loads."""

    def __enter__(self) -> HostPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def keep(plan: ReadPlan) -> Intake | None:
    """Memory of the open pool for these reads, where there is one and it has room."""
    pool = current()
    return pool.keep(plan) if pool is not None and plan.transfers else None


def require(pieces: Iterable[ByteRange]) -> None:
    """Raises PlacementError where the open pool is too small for these, even when it is empty."""
    pool = current()
    wanted = sum(piece.nbytes for piece in pieces)
    limit = pool.limit_bytes if pool is not None else 0
    if wanted > limit:
        raise PlacementError(
            f"{wanted:,} bytes are to be kept in a pool of {limit:,} bytes",
            missing_bytes=wanted - limit,
        )


def find(
    checkpoint: Checkpoint,
    pieces: Iterable[ByteRange],
    mappings: dict[Segment, Region],
    **words: Any,
) -> dict[str, BufferView]:
    """`HostPool.find` of the open pool; nothing where there is none."""
    pool = current()
    return {} if pool is None else pool.find(checkpoint, pieces, mappings, **words)


def current() -> HostPool | None:
    """The pool that is open in this process, if any."""
    pool = host_buffers.current_pool()
    return pool if isinstance(pool, HostPool) else None


def unchanged(checkpoint: Checkpoint) -> bool:
    """Whether the files are still those that were opened."""
    try:
        checkpoint.verify_unchanged()
    except GdsloadError:
        return False
    return True


def _start(row: _Stored) -> int:
    return row.start
