"""Batches of reads that no load waits for yet; any thread may ask for their progress.

PrefetchBatch      reads into host or device buffers, which a load claims
PageCacheWarmup    reads into a small scratch buffer, to fill the page cache
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import partial

from gdsload._native.memory import Region
from gdsload.backends import Memory, Progress
from gdsload.checkpoint import Identity
from gdsload.errors import FileChanged, PlacementError, ReadError
from gdsload.loading.batch import Batch
from gdsload.loading.claims import Claim, OfferedRange
from gdsload.loading.session import Session
from gdsload.memory import DRAM, page_cache
from gdsload.memory.host_buffers import BufferView
from gdsload.planning.read_plan import (
    ByteRange,
    Location,
    MergedRange,
    ReadPlan,
    Target,
    Transfer,
    merged_ranges_of,
)
from gdsload.system.available import available_bytes
from gdsload.system.lifecycle import fork_safe_lock, taken
from gdsload.system.parallel import note_progress

# Size of one read into the page cache, at most, and of the scratch memory that all of them share.
WARM_REQUEST_BYTES = 4 << 20
SCRATCH_BYTES = 64 << 20


class PrefetchBatch(Batch):
    """Ranges that are read into memory before a load asks for them."""

    ahead = True

    def __init__(
        self,
        session: Session,
        plan: ReadPlan,
        views: dict[str, BufferView],
        claims: dict[str, Claim],
    ) -> None:
        self.error: ReadError | FileChanged | None = None
        # Reentrant: a signal handler may interrupt the thread that holds it.
        self._lock = fork_safe_lock(self)
        super().__init__(session, plan, views, claims)

    @classmethod
    def of(cls, session: Session, ranges: Sequence[ByteRange]) -> PrefetchBatch:
        """Posts the reads and returns at once. Raises PlacementError, before anything is read, if
        there is too little memory."""
        return cls(session, *session.arrange(ranges))

    def offered_ranges(self, ranges: Sequence[ByteRange]) -> dict[Identity, list[OfferedRange]]:
        """The byte ranges that loads can claim, by file."""
        rows: dict[Identity, list[OfferedRange]] = {}
        shards = self.session.checkpoint.shards
        for name, shard, offset, nbytes in ranges:
            if nbytes:
                location = self.plan.locations.get(name)
                first, last = (location.first, location.last) if location else (0, -1)
                view = self.views.get(name)
                of_file = view is not None and self.session.is_mapping(view, shard)
                rows.setdefault(shards[shard].original, []).append(
                    OfferedRange(offset, offset + nbytes, view, first, last, of_file)
                )
        return rows

    def look(self) -> bool:
        """Collects finished transfers. True once the request has ended.

        Returns False at once if another thread is here: a signal handler may have interrupted that
        thread, and wait for this one to end.
        """
        with taken(self._lock) as mine:
            if mine:
                return self._look()
            self._idle_seconds = 0.0  # not asked: an old idle time must not count again
            return False

    def _look(self) -> bool:
        progress = self._note_progress()
        return progress is None or progress.finished

    def _note_progress(self) -> Progress | None:
        progress = super()._note_progress()
        if self._failure is not None and self.error is None:
            self.error = self._error(self._failure)
        return progress

    def state(self, first: int, last: int) -> str:
        """As of any batch. Any thread may ask."""
        with self._lock:
            return super().state(first, last)

    def hurry(self) -> None:
        """A load waits for it now: it no longer yields to loads."""
        with self._lock:
            if self._request is not None and self._backend is not None:
                self._backend.yield_to_loads(self._request, False)

    def release(self) -> None:
        """Ends the request, finished or not. Bytes that were read stay."""
        with self._lock:
            try:
                self._look()
            finally:
                super().release()


class PageCacheWarmup(PrefetchBatch):
    """Byte ranges that are read into the page cache."""

    @classmethod
    def of(cls, session: Session, ranges: Sequence[ByteRange]) -> PageCacheWarmup:
        """Reads the bytes that are not cached. The kernel's read-ahead calls are no substitute: on
        many disks one does about 100 KiB, and each blocks the interpreter."""
        with session.report.phase("plan"):
            plan = _warming_plan(session, ranges)
            session.register(*sorted({transfer.shard for transfer in plan.transfers}))
        return cls(session, plan, {}, {})

    def _take_memory(self) -> list[Memory]:
        """One small region for all transfers, which may overwrite each other."""
        lengths = [target.length for target in self.plan.targets]
        try:
            regions = [Region.anonymous(length) for length in lengths]
        except MemoryError as error:
            raise PlacementError(str(error) or "no memory") from error
        return [
            Memory(DRAM, region.address, length, region)
            for region, length in zip(regions, lengths, strict=True)
        ]


def _warming_plan(session: Session, ranges: Sequence[ByteRange]) -> ReadPlan:
    """Buffered reads of the bytes that are not in the page cache, in file order."""
    merged_ranges = merged_ranges_of(ranges, 0)
    question = partial(_cold_ranges, session, merged_ranges)
    cold = session.checkpoint.answer_to(question, {each.shard for each in ranges})
    # A backend is opened only if there is something to read.
    most = session.open().limits(session.device).max_request if cold else WARM_REQUEST_BYTES
    request_bytes = min(WARM_REQUEST_BYTES, most)
    slots = SCRATCH_BYTES // request_bytes
    transfers: list[Transfer] = []
    ends: list[tuple[int, int]] = []
    for shard, start, end in cold:
        for offset in range(start, end, request_bytes):
            length = min(request_bytes, end - offset)
            tag = len(transfers)
            slot = tag % slots * request_bytes
            transfers.append(Transfer(shard, offset, length, length, 0, slot, "buffered", tag))
            ends.append((shard, offset + length))
    locations = {}
    starts = [(transfer.shard, transfer.offset) for transfer in transfers]
    for name, shard, offset, nbytes in ranges:
        first = bisect_right(ends, (shard, offset))
        last = bisect_left(starts, (shard, offset + nbytes)) - 1
        locations[name] = Location(-1, 0, first, last)
    targets = (Target(0, 0, min(len(transfers), slots) * request_bytes),) if transfers else ()
    wanted = sum(each.nbytes for each in ranges)
    return ReadPlan(tuple(transfers), targets, tuple(merged_ranges), locations, (), wanted)


def _cold_ranges(
    session: Session, merged_ranges: Iterable[MergedRange]
) -> list[tuple[int, int, int]]:
    """The shard, the first byte and the end of each range that is not in the page cache."""
    cold = []
    for merged in merged_ranges:
        fd = session.checkpoint.shards[merged.shard].fd
        for offset in range(merged.offset, merged.end, WARM_REQUEST_BYTES):
            end = min(offset + WARM_REQUEST_BYTES, merged.end)
            if not page_cache.wholly_resident(fd, offset, end - offset):
                cold.append((merged.shard, offset, end))
            note_progress()
    return cold


def fitting(ranges: Sequence[ByteRange], limit_bytes: int | None) -> list[ByteRange]:
    """The first byte ranges that fit the limit, or the available memory; the last is shortened."""
    left = limit_bytes if limit_bytes is not None else available_bytes()
    if left is None:
        return list(ranges)
    fit: list[ByteRange] = []
    for each in ranges:
        size = min(each.nbytes, left)
        fit.append(each._replace(nbytes=size))
        left -= size
        if left == 0:
            break
    return fit
