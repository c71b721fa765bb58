"""Reading before anybody asks: weights on their way while the process still imports.

    prefetch() ──► thread: open, plan, post ──► native threads read ──► a load claims it, or close()

`prefetch` returns at once and imports no torch. A load of the same files in this process takes
what has landed and waits for what is on its way; it finds it by the files' identity, so nothing
has to be passed along.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import copy
from typing import TYPE_CHECKING, Any

from gdsload.checkpoint import Checkpoint
from gdsload.errors import GdsloadError, StallError
from gdsload.loading import claims
from gdsload.loading.session import CACHES, STALL_SECONDS, Session
from gdsload.memory import host_pool, page_cache
from gdsload.planning.read_plan import ByteRange, byte_ranges_of
from gdsload.readahead import running
from gdsload.readahead.prefetch_batch import PageCacheWarmup, PrefetchBatch, fitting
from gdsload.readahead.progress import (
    CANCELLED,
    CLOSED,
    FAILED,
    LANDED,
    OPENING,
    READING,
    PrefetchCancelled,
    PrefetchProgress,
)
from gdsload.report import LoadReport
from gdsload.system import quiesce
from gdsload.system.gc_control import ease_imports, imports_done
from gdsload.system.lifecycle import fork_safe_lock
from gdsload.system.threads import start_thread

if TYPE_CHECKING:
    import torch

    from gdsload.readahead.device_init import DeviceInit

TIERS = ("memory", "pool", "pagecache")
# Given to the thread before `prefetch` returns: most checkpoints are open by then, while a thread
# that must share the interpreter with `import torch` takes ten times as long.
HEAD_START_SECONDS = 0.025
# On two cores, where one thread makes memory ready and one reads, this leaves a whole one to
# whoever imports meanwhile. More would starve the reads where others keep the machine busy, and a
# load that waits for them cannot take it back.
NICENESS = 5
_LOOK_SECONDS = 0.1
_GLANCE_SECONDS = 0.01  # `close` is held up by that where another prefetch is waited for
# `close` waits so long for the thread that reads. It ends at once, unless a signal handler closes
# while its own thread holds a lock.
_CLOSE_SECONDS = 2.0


class Prefetch:
    """One checkpoint being read ahead. Close it, leave its `with`, or let a load take it all."""

    def __init__(
        self, source: str, device: str, tier: str, session: Mapping[str, Any],
        names: Iterable[str] | None, limit_bytes: int | None, keep: bool, where: Mapping[str, Any],
        checkpoint: Checkpoint | None = None,
    ) -> None:  # fmt: skip
        self.source = source
        self.tier = tier
        self.report = LoadReport(source, device=device)
        self._arguments = dict(session), None if names is None else tuple(names), dict(where)
        self._limit_bytes = limit_bytes
        self._checkpoint = checkpoint  # of the caller, who closes it
        self._landing = claims.Offer(source, keep=keep)
        self._ahead: PrefetchBatch | None = None
        self._error: GdsloadError | None = None
        self._state = OPENING
        self._wanted_bytes = self._landed_bytes = self._resident_bytes = 0
        self._warm_bytes = 0
        self._start = time.monotonic()
        self._seconds = 0.0
        self._lock = fork_safe_lock(self)  # reentrant: signal handlers may ask, too
        self._posted = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def _begin(self) -> None:
        try:
            claims.offer(self._landing)
            quiesce.register(self)
            running.begin(self)
            self._thread = start_thread(self._run, "gdsload-prefetch")
            if self._thread is None:
                self._fail(
                    GdsloadError(
                        f"{self.source}: no thread could be started to prefetch it (the limits on"
                        " processes and memory: `ulimit -u`, pids.max)"
                    )
                )
                self._end(FAILED)
            self._posted.wait(HEAD_START_SECONDS)
        except BaseException:  # Ctrl-C, or no thread: nobody will have it to close it
            self._stop(CLOSED)
            if self._thread is None:
                self._ended.set()
                quiesce.unregister(self)
            raise

    def _run(self) -> None:
        session, names, where = self._arguments
        opening: DeviceInit | None = None
        try:
            opening = self._open_device(session)
            with self.report.phase("open"), self._opened(where) as checkpoint:
                pieces = byte_ranges_of(checkpoint, names)
                if self.tier == "pagecache":
                    pieces = fitting(pieces, self._limit_bytes)
                if self.tier == "pool":
                    host_pool.require(pieces)
                place, maps, size = "cpu", self.tier != "pool", sum(p.nbytes for p in pieces)
                if opening is not None and self.tier == "memory":
                    place = opening.landing(session["backend"])
                with Session(
                    checkpoint, self.report, device=place, adopt=False, maps=maps,
                    expected_bytes=size, **session,
                ) as opened:  # fmt: skip
                    self._read(opened, pieces)
                    checkpoint.verify_unchanged()
                    self._measure(checkpoint, pieces)
        except GdsloadError as error:
            self._fail(error)
        except BaseException as error:
            self._fail(GdsloadError(f"{self.source}: the prefetch failed: {error!r}"))
            raise
        finally:
            if opening is not None:
                opening.wait()
                if opening.refusal:
                    self.report.refusals[self.report.device] = opening.refusal
            self._end(LANDED)

    def _opened(self, where: Mapping[str, Any]) -> AbstractContextManager[Checkpoint]:
        checkpoint, self._checkpoint = self._checkpoint, None
        return (
            Checkpoint.open(self.source, **where) if checkpoint is None else nullcontext(checkpoint)
        )

    def _open_device(self, session: Mapping[str, Any]) -> DeviceInit | None:
        """Makes a GPU ready meanwhile: its context, and the ring that only its load will need."""
        if self.report.device.partition(":")[0] != "cuda":
            return None
        from gdsload.readahead.device_init import DeviceInit  # not before a device is asked for

        ring = self.tier == "pagecache" and session["backend"] in ("auto", "posix")
        return DeviceInit(self.report.device, session["options"] or {}, ring=ring)

    def _read(self, session: Session, pieces: Sequence[ByteRange]) -> None:
        """Puts the pieces on their way, offers them, and waits for them without the GIL."""
        # The threads that read and make memory ready are started by this one, and inherit it.
        # Those of a GPU's ring have little to do, and serve the loads that come later, too.
        if session.device == "cpu":
            with suppress(OSError):
                own = threading.get_native_id()
                nice = os.getpriority(os.PRIO_PROCESS, own) + NICENESS
                os.setpriority(os.PRIO_PROCESS, own, min(nice, 19))
        pieces, others = self._shared(session, pieces)
        ahead = (PageCacheWarmup if self.tier == "pagecache" else PrefetchBatch).of(session, pieces)
        try:
            stretches = ahead.stretches(pieces)
            ahead.views.clear()  # the landing holds the memory now, for as long as it is wanted
            with self._lock:
                self._ahead = ahead
                self._wanted_bytes = sum(piece.nbytes for piece in pieces)
                self._warm_bytes = max(self._wanted_bytes - ahead.plan.read_bytes, 0)
                if self._state == OPENING:
                    self._state = READING
                    self._landing.fill(ahead, stretches, session.device)
            del stretches
            self._posted.set()
            self.report.tensors = len(pieces)
            self.report.wanted_bytes = self._wanted_bytes
            while self._state == READING and not ahead.look():
                if ahead.idle_seconds() > session.stall_seconds:
                    raise StallError(
                        f"{self.source}: no byte has come for {ahead.idle_seconds():.0f} s",
                        path=self.source,
                        hint="stall_seconds sets the limit",
                    )
                ahead.pause(0, -1, _LOOK_SECONDS)
            if ahead.error is not None:
                raise ahead.error
        finally:
            ahead.release()
        for other in others:
            while self._state == READING and not other._ended.wait(_GLANCE_SECONDS):
                pass
            if other._state in (CANCELLED, FAILED):
                raise PrefetchCancelled(
                    f"{self.source}: another prefetch was reading the same, and was {other._state}"
                )

    def _shared(
        self, session: Session, pieces: Sequence[ByteRange]
    ) -> tuple[list[ByteRange], list[Prefetch]]:
        """The pieces without those that other prefetches read already, into the same tier and
        device; and these prefetches."""
        shards = session.checkpoint.shards
        mine, others = list(pieces), []
        for other in prefetches():
            if other is self or (other.tier, other._landing.device) != (self.tier, session.device):
                continue
            left = [p for p in mine if not other._landing.has(shards[p.shard].identity, p)]
            if len(left) < len(mine):
                mine = left
                others.append(other)
        return mine, others

    def _measure(self, checkpoint: Checkpoint, pieces: Sequence[ByteRange]) -> None:
        if self.tier == "pagecache":
            self._resident_bytes = sum(
                page_cache.seen_bytes(checkpoint.shards[p.shard].fd, p.offset, p.nbytes)
                for p in pieces
                if p.nbytes
            )

    def _fail(self, error: GdsloadError) -> None:
        with self._lock:
            if self._state in (OPENING, READING):
                # Without its traceback, whose frames hold the files and the memory of the reads.
                self._error = copy(error)
                self._state = FAILED
                self.report.failure = f"{type(error).__name__}: {error}"

    def _end(self, state: str) -> None:
        with self._lock:
            if self._state in (OPENING, READING):
                self._state = state
            if self._ahead is not None:
                self._landed_bytes = self._warm_bytes + self._ahead.landed_bytes
                self._ahead = None  # loads that still take from it have it in their claims
            if not self._ended.is_set():
                self._seconds = self.report.seconds = time.monotonic() - self._start
            # What the page cache or a pool has is found there, by whoever looks, from now on.
            over = self._state != LANDED or self.tier != "memory"
        if over:
            self._withdraw()
        self._posted.set()
        self._ended.set()

    def _withdraw(self) -> None:
        claims.withdraw(self._landing)
        running.end(self)

    def progress(self) -> PrefetchProgress:
        """How far it is, at once."""
        ahead = self._ahead
        if ahead is not None and not self._ended.is_set():
            ahead.look()
            landed = min(self._warm_bytes + ahead.landed_bytes, self._wanted_bytes)
        else:
            landed = min(self._landed_bytes, self._wanted_bytes)
        ended = self._ended.is_set()
        return PrefetchProgress(
            self._state, self._wanted_bytes, landed, self._landing.claimed_bytes,
            self._resident_bytes, self._seconds if ended else time.monotonic() - self._start,
        )  # fmt: skip

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until all has landed: True; or False after `timeout` seconds. While the main thread
        waits here it imports nothing, and the reads need not leave it a processor.

        Raises what ended it: CheckpointError and its kinds, ReadError, PlacementError,
        BackendUnavailable; PrefetchCancelled where somebody cancelled or closed it before.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._ended.is_set():
            left = _LOOK_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return False
            if threading.current_thread() is threading.main_thread() and (ahead := self._ahead):
                ahead.hurry()
            self._ended.wait(min(left, _LOOK_SECONDS))
        if self._error is not None:
            raise copy(self._error)  # which would gather the frames of everybody who waits
        if self._state != LANDED and self._landed_bytes < self._wanted_bytes:
            raise PrefetchCancelled(f"{self.source}: its prefetch was {self._state}")
        return True

    def cancel(self) -> None:
        """Ends the reads. Loads that claimed some of it keep what has landed, and read the rest
        themselves; what nobody claimed is let go. May be called again, and at any time."""
        self._stop(CANCELLED)

    def close(self) -> None:
        """Ends the reads and lets go of what nobody has claimed. May be called again."""
        self._stop(CLOSED)
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(_LOOK_SECONDS if self._state == OPENING else _CLOSE_SECONDS)

    def _stop(self, state: str) -> None:
        with self._lock:
            if self._state in (OPENING, READING) or (state == CLOSED and self._state == LANDED):
                self._state = state
            ahead = self._ahead
        if ahead is not None:
            ahead.release()
        self._withdraw()
        imports_done()

    def busy(self) -> str:
        """For `quiesce`: reads under way; what has landed is memory, and stays."""
        return "" if self._ended.is_set() else f"{self.source} is being prefetched"

    def quiesce(self) -> None:
        """Its files were closed with the last byte; its thread ends here."""
        if self._thread is not None:
            self._thread.join()

    def resume(self) -> None:
        """Nothing to take back."""

    @property
    def over(self) -> bool:
        """Whether it reads no more and holds nothing that a load could take."""
        return self._ended.is_set() and self._landing.empty

    def orphan(self) -> None:
        """In a child: what was read, or still is, stayed in the parent."""
        self._ended = threading.Event()
        self._landing, self._ahead = claims.Offer(self.source), None
        if self._state in (OPENING, READING):
            self._state = CANCELLED
        self._ended.set()

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        progress = self.progress()
        return (
            f"<Prefetch {self.source} ({self.tier}): {progress.state},"
            f" {progress.landed_bytes} of {progress.wanted_bytes} bytes>"
        )


def prefetch(
    source: str | os.PathLike[str] | Checkpoint,
    device: str | int | torch.device = "cpu",
    *,
    tier: str = "memory",
    names: Iterable[str] | None = None,
    limit_bytes: int | None = None,
    keep: bool = False,
    backend: str = "auto",
    cache: str = "auto",
    options: Mapping[str, Any] | None = None,
    stall_seconds: float = STALL_SECONDS,
    **where: Any,
) -> Prefetch:
    """Starts reading a checkpoint, and returns within milliseconds; torch is not imported.

    `source` may be an open Checkpoint, which stays open: close it after the prefetch.

    `tier` "memory" reads into memory that a later `load_file`, `stream`, `safe_open` or
    `from_pretrained` of the same files takes over: what has landed at once, the rest as it lands.
    Each byte is taken once, since tensors own their memory; a second load reads again. What the
    first load leaves is let go when it ends, unless `keep`, which holds it until `close`. `tier`
    "pool" reads into the open `warmup.HostPool`, which keeps it for every later load, and fails
    where it cannot. `tier` "pagecache" only fills the page cache, with at most `limit_bytes` (None:
    the memory that is available), for this process and for others.

    With a GPU as `device`, tier "memory" is memory of that GPU, for loads to it: a few blocks that
    gdsload takes from the CUDA driver, each given back when the last tensor in it is gone. Where
    the GPU cannot be used, `report.refusals` says why, and weights wait in host memory. For the
    other tiers its context is opened meanwhile; with "pagecache" the ring that its load will pass
    through is pinned, too. As after every use of CUDA, such a process must not be forked any more.

    Until the first load, or `close`, Python's cycle collector makes fewer passes (one in 10,000 new
    objects) if torch was not imported yet, which takes a seventh off importing transformers.

    The files are told apart by device, inode, size and times: a load that finds another version
    takes nothing from this one. Errors do not leave the thread that reads: `wait` raises them, and
    a load that would have adopted the bytes reads them itself. `names`, `backend`, `cache`,
    `options`, `stall_seconds` and `where` are those of `load_file`.

    Raises ValueError for an unknown `tier` or `cache`, and for "pool" where none is open.
    """
    if tier not in TIERS:
        raise ValueError(f"tier={tier!r} is none of {', '.join(TIERS)}")
    if tier == "pool" and host_pool.current() is None:
        raise ValueError("tier='pool' needs an open gdsload.warmup.HostPool")
    if cache not in CACHES:
        raise ValueError(f"cache={cache!r} is none of {', '.join(CACHES)}")
    if isinstance(names, str):
        raise TypeError(f"names is a list of tensor names, not the string {names!r}")
    if limit_bytes is not None and (tier != "pagecache" or limit_bytes < 1):
        raise ValueError("limit_bytes is for tier='pagecache', and at least 1")
    name = f"cuda:{device}" if isinstance(device, int) else str(device)
    session = {
        "backend": backend, "cache": cache, "options": options, "stall_seconds": stall_seconds,
    }  # fmt: skip
    opened = source if isinstance(source, Checkpoint) else None
    title = source.source if isinstance(source, Checkpoint) else os.fspath(source)
    made = Prefetch(title, name, tier, session, names, limit_bytes, keep, where, opened)
    if "torch" not in sys.modules:
        ease_imports()  # before the thread begins, which holds the collector back now and then
    made._begin()
    return made


def prefetches() -> list[Prefetch]:
    """Those of this process that still read, or hold what nobody has taken; oldest first."""
    return [one for one in running.current() if isinstance(one, Prefetch)]


def started() -> list[Prefetch]:
    """The last ones of this process, oldest first, ended or not."""
    return [one for one in running.started() if isinstance(one, Prefetch)]
