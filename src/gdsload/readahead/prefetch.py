"""Prefetch: reads weights before a load asks for them, for example while the process imports.

    prefetch() ──► thread: open, plan, post ──► native threads read ──► a load claims it, or close()

`prefetch` returns at once and does not import torch. A load of the same files in this process finds
the bytes by the identity of the files, takes those that were read, and waits for the others. Not
responsible for finding out which model will be loaded.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from gdsload._native.ranges import bytes_of
from gdsload.checkpoint import Checkpoint
from gdsload.checkpoint.checkpoint import Lookup
from gdsload.checkpoint.header import HEADER_LIMIT_BYTES
from gdsload.checkpoint.selection import repeatable
from gdsload.errors import CheckpointError, GdsloadError, StallError, without_traceback
from gdsload.loading import claims
from gdsload.loading.session import Session, verifier_of
from gdsload.loading.settings import ReadSettings
from gdsload.memory import page_cache
from gdsload.memory.host_buffers import current_pool
from gdsload.planning.read_plan import ByteRange, byte_ranges_of
from gdsload.readahead.prefetch_batch import PageCacheWarmup, PrefetchBatch, fitting
from gdsload.remote.urls import shown_source
from gdsload.report import LoadReport, peak_rss_bytes
from gdsload.system import lifecycle, quiesce
from gdsload.system.cancellation import WAKE_SECONDS
from gdsload.system.device_name import current_gpu, device_kind, require_name
from gdsload.system.gc_control import ease_imports, imports_done
from gdsload.system.parallel import in_thread, note_progress
from gdsload.system.stall import STALL_SECONDS, StallWatch
from gdsload.system.threads import SafeEvent, start_thread

if TYPE_CHECKING:
    import torch

    from gdsload.checkpoint.selection import Names
    from gdsload.events import OnEvent
    from gdsload.loading.device_init import DeviceInit

TIERS = ("memory", "pool", "pagecache")
# The states of a prefetch. One of the last four follows READING. COMPLETE: all was read; `close`
# turns it into CLOSED.
OPENING, READING, COMPLETE = "opening", "reading", "landed"
CANCELLED, FAILED, CLOSED = "cancelled", "failed", "closed"
REMEMBERED = 32  # ended prefetches that `warmup.status` can report
# `prefetch` waits for its thread this long. Most checkpoints are open by then; beside an
# `import torch`, the thread would take ten times as long to get there.
HEAD_START_SECONDS = 0.025
_OTHER_POLL_SECONDS = 0.01  # while another prefetch is waited for; delays `close`
# `close` waits this long for the thread. It takes longer only if a signal handler that has
# interrupted the holder of a lock calls `close`.
_CLOSE_SECONDS = 2.0


class PrefetchCancelled(GdsloadError, RuntimeError):
    """The prefetch was cancelled or closed before all bytes were read."""


class PrefetchProgress(NamedTuple):
    """Progress of a prefetch, in bytes and seconds; made by `Prefetch.progress`.

    Attributes:
        state: "opening", "reading", "landed", "cancelled", "failed" or "closed".
        wanted_bytes: bytes to read; 0 while opening.
        landed_bytes: bytes that were read.
        claimed_bytes: bytes that loads have taken.
        resident_bytes: bytes in the page cache at the end of a prefetch with tier "pagecache".
        seconds: time since the start, or until the end.
    """

    state: str
    wanted_bytes: int
    landed_bytes: int
    claimed_bytes: int
    resident_bytes: int
    seconds: float


class Prefetch(quiesce.Holder):
    """A checkpoint that is read ahead of its load; made by `prefetch`.

    It ends with `close`, with its `with` block, or when a load has taken all of it.

    Attributes:
        source: The checkpoint, as the caller named it.
        tier: "memory", "pool" or "pagecache".
        report: What the prefetch did; complete when `wait` returns True.

    Example:
        >>> with gdsload.prefetch("model") as ahead:
        ...     tensors = gdsload.load_file("model")
    """

    def __init__(
        self,
        source: str,
        *,
        device: str,
        tier: str,
        settings: ReadSettings,
        names: Names,
        limit_bytes: int | None,
        keep: bool,
        lookup: Lookup,
        checkpoint: Checkpoint | None,
    ) -> None:
        self._opens = source
        # The process may change its directory before the thread opens the source.
        self._directory = _working_directory()
        self.source = source = shown_source(source)
        self.tier = tier
        self.report = LoadReport(source, device=device, on_event=settings.on_event, kind="prefetch")
        self._settings, self._lookup = settings, lookup
        # A load follows that wants all of a checkpoint that it has opened already.
        self._whole_bytes = 0 if checkpoint is None else checkpoint.total_bytes
        # A list may change, and an iterator end, before the thread reads it.
        self._names = repeatable(names)
        self._limit_bytes = limit_bytes
        self._checkpoint = checkpoint  # the caller's, who closes it
        self._offer = claims.Offer(source, keep=keep, verify=settings.verify)
        self._batch: PrefetchBatch | None = None
        self._error: BaseException | None = None
        self._state = OPENING
        self._wanted_bytes = self._landed_bytes = self._resident_bytes = 0
        self._warm_bytes = 0  # in the page cache before the prefetch
        self._left_out_bytes = 0  # wanted, but there is no memory for them
        self._others: list[Prefetch] = []  # that read the rest of the ranges
        self._compared = False  # with the checksums that were asked for, if any
        self._complete = False  # once it has ended: whether all bytes had been read
        self._start, self._start_cpu = time.monotonic(), time.process_time()
        self._seconds = 0.0
        self._lock = lifecycle.fork_safe_lock(self)  # reentrant, for signal handlers
        self._posted, self._ended = SafeEvent(), SafeEvent()
        self._thread: threading.Thread | None = None
        self._starter = threading.get_ident()

    def _begin(self) -> None:
        try:
            claims.offer(self._offer)
            quiesce.register(self)
            with _lock:
                _current.append(self)
                _started.append(self)
            self._thread = start_thread(self._run, "gdsload-prefetch")
            if self._thread is None:
                self.report.begin()
                self._fail(
                    GdsloadError(
                        f"{self.source}: no thread could be started to prefetch it (the limits on"
                        " processes and memory: `ulimit -u`, pids.max)"
                    )
                )
                self._end(FAILED)
            self._posted.wait(HEAD_START_SECONDS)
        except BaseException:  # Ctrl-C: the caller gets no object to close
            self._stop(CLOSED)
            raise
        finally:
            if self._thread is None:
                self._ended.set()
                quiesce.unregister(self)

    def _run(self) -> None:
        device_init: DeviceInit | None = None
        try:
            self._offer.filler = threading.get_ident()
            self.report.begin()
            device_init = self._open_device()
            with self.report.phase("open"):
                opened = self._opened()
            with opened as checkpoint:
                self._goes_on()
                ranges = self._ranges_of(checkpoint)
                device = "cpu"
                verify, backend = self._settings.verify, self._settings.backend
                verifier = verifier_of(checkpoint, verify, self.report, self._goes_on)
                if device_init is not None and self.tier == "memory" and verifier is None:
                    device = device_init.read_device(backend)
                    self._goes_on()
                with Session(
                    checkpoint,
                    self.report,
                    self._settings,
                    device=device,
                    claim=False,
                    maps=self.tier != "pool",
                    expected_bytes=self._whole_bytes or bytes_of(ranges),
                    verifier=verifier,
                ) as session:
                    self._goes_on()
                    self._read(session, ranges)
                    checkpoint.verify_unchanged()
                if self.tier == "pagecache":  # now, when the session drops nothing any more
                    self._resident_bytes = _resident_bytes(checkpoint, ranges)
        except GdsloadError as error:
            self._fail(error)
        except BaseException as error:
            self._fail(GdsloadError(f"{self.source}: the prefetch failed: {error!r}"))
            if not isinstance(error, Exception):
                raise
        finally:
            if device_init is not None:
                device_init.wait()
                if device_init.refusal:
                    self.report.refusals[self.report.device] = device_init.refusal
            self._end(COMPLETE)

    def _opened(self) -> AbstractContextManager[Checkpoint]:
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is not None:
            return nullcontext(checkpoint)
        path = self._opens
        if path and self._directory != _working_directory():
            there, seconds = os.path.join(self._directory, path), self._settings.stall_seconds
            if in_thread(partial(os.path.exists, there), there, stall_seconds=seconds):
                path = there  # no URL and no model id
        return self._lookup.open(path)

    def _ranges_of(self, checkpoint: Checkpoint) -> list[ByteRange]:
        """What to read, and has room. Raises CheckpointError, PlacementError."""
        ranges = byte_ranges_of(checkpoint, self._names)
        if self.tier == "pagecache":
            if checkpoint.remote:
                raise CheckpointError(f"{self.source}: tier='pagecache' is for local files only")
            wanted, ranges = ranges, fitting(ranges, self._limit_bytes)
            if self._limit_bytes is None:
                self._left_out_bytes = bytes_of(wanted) - bytes_of(ranges)
        elif self.tier == "pool" and (pool := current_pool()) is not None:
            pool.require(ranges)
        return ranges

    def _open_device(self) -> DeviceInit | None:
        """Starts to open the GPU, and to pin the ring that only the load will need."""
        if device_kind(self.report.device) != "cuda":
            return None
        from gdsload.loading.device_init import DeviceInit  # only needed for a GPU

        ring = self.tier == "pagecache" and self._settings.backend in ("auto", "posix")
        return DeviceInit(self.report.device, self._settings.options, ring=ring)

    def _read(self, session: Session, ranges: Sequence[ByteRange]) -> None:
        """Posts the reads, offers the byte ranges, and waits without the GIL."""
        ranges, self._others = self._without_others(session, ranges)
        self._goes_on()
        batch = (PageCacheWarmup if self.tier == "pagecache" else PrefetchBatch).of(session, ranges)
        try:
            if self.tier == "pool":
                batch.require_pool()
            with self._lock:
                to_read_bytes = bytes_of(ranges)
                self._wanted_bytes = to_read_bytes + self._left_out_bytes
                self._warm_bytes = max(to_read_bytes - batch.plan.read_bytes, 0)
                if self._state == OPENING:
                    self._state = READING
                self._batch = batch  # last: `progress` takes no lock
            if session.verifier is None:
                self._fill_offer(batch, ranges, session.device)
            else:
                self._offer.announce(session.checkpoint, ranges)
            self._posted.set()
            self.report.tensors = len(ranges)
            self.report.wanted_bytes = self._wanted_bytes
            with self.report.phase("read"):
                self._await(batch, session.stall_seconds)
            self._compared = session.verifier is None
            if not self._compared and self._state == READING:
                with self.report.phase("verify"):
                    # Loads wait for bytes that are not compared yet.
                    batch.wait(watch=self._goes_on, parts=ranges)
                self._compared = True
                self._fill_offer(batch, ranges, session.device)
        finally:
            batch.release()
            self._offer.reads_ended()
        self._await_others()

    def _await(self, batch: PrefetchBatch, stall_seconds: float) -> None:
        """Until all is read, or this ends. Raises StallError, ReadError and FileChanged."""
        watch = StallWatch()
        while self._state == READING and not batch.look():
            if watch.stalled(batch.idle_seconds(), stall_seconds):
                raise StallError(
                    f"{self.source}: no byte was read for {batch.idle_seconds():.0f} s",
                    path=self.source,
                    hint="stall_seconds sets the limit",
                )
            self._offer.note_progress(batch.idle_seconds())
            if self._offer.awaited and batch.session.verifier is not None:
                batch.hurry()  # its bytes are offered when all have been compared
            batch.wait_for(0, -1, WAKE_SECONDS)
        if batch.error is not None:
            raise without_traceback(batch.error)

    def _await_others(self) -> None:
        """Raises PrefetchCancelled if one of them has not read all."""
        for other in self._others:
            while self._state == READING and not other._ended.wait(_OTHER_POLL_SECONDS):
                pass
            if not other._complete:
                raise PrefetchCancelled(
                    f"{self.source}: another prefetch was reading the same, and was {other._state}"
                )

    def _goes_on(self, *_: object) -> None:
        """Notes progress, after each step of opening and while bytes are compared, so that loads go
        on waiting. Raises PrefetchCancelled after `cancel` or `close`."""
        if self._state not in (OPENING, READING):
            raise PrefetchCancelled(f"{self.source}: its prefetch was {self._state}")
        self._offer.note_progress()

    def _fill_offer(self, batch: PrefetchBatch, ranges: Sequence[ByteRange], device: str) -> None:
        """Offers the ranges to loads. From now on only the offer refers to the memory."""
        offered = batch.offered_ranges(ranges)
        batch.views.clear()
        with self._lock:
            if self._state == READING:
                self._offer.fill(batch, offered, device)

    def _without_others(
        self, session: Session, ranges: Sequence[ByteRange]
    ) -> tuple[list[ByteRange], list[Prefetch]]:
        """The byte ranges that no other prefetch reads into the same tier and device, and compares
        in the same way, and the prefetches that read the rest."""
        shards = session.checkpoint.shards
        self._await_older(session, ranges)
        mine, others = list(ranges), []
        waiting = self._waiting()
        for other in prefetches():
            theirs = other.tier, other._offer.device, other._offer.verify
            if other in waiting or theirs != (self.tier, session.device, self._offer.verify):
                continue
            left = [p for p in mine if not other._offer.has(shards[p.shard].original, p)]
            if len(left) < len(mine):
                mine = left
                others.append(other)
        return mine, others

    def _waiting(self) -> list[Prefetch]:
        """This prefetch, and all whose callbacks started it, directly or not: to wait for one of
        them would be a deadlock."""
        found: Prefetch | None = self
        waiting: list[Prefetch] = []
        while found is not None and found not in waiting:
            waiting.append(found)
            open_ones = (one for one in prefetches() if not one._ended.is_set())
            found = next((o for o in open_ones if o._offer.filler == waiting[-1]._starter), None)
        return waiting

    def _await_older(self, session: Session, ranges: Sequence[ByteRange]) -> None:
        """Waits for older prefetches that are opening what may be the same files, or comparing some
        of these ranges. Those never wait for this one."""
        mine = self.tier, self.report.device, self._offer.verify
        waiting = self._waiting()
        for older in takewhile(lambda one: one is not self, prefetches()):
            offer = older._offer
            theirs = older.tier, older.report.device, offer.verify
            if (
                theirs == mine
                and older not in waiting
                and offer.may_hold_any_of(session.checkpoint)
            ):
                while (
                    self._state == OPENING
                    and not offer.stalled(session.stall_seconds)
                    and not offer.wait(_OTHER_POLL_SECONDS)
                    and offer.may_get_any_of(session.checkpoint, ranges)
                ):
                    self._offer.note_progress()
                    offer.awaited = offer.awaited or self._offer.awaited

    def _fail(self, error: GdsloadError) -> None:
        with self._lock:
            if self._state in (OPENING, READING):
                self._error = without_traceback(error)
                self._state = FAILED
                self.report.failure = f"{type(error).__name__}: {error}"

    def _end(self, state: str) -> None:
        with self._lock:
            if self._state in (OPENING, READING):
                self._state = state
            if self._batch is not None:
                self._landed_bytes = self._landed_of(self._batch)
                self._complete = (
                    self._state != FAILED
                    and self._compared
                    and self._batch.complete
                    and all(other._complete for other in self._others)
                )
                self._batch = None  # loads that still take from it have it in their claims
            self._others.clear()
            if not self._ended.is_set():
                self._seconds = self.report.seconds = time.monotonic() - self._start
                self.report.cpu_seconds = time.process_time() - self._start_cpu
                self.report.peak_rss_bytes = peak_rss_bytes()
            # Loads find the bytes of the page cache and of a pool without an offer.
            withdraws = self._state != COMPLETE or self.tier != "memory" or self._offer.empty
        if withdraws:
            self._withdraw()
        self._posted.set()
        self._ended.set()
        self.report.end()
        # What the user gave it is not kept as long as its report.
        self._settings, self._names = self._settings.changed(on_event=None), None

    def _landed_of(self, batch: PrefetchBatch) -> int:
        """Wanted bytes that were read. Reads may include gaps between wanted bytes."""
        to_read_bytes = self._wanted_bytes - self._left_out_bytes - self._warm_bytes
        return self._warm_bytes + batch.landed_bytes * to_read_bytes // (batch.plan.read_bytes or 1)

    def _withdraw(self) -> None:
        claims.withdraw(self._offer)
        with _lock:
            if self in _current:
                _current.remove(self)

    def progress(self) -> PrefetchProgress:
        """The progress so far. Does not wait."""
        batch, ended = self._batch, self._ended.is_set()
        return PrefetchProgress(
            self._state,
            self._wanted_bytes,
            self._landed_bytes if batch is None or ended else self._landed_of(batch),
            self._offer.claimed_bytes,
            self._resident_bytes,
            self._seconds if ended else time.monotonic() - self._start,
        )

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until all bytes are read, and compared if `verify` asks for it.

        Called in the main thread, it lets the reads no longer yield to those of loads.

        Args:
            timeout: seconds to wait; None waits without a limit.

        Returns:
            True when all bytes are read, False after `timeout` seconds. Of tier "pagecache",
            without a limit: all that there is memory for (`progress` has the wanted bytes).

        Raises:
            GdsloadError: the error that ended the prefetch (CheckpointError, ReadError,
                PlacementError, BackendUnavailable), or PrefetchCancelled after `cancel` or
                `close`; also in a callback of this prefetch, or of one that reads a part for it:
                their threads read.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._ended.is_set():
            if self._needs(threading.get_ident()):
                raise GdsloadError(f"{self.source}: a callback of its prefetch cannot wait for it")
            left = WAKE_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return False
            if threading.current_thread() is threading.main_thread():
                self._offer.awaited = True  # one that it waits for may have to compare
                if batch := self._batch:
                    batch.hurry()
            self._ended.wait(min(left, WAKE_SECONDS))
            self._end_if_dead()
        if self._error is not None:
            raise without_traceback(self._error)
        if not self._complete:
            raise PrefetchCancelled(f"{self.source}: its prefetch was {self._state}")
        return True

    def _end_if_dead(self) -> None:
        """Ends it if its thread is gone and has not done that: there was no memory for a frame."""
        if self._thread is not None and not self._thread.is_alive() and not self._ended.is_set():
            self._fail(GdsloadError(f"{self.source}: no memory for the thread of its prefetch"))
            self._end(FAILED)

    def _needs(self, thread: int) -> bool:
        """Whether it ends only after this thread has gone on: its own, or that of another prefetch
        that reads a part of its ranges, directly or not."""
        if self._ended.is_set():
            return False
        others = list(self._others) if self._state in (OPENING, READING) else []
        return self._offer.filler == thread or any(other._needs(thread) for other in others)

    def cancel(self) -> None:
        """Ends the reads and frees the bytes that no load has claimed. A load that has claimed some
        reads the missing ones itself. May be called again, and at any time."""
        self._stop(CANCELLED)

    def close(self) -> None:
        """Ends the reads and frees the bytes that no load has claimed. May be called again."""
        self._stop(CLOSED)
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(_CLOSE_SECONDS)

    def _stop(self, state: str) -> None:
        with self._lock:
            if self._state in (OPENING, READING) or (state == CLOSED and self._state == COMPLETE):
                self._state = state
            batch = self._batch
        if batch is not None:
            batch.release()
        self._offer.reads_ended()
        self._withdraw()
        imports_done()

    def busy(self) -> str:
        """Internal: reads in progress, or a callback. A snapshot carries bytes that were read."""
        if not self._ended.is_set():
            return f"{self.source} is being prefetched"
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(WAKE_SECONDS)  # not for long: a callback may load, which waits
            if self._thread.is_alive():
                return f"{self.source} was prefetched, and a callback has not returned"
        return ""

    @property
    def _over(self) -> bool:
        """True if it reads no more and has nothing to claim."""
        return self._ended.is_set() and self._offer.empty

    def _orphan(self) -> None:
        """In a child of fork(): the reads and the memory belong to the parent."""
        self._ended = SafeEvent()
        self._offer, self._batch = claims.Offer(self.source), None
        if self._state in (OPENING, READING) or (
            self._state == COMPLETE and self.tier != "pagecache"
        ):
            self._state, self._complete = CANCELLED, False
        self._ended.set()

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.close()
        except BaseException:  # Ctrl-C, perhaps before its first step
            self.close()
            raise

    def __repr__(self) -> str:
        progress = self.progress()
        return (
            f"<Prefetch {self.source} ({self.tier}): {progress.state},"
            f" {progress.landed_bytes} of {progress.wanted_bytes} bytes>"
        )


_lock = lifecycle.fork_safe_lock(sys.modules[__name__])  # reentrant, for signal handlers
_current: list[Prefetch] = []
_started: deque[Prefetch] = deque(maxlen=REMEMBERED)


def prefetches() -> list[Prefetch]:
    """The prefetches of this process that read, or hold bytes to claim; oldest first."""
    with _lock:
        _current[:] = [one for one in _current if not one._over]
        return list(_current)


def started() -> list[Prefetch]:
    """The last prefetches of this process, oldest first, ended or not."""
    with _lock:
        return list(_started)


def _close_all() -> None:
    for one in prefetches():
        one.close()


def _forget() -> None:
    for one in {*_current, *_started}:
        one._orphan()
    _current.clear()
    _started.clear()


lifecycle.in_child(_forget)
# The interpreter stops daemon threads that wake up while it ends: they must have ended before.
lifecycle.at_exit(lifecycle.PREFETCHES, _close_all)


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""


def _resident_bytes(checkpoint: Checkpoint, ranges: Sequence[ByteRange]) -> int:
    """About how many bytes of these ranges are in the page cache."""

    def resident(one: ByteRange) -> int:
        note_progress()
        fd = checkpoint.shards[one.shard].fd
        return page_cache.estimated_bytes(fd, one.offset, one.nbytes) if one.nbytes else 0

    shards = {one.shard for one in ranges}
    return checkpoint.answer_to(lambda: sum(map(resident, ranges)), shards)


def prefetch(
    source: str | os.PathLike[str] | Checkpoint,
    device: str | int | torch.device = "cpu",
    *,
    tier: str = "memory",
    names: Names = None,
    limit_bytes: int | None = None,
    keep: bool = False,
    backend: str = "auto",
    cache: str = "auto",
    page_cache: str = "auto",
    options: Mapping[str, Any] | None = None,
    stall_seconds: float = STALL_SECONDS,
    verify: str | os.PathLike[str] = "size",
    on_event: OnEvent | None = None,
    revision: str | None = None,
    subfolder: str = "",
    variant: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    strict: bool = True,
    header_limit: int = HEADER_LIMIT_BYTES,
) -> Prefetch:
    """Starts to read a checkpoint in the background; returns within milliseconds.

    A later load of the same files in this process takes over the bytes. It needs no reference to
    the prefetch: files are identified by device, inode, size and times. A load that finds another
    version of a file reads it itself. Bytes in the page cache serve every later load; those in
    other memory are taken over once, because tensors own their memory. A process that prefetches
    for a GPU uses CUDA and must not fork afterwards.

    torch is not imported. If it was not imported yet, Python's cycle collector runs less often
    (once in 10,000 new objects) until the first load or `close`; importing transformers is then
    one seventh faster.

    Args:
        source: A file, a directory, an index file, or a model id, as for `load_file`; or an open
            Checkpoint, which the caller closes after the prefetch.
        device: Where the load is expected. For a GPU, tier "memory" is memory of this GPU; if the
            GPU cannot be used, `report.refusals` has the reason and host memory is used. The other
            tiers initialise the GPU meanwhile.
        tier: "memory" is the cheapest memory: the page cache if it has room, else memory that one
            load takes over. "pool" reads into the open `warmup.HostPool`, for every later load.
            "pagecache" fills the page cache, for all processes.
        names: The tensors to read, as for `load_file`. None reads all.
        limit_bytes: For "pagecache": bytes to read at most. None: the available memory.
        keep: Whether bytes that the first load does not take are held until `close`.
        backend: "auto" or the name of a backend.
        cache: As for `load_file`. Tier "pagecache" reads through the page cache with any of them.
        page_cache: As for `load_file`; not for tier "pagecache".
        options: As for `load_file`.
        stall_seconds: Seconds without a new byte after which the prefetch fails.
        verify: As for `load_file`; not for tier "pagecache". Loads wait until all bytes were
            compared. For a GPU the bytes are read to host memory. A load that compares them again,
            or reads what this prefetch refused, needs its own `verify`.
        on_event: As for `load_file`; called in the thread of the prefetch, or of `cancel`.
        revision: As for `load_file`.
        subfolder: As for `load_file`.
        variant: As for `load_file`.
        cache_dir: As for `load_file`.
        strict: As for `load_file`.
        header_limit: Largest accepted header, in bytes.

    Returns:
        The running prefetch. Its errors are raised by `Prefetch.wait`; a load reads bytes that the
        prefetch failed to read.

    Raises:
        ValueError: `tier`, `cache`, `page_cache`, `verify` or `limit_bytes` has no such value, or
            tier "pool" finds no open pool.
        PlacementError: `device` is neither "cpu" nor a GPU such as "cuda:0".
        TypeError: `names` is of another type.

    Example:
        >>> ahead = gdsload.prefetch("model", "cuda:0")
        >>> import transformers
        >>> model = gdsload.from_pretrained("model", device_map="cuda:0")
    """
    if tier not in TIERS:
        raise ValueError(f"tier={shown_source(tier)!r} must be one of {', '.join(TIERS)}")
    if tier == "pool" and current_pool() is None:
        raise ValueError("tier='pool' needs an open gdsload.warmup.HostPool")
    settings = ReadSettings(backend, cache, page_cache, options, stall_seconds, verify, on_event)
    if tier == "pagecache" and page_cache == "drop":
        raise ValueError(
            "tier='pagecache' cannot be combined with page_cache='drop': it fills the page cache"
        )
    if tier == "pagecache" and verify != "size":
        raise ValueError(
            f"tier='pagecache' cannot be combined with verify={verify!r}: it keeps no bytes in this"
            " process, and the load compares them"
        )
    if tier == "pagecache":
        # A session of direct reads would drop them again on btrfs.
        settings = settings.changed(cache="buffered")
    if limit_bytes is not None and (tier != "pagecache" or not limit_bytes >= 1):
        raise ValueError(
            f"limit_bytes={limit_bytes!r} must be at least 1, and needs tier='pagecache'"
        )
    name = require_name(device)
    if name == "cuda":
        name = current_gpu()
    lookup = Lookup(revision, subfolder, variant, cache_dir, strict, header_limit, stall_seconds)
    opened = source if isinstance(source, Checkpoint) else None
    title = source.source if isinstance(source, Checkpoint) else os.fsdecode(source)
    made = Prefetch(
        title,
        device=name,
        tier=tier,
        settings=settings,
        names=names,
        limit_bytes=limit_bytes,
        keep=keep,
        lookup=lookup,
        checkpoint=opened,
    )
    if "torch" not in sys.modules:
        ease_imports()  # before the thread begins, which pauses the collector now and then
    made._begin()
    return made
