"""The registry of prefetched ranges, from which loads claim what they need.

    prefetch ── offers ──► Offer ── claim(file, range) ──► Claim ──► a load

An `Offer` holds ranges of one checkpoint that a prefetch has read or is reading. Files are compared
by the identity of their bytes, so a newer version of a file is never mistaken for the old one, and
a copy in the local cache counts as the remote file. A load claims before it plans its reads. A
claimed range is gone for others, because two tensors must never share memory. Nothing is read here.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from gdsload.checkpoint import Checkpoint, Identity
from gdsload.checkpoint.locate import hub_folder
from gdsload.errors import CheckpointError, StallError
from gdsload.memory.host_buffers import BufferView
from gdsload.planning.read_plan import ByteRange
from gdsload.remote.urls import is_url, sources_of, split_file
from gdsload.report import LoadReport
from gdsload.system.cancellation import WAKE_SECONDS, check
from gdsload.system.gc_control import collector_paused
from gdsload.system.lifecycle import fork_safe_lock, in_child
from gdsload.system.parallel import in_thread
from gdsload.system.threads import SafeEvent

if TYPE_CHECKING:
    from gdsload.loading.batch import Batch
    from gdsload.readahead.prefetch_batch import PrefetchBatch

# The state of prefetched bytes: being read, read, or lost (cancelled or failed: to be read anew).
READING, READ, LOST = "reading", "read", "lost"

_LOOK_SECONDS = 2.0  # for the answer of a mount
_start = attrgetter("start")


def nothing() -> None:
    """The `watch` of a load that has nothing else to do."""


class OfferedRange(NamedTuple):
    """Bytes `start` to `end` of a file, read by transfers `first` to `last`. Without a `view` the
    bytes are in the page cache, and more than one load may claim them. `of_file`: the view is of a
    mapping of the file, whose bytes change with it."""

    start: int
    end: int
    view: BufferView | None
    first: int
    last: int
    of_file: bool = False


class Claim(NamedTuple):
    """A range that a load has claimed, and the transfers that read it: those of the prefetch, or,
    if it has lost the range, of the load. `of_file` is as for `OfferedRange`."""

    range: ByteRange
    view: BufferView | None
    batch: Batch
    first: int
    last: int
    of_file: bool
    offer: Offer

    def state(self) -> str:
        """READING, READ or LOST."""
        return self.batch.state(self.first, self.last)

    def wait_for(self, seconds: float) -> None:
        """Waits until the bytes have been read or lost, at most this long."""
        self.batch.wait_for(self.first, self.last, seconds)

    def free_pages(self) -> None:
        """Frees the pages of the range: the load makes no tensor of them."""
        self.offer.free_claimed(self)


class Offer:
    """What one prefetch offers. It is registered before its files are open, filled once they are,
    and withdrawn when all of it was claimed or the prefetch is closed. Ranges in the memory of a
    GPU are for loads to that `device`; ranges in host memory are for all loads."""

    def __init__(self, source: str, *, keep: bool = False, verify: object = "size") -> None:
        """With `keep`, ranges that a load did not claim stay for the next one. `verify`: what the
        prefetch compares its bytes with before it offers them."""
        self.source = source
        self.keep = keep
        self.verify = verify
        self.device = "cpu"
        self.claimed_bytes = 0
        self._lock = fork_safe_lock(self)
        self._known = SafeEvent()  # it was filled, or will never be
        self._unanswered: set[str] = set()  # checkpoints that may_hold_any_of got no answer for
        self.filler = 0  # the thread that fills it
        self.awaited = False  # whether somebody waits, or has waited, until it is filled
        self._announced: set[tuple[Identity, int, int]] | None = None  # file, offset, bytes
        self._progress_time = time.monotonic()
        self._batch: PrefetchBatch | None = None
        self._free: dict[Identity, list[OfferedRange]] = {}
        self._reading = True  # whether bytes may still arrive
        self._late: list[OfferedRange] = []  # dropped while they were being read

    def fill(
        self,
        batch: PrefetchBatch,
        ranges: dict[Identity, list[OfferedRange]],
        device: str = "cpu",
    ) -> None:
        """Sets the ranges of each file, which must not overlap."""
        with self._lock:
            self._batch = batch
            self.device = device
            self._free = {file: sorted(rows, key=_start) for file, rows in ranges.items()}
        self._known.set()

    def clear(self) -> None:
        """Drops all ranges that nobody has claimed, and the batch that read them."""
        with self._lock:
            batch, free = self._batch, self._free
            self._free, self._batch = {}, None
            for rows in free.values():
                self._free_pages(batch, rows)
        self._known.set()

    def drop_rest(self, files: Iterable[Identity]) -> None:
        """A load that claimed from these files has ended: drops the rest of them, unless `keep`."""
        if not self.keep:
            with self._lock:
                for file in files:
                    self._free_pages(self._batch, self._free.pop(file, ()))

    def free_claimed(self, claim: Claim) -> None:
        """Frees the pages of a claimed range, which becomes no tensor."""
        start, end = claim.range.offset, claim.range.offset + claim.range.nbytes
        row = OfferedRange(start, end, claim.view, claim.first, claim.last, claim.of_file)
        with self._lock:
            self._free_pages(self._batch, [row])

    def reads_ended(self) -> None:
        """No more bytes arrive: frees what was dropped while it was being read."""
        with self._lock:
            self._reading = False
            self._free_pages(None, self._late)
            self._late = []

    def _free_pages(self, batch: PrefetchBatch | None, rows: Iterable[OfferedRange]) -> None:
        """Frees the pages of ranges that become no tensors: a tensor in the same region would keep
        them otherwise. Ranges that are still being read are freed by `reads_ended`."""
        if self.device != "cpu":
            return
        for row in rows:
            if row.start == row.end or row.view is None or row.of_file:
                continue
            if self._reading and not (batch and batch.has_arrived(row.first, row.last)):
                self._late.append(row)
            else:
                row.view.free_pages(row.end - row.start)

    def hurry(self) -> None:
        """A load waits for it now: it no longer yields to loads."""
        batch = self._batch
        if batch is not None:
            batch.hurry()

    @property
    def empty(self) -> bool:
        """Whether nothing is left to claim. False until the offer is filled."""
        with self._lock:
            # A copy: a session that is collected meanwhile may drop some.
            rows = chain.from_iterable(list(self._free.values()))
            return self._known.is_set() and not any(row.start < row.end for row in rows)

    def note_progress(self, idle_seconds: float = 0.0) -> None:
        """The prefetch made progress so many seconds ago: loads go on waiting for it."""
        self._progress_time = time.monotonic() - idle_seconds

    def await_filled(self, stall_seconds: float, watch: Callable[[], object] = nothing) -> bool:
        """Waits until the offer is filled; False if its prefetch makes no progress for
        `stall_seconds`, or if its own thread calls this. Calls `watch` from time to time.

        Raises LoadCancelled, and what `watch` raises.
        """
        if self.filler == threading.get_ident():
            return self._known.is_set()
        self.awaited = True
        while not self._known.is_set():
            check()
            watch()
            if self.stalled(stall_seconds):
                return False
            self._known.wait(min(WAKE_SECONDS, stall_seconds))
        return True

    def announce(self, checkpoint: Checkpoint, ranges: Iterable[ByteRange]) -> None:
        """Tells other prefetches the ranges that it will be filled with."""
        files = [shard.original for shard in checkpoint.shards]
        self._announced = {(files[each.shard], each.offset, each.nbytes) for each in ranges}

    def may_get_any_of(self, checkpoint: Checkpoint, ranges: Iterable[ByteRange]) -> bool:
        """Whether it may be filled with some of these ranges: before `announce` it may."""
        if (announced := self._announced) is None:
            return True
        files = [shard.original for shard in checkpoint.shards]
        return any((files[each.shard], each.offset, each.nbytes) in announced for each in ranges)

    def wait(self, seconds: float) -> bool:
        """Waits up to `seconds` until it is filled or withdrawn; returns whether it is."""
        return self._known.wait(seconds)

    def stalled(self, stall_seconds: float) -> bool:
        """Whether its prefetch has made no progress for so long."""
        return time.monotonic() - self._progress_time > stall_seconds

    def may_hold_any_of(self, checkpoint: Checkpoint) -> bool:
        """Whether files of a checkpoint may be among those that the prefetch is about to open.

        In a thread, since it looks at the files of the prefetch, whose mount may hang. If there is
        no answer within seconds, they are not waited for.
        """
        paths = [shard.original_path for shard in checkpoint.shards]
        if self._known.is_set() or checkpoint.source in self._unanswered:
            return False
        with suppress(StallError):
            return in_thread(
                lambda: any(map(self.may_hold, paths)), self.source, stall_seconds=_LOOK_SECONDS
            )
        self._unanswered.add(checkpoint.source)  # nor by its next windows
        return False

    def may_hold(self, path: str) -> bool:
        """Whether a file may be among those that the prefetch is about to open, by its path."""
        if is_url(self.source) or is_url(path):
            directory = self._directory_url()
            # A list of sources goes on with the next one.
            ends = "/" if is_url(directory) and not sources_of(directory) else ""
            return path == self.source or path.startswith(directory.rstrip("/") + ends)
        files = os.path.abspath(path), os.path.realpath(path)
        if not os.path.exists(self.source):
            folder = hub_folder(self.source)
            # Without a folder it may be an open Checkpoint of several files.
            return not folder or any(folder in file.split(os.sep) for file in files)
        for normal in (os.path.abspath, os.path.realpath):
            root = normal(self.source)
            if os.path.isfile(root):
                root = os.path.dirname(root)
            for file in files:
                if os.path.commonpath([root, file]) == root:
                    return True
        return False

    def _directory_url(self) -> str:
        """The URL of the directory, if the source is that of a file in it."""
        if self.source.endswith((".safetensors", ".json")):
            with suppress(CheckpointError):  # it cannot be opened
                return split_file(self.source)[0]
        return self.source

    def _find(self, file: Identity, wanted: ByteRange) -> int:
        """The index of the free range that contains `wanted`, or -1; no bytes need no range."""
        if not wanted.nbytes:
            return -1
        rows = self._free.get(file, [])
        index = bisect_right(rows, wanted.offset, key=_start) - 1
        return index if index >= 0 and rows[index].end >= wanted.offset + wanted.nbytes else -1

    def has(self, file: Identity, wanted: ByteRange) -> bool:
        """Whether `claim` would succeed."""
        with self._lock:
            return self._find(file, wanted) >= 0

    def claim(
        self, file: Identity, wanted: ByteRange, *, mapped: bool = True, owned: bool = False
    ) -> Claim | None:
        """Claims a range if one free range contains it; None otherwise. Without `mapped`, ranges
        in the page cache are skipped; with `owned`, views of mapped files are skipped."""
        with self._lock:
            index = self._find(file, wanted)
            if index < 0 or self._batch is None:
                return None
            found = self._free[file][index]
            if (found.view is None and not mapped) or (found.of_file and owned):
                return None
            self.claimed_bytes += wanted.nbytes
            view = None
            if found.view is not None:
                region, offset = found.view
                end = wanted.offset + wanted.nbytes
                view = BufferView(region, offset + wanted.offset - found.start)
                after = BufferView(region, offset + end - found.start)
                rest = [found._replace(end=wanted.offset), found._replace(start=end, view=after)]
                left = [row for row in rest if row.start < row.end]
                # An empty row stays: to remove the first of 100,000 rows moves all others. It has
                # no view, which would keep the memory of a device.
                self._free[file][index : index + 1] = left or [rest[0]._replace(view=None)]
            first, last = found.first, found.last
            return Claim(wanted, view, self._batch, first, last, found.of_file, self)


_lock = fork_safe_lock(sys.modules[__name__])
_offered: list[Offer] = []


def offer(new: Offer) -> None:
    """Registers an offer: loads find it from now on."""
    with _lock:
        _offered.append(new)


def withdraw(old: Offer) -> None:
    """Undoes `offer`. May be called again."""
    with _lock, suppress(ValueError):
        _offered.remove(old)
    old.clear()


def offered() -> list[Offer]:
    """The offers of this process, oldest first."""
    with _lock:
        return list(_offered)


def _filled(
    checkpoint: Checkpoint,
    stall_seconds: float,
    report: LoadReport,
    watch: Callable[[], object] = nothing,
) -> list[Offer]:
    """All offers. Those that may be of these files are waited for until they are filled."""
    found = offered()
    for each in found:
        if each.may_hold_any_of(checkpoint):
            with report.phase("wait for the prefetch"):
                each.await_filled(stall_seconds, watch)
    return found


def claim_ranges(
    checkpoint: Checkpoint,
    ranges: Sequence[ByteRange],
    stall_seconds: float,
    report: LoadReport,
    *,
    mapped: bool = True,
    owned: bool = False,
    device: str = "cpu",
    watch: Callable[[], object] = nothing,
) -> tuple[dict[str, Claim], list[Offer]]:
    """Claims what prefetches have read of these ranges into this device's or the host's memory.

    Args:
        checkpoint: The checkpoint of the ranges.
        ranges: What the load needs.
        stall_seconds: How long a prefetch may make no progress that is opening, or comparing, what
            may be the same files. Until then it is waited for.
        report: Of the load: gets the time of this wait.
        mapped: Claim ranges in the page cache as well.
        owned: Claim no mappings of files.
        device: The device of the load.
        watch: Called from time to time during this wait.

    Returns:
        The claims by the names of their ranges, and the offers that they are from.

    Raises:
        LoadCancelled: The load was cancelled.
    """
    claims: dict[str, Claim] = {}
    used: list[Offer] = []
    filled = _filled(checkpoint, stall_seconds, report, watch)
    found = [each for each in filled if each.device in ("cpu", device)]
    # Ranges that are on the device come before those that would have to be copied to it, and those
    # that were compared with checksums before others.
    found.sort(key=lambda offer: (offer.device != device, offer.verify == "size"))
    with collector_paused():
        for each in found:
            before = len(claims)
            for wanted in ranges:
                if wanted.name not in claims:
                    file = checkpoint.shards[wanted.shard].original
                    claim = each.claim(file, wanted, mapped=mapped, owned=owned)
                    if claim is not None:
                        claims[wanted.name] = claim
            if len(claims) > before:
                used.append(each)
    for each in used:
        each.hurry()
    return claims, used


def prefetched_to(
    device: str,
    checkpoint: Checkpoint,
    ranges: Iterable[ByteRange],
    stall_seconds: float,
    report: LoadReport,
) -> set[str]:
    """The names of the ranges that a prefetch has read, or is reading, into this device's memory.

    Waits as `claim_ranges` does, and claims nothing.
    """
    found = [each for each in _filled(checkpoint, stall_seconds, report) if each.device == device]
    return {
        wanted.name
        for wanted in ranges
        if any(each.has(checkpoint.shards[wanted.shard].original, wanted) for each in found)
    }


in_child(_offered.clear)  # the reads stayed in the parent
