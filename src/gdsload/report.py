"""`LoadReport`: the I/O paths of the bytes, the time of each phase, and refused alternatives.

A report is filled while the load runs and does not change afterwards. Not responsible for deciding
anything.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

from gdsload.errors import listed, one_line
from gdsload.system.lifecycle import fork_safe_lock

if TYPE_CHECKING:
    from gdsload.events import OnEvent, Publisher


def size(nbytes: float) -> str:
    """A rounded size in powers of 1000, such as "1.50 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.{0 if unit == 'B' else 2}f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"


def count(number: int, noun: str) -> str:
    """Such as "1 tensor" or "1,024 tensors"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def peak_rss_bytes() -> int:
    """The largest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


_Times = Sequence[tuple[int, int]]

# A call that contains several loads, such as one of a pipeline: its report gets the sums.
enclosing: ContextVar[LoadReport | None] = ContextVar("gdsload.enclosing", default=None)


class Span(NamedTuple):
    """A time interval on a named track of the trace; `start` and `end` are monotonic seconds."""

    name: str
    track: str
    start: float
    end: float


class LoadReport:
    """What one load did.

    Attributes:
        source: The checkpoint, as the caller named it.
        device: Where the tensors were needed, such as "cuda:0".
        backend: The backend that was opened, "" if none was. `paths` says what it read.
        engine: Its engine: that of the posix backend, or the mode of cuFile, such as "nvfs".
        choice: Which backend read cold bytes, and why.
        tensors: Number of tensors.
        wanted_bytes: Size of these tensors, in bytes.
        read_bytes: Bytes that were read, gaps between tensors included. Of a file that is partly in
            the page cache, units of 2 MiB that are wholly there are not read.
        ranks: The number of ranks that shared the reads, 0 if this process read alone.
        received_bytes: Bytes that this rank received from other ranks.
        cached_bytes: Bytes of remote files that were in the local cache (`cache_dir` of a URL).
        requests: Number of read operations.
        short_reads: Number of short reads; each was continued.
        retries: Number of repeated operations.
        verify: The check of the bytes: "size", "checksum", "sha256" or the path of a manifest.
        verified_bytes: Bytes that were compared with a checksum: of wanted tensors, or of whole
            files in the hub cache. A slice is compared in the blocks that it contains wholly.
        unverified_bytes: Bytes that were read with `verify`, and are in no block that was compared.
        filesystem: The type of the network or FUSE filesystem that was read, the scheme of the URL,
            such as "s3", or "".
        depth: Reads in flight at most, 0 if nothing was read. Above 8, the engine `threads` runs
            half of them, but at least 8, in the kernel at the same time.
        page_cache: Whether the reads filled the page cache, and why, and about how much it held
            before. "" if there was nothing to decide: nothing was read; `page_cache` is "keep" or
            "drop"; checksums or a host pool are in use; the load is to VRAM; the files are remote;
            or the engine is not `threads`.
        paths: Bytes by I/O path, "backend/engine/mode", such as "posix/threads/direct"; of cuFile
            what it did: "gds_mt/nvfs" and "gds_mt/p2p" are native. "gds_mt/posix" is its
            compatibility mode, and in native mode what is not aligned; "gds_mt/compat" the same
            where cuFile counts nothing, "gds_mt/uncounted" if it does not say which it used.
            "mapped": used from a mapping of the file, and not read by a backend. Its pages were in
            the page cache (98 % of a file, or single units of 2 MiB), or were read into it first
            (checkpoints of up to 2 MiB), or are read when they are used (all with
            `cache="mapped"`, or if memory has no room). "posix/threads/direct bounced": direct
            reads that were copied to small pages. "posix/threads/mapped": read into the page
            cache, and used from a mapping. "prefetched" and "pool": taken from there.
            "local_cache", "nixl/ucx" and "object_store/s3": of URLs.
        rates: Measured bytes per second of each backend.
        failovers: Bytes that failed on one backend and were read by another.
        refusals: Why a faster alternative was not used, by its name.
        phases: Seconds of each phase.
        pages: Units of 2 MiB of fresh host memory that were touched as "huge" and "small" pages.
        seconds: Seconds from the first step to the last.
        cpu_seconds: Processor seconds of the whole process in this time.
        peak_rss_bytes: Largest resident memory of the process so far, in bytes.
        failure: The error that ended the load, or "".
        integration: For a model, the entry point into transformers: "hook", "safe_open" or "stock".
            For other libraries that `gdsload.from_pretrained` calls "load_file": they call
            functions of safetensors that gdsload replaces. Else "".
        integration_reason: Why it was "safe_open" or "stock", or "".
        modules_ready: With `on_module_ready`, whether modules were reported during the load, or at
            its end and why.
        fates: For a model and `load_into`, the number of tensors by fate: "keep" (used as they
            are), "convert" (converted or cast), "skip" (not read). Before transformers 5 it is not
            known which tensors are converted: "materialised" are those that are read.
        missing: For `load_into`, the names of targets that nothing, or not all, was read for.
        unexpected: For `load_into`, the names in the checkpoint that belong to no target.
    """

    def __init__(
        self,
        source: str,
        device: str = "cpu",
        *,
        on_event: OnEvent | None = None,
        kind: str = "load",
    ) -> None:
        """`on_event` and `kind` are as in `gdsload.events`."""
        self._on_event, self._kind = on_event, kind
        self._publisher: Publisher | None = None
        self.source = source
        self.device = device
        self.backend = ""
        self.engine = ""
        self.choice = ""
        self.tensors = 0
        self.wanted_bytes = 0
        self.read_bytes = 0
        self.ranks = 0
        self.received_bytes = 0
        self.cached_bytes = 0
        self.requests = 0
        self.short_reads = 0
        self.retries = 0
        self.verify = "size"
        self.verified_bytes = self.unverified_bytes = 0
        self.filesystem = ""
        self.depth = 0
        self.page_cache = ""
        self.paths: dict[str, int] = {}
        self.rates: dict[str, float] = {}
        self.failovers: dict[str, int] = {}
        self.refusals: dict[str, str] = {}
        self.phases: dict[str, float] = {}
        self.pages: dict[str, int] = {}
        self.seconds = 0.0
        self.cpu_seconds = 0.0
        self.peak_rss_bytes = 0
        self.failure = ""
        self.integration = ""
        self.integration_reason = ""
        self.modules_ready = ""
        self.fates: dict[str, int] = {}
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self._spans: list[Span] = []
        self._later: list[tuple[_Times, Callable[[], Iterable[Span]]]] = []

    @property
    def spans(self) -> list[Span]:
        """Phases and reads, as time intervals for `trace`."""
        with _lock:
            while self._later:
                self._spans.extend(self._later.pop(0)[1]())
        return self._spans

    @spans.setter
    def spans(self, spans: list[Span]) -> None:
        self._spans = spans

    def add_reads(self, times: _Times, spans: Callable[[], Iterable[Span]]) -> None:
        """Internal: adds reads by their (start, end), in monotonic nanoseconds, 0 for reads that
        did not start or end. Their spans are made when they are asked for: a load of 15 GB has
        thousands, and few ask."""
        self._later.append((times, spans))

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process has no observers."""
        own = {"_on_event": None, "_publisher": None, "_spans": self.spans, "_later": []}
        return {**self.__dict__, **own}

    def __repr__(self) -> str:
        return f"LoadReport({self.to_dict()})"

    @property
    def reading_seconds(self) -> float:
        """Seconds in which at least one read was in flight; 0.0 without reads."""
        with _lock:
            reads = [
                (span.start, span.end) for span in self._spans if span.track.startswith("reads of ")
            ]
            for times, _ in self._later:
                reads += [(start * 1e-9, end * 1e-9) for start, end in times if start and end]
        if not reads:
            return self.phases.get("read", 0.0) if self.read_bytes else 0.0
        seconds = until = 0.0
        for start, end in sorted(reads):
            if end > until:
                seconds += end - max(start, until)
                until = end
        return seconds

    @property
    def rate(self) -> float:
        """Bytes per second that were read in `reading_seconds`; 0.0 without reads."""
        seconds = self.reading_seconds
        return self.read_bytes / seconds if seconds else 0.0

    @property
    def import_seconds(self) -> float:
        """Seconds of the load in which torch and transformers were imported."""
        return sum(took for name, took in self.phases.items() if name.startswith("import "))

    def exclusive_phases(self) -> dict[str, float]:
        """Seconds of each phase without the phases inside it, and of the rest of the load as
        "other": together `seconds`. Phases of other threads come on top."""
        found: dict[str, float] = {}
        around: list[Span] = []
        outermost = 0.0
        phases = (span for span in self._spans if span.track == "phases")
        for span in sorted(phases, key=lambda span: (span.start, -span.end)):
            while around and around[-1].end < span.end:
                around.pop()
            took = span.end - span.start
            found[span.name] = found.get(span.name, 0.0) + took
            if around:
                found[around[-1].name] -= took
            else:
                outermost += took
            around.append(span)
        return {**found, "other": max(self.seconds - outermost, 0.0)}

    @property
    def read_ratio(self) -> float:
        """Bytes read for each wanted byte: above 1 for gaps and aligned edges, below it for bytes
        that were in memory already; 0.0 if nothing was wanted."""
        return self.read_bytes / self.wanted_bytes if self.wanted_bytes else 0.0

    def add(self, other: LoadReport) -> None:
        """Internal: adds another load: sums of its counts, bytes and times, and its texts where
        this report has none."""
        devices = self.device.split(",") if self.tensors else []
        self.device = ",".join(dict.fromkeys([*devices, *other.device.split(",")]))
        fields = {"spans"} | {name for name in vars(self) if name[0] != "_"}
        self.merge(other, fields - {"source", "device", "verify"})
        self.verify = other.verify

    def merge(self, other: LoadReport, names: Iterable[str]) -> None:
        """Internal: adds these fields of another report, as `add` does."""
        for name in names:
            mine, theirs = getattr(self, name), getattr(other, name)
            if name in ("depth", "ranks", "peak_rss_bytes"):
                setattr(self, name, max(mine, theirs))
            elif isinstance(mine, (int, float, list)):
                setattr(self, name, mine + theirs)
            elif name in ("rates", "refusals"):
                mine.update(theirs)
            elif isinstance(mine, dict):
                mine.update((key, mine.get(key, 0) + value) for key, value in theirs.items())
            else:
                setattr(self, name, mine or theirs)

    def to_dict(self) -> dict[str, Any]:
        """All fields except the spans; in addition `read_ratio`, and `rate` under the name
        `bytes_per_second`."""
        facts = {
            name: copy(value) if isinstance(value, (dict, list)) else value
            for name, value in vars(self).items()
            if name[0] != "_"
        }
        return {**facts, "bytes_per_second": self.rate, "read_ratio": self.read_ratio}

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def summary(self) -> str:
        """A few lines of text for a person."""
        imports, reading = self.import_seconds, self.reading_seconds
        read, verified = size(self.read_bytes), size(self.verified_bytes)
        left = size(max(self.unverified_bytes, self.wanted_bytes - self.verified_bytes, 0))
        paths = ", ".join(f"{path} {size(nbytes)}" for path, nbytes in self.paths.items())
        rates = ", ".join(f"{name} {rate / 1e9:.2f} GB/s" for name, rate in self.rates.items())
        phases = ", ".join(f"{name} {took:.3f} s" for name, took in self.exclusive_phases().items())
        fates = ", ".join(f"{number} {fate}" for fate, number in self.fates.items())
        why = self.integration_reason
        # Whether a line is shown, and its text.
        lines = [
            (True, f"{self.source} -> {self.device}: {count(self.tensors, 'tensor')},"
             f" {size(self.wanted_bytes)} in {self.seconds:.3f} s"
             f"{f', imports {imports:.3f} s of them' if imports >= 0.0005 else ''}"
             f"; {self.cpu_seconds:.2f} s CPU"),
            (paths, f"I/O paths: {paths}"),
            (not paths and self.read_bytes, "I/O paths: not reported by the backend"),
            (not paths and not self.read_bytes, "I/O paths: no bytes were read"),
            (self.read_bytes and reading, f"read: {read} in {reading:.3f} s, {size(self.rate)}/s"),
            (self.filesystem, f"filesystem: {self.filesystem}, {self.depth} reads in flight at"
             " most"),
            (self.ranks, f"shared by {self.ranks} ranks: {read} read here,"
             f" {size(self.received_bytes)} received"),
            (self.cached_bytes, f"local cache: {size(self.cached_bytes)}"),
            (self.page_cache, f"page cache: {self.page_cache}"),
            (self.choice, f"backend: {self.choice}{rates and f' ({rates})'}"),
            *((True, f"failover: {pair}, {size(n)}") for pair, n in self.failovers.items()),
            (True, f"phases: {phases}"),
            (self.requests, f"{count(self.requests, 'read')}, {self.short_reads} short reads"
             f" continued, {self.retries} retries"),
            (self.verify != "size", f"verified by {self.verify}: {verified}, not verified: {left}"),
            (self.integration, f"entry point: {self.integration}{why and f' ({why})'}"
             f"{fates and f'; {fates}'}"),
            (self.missing, f"missing: {listed(self.missing, 3)}"),
            (self.unexpected, f"unexpected: {listed(self.unexpected, 3)}"),
            *((True, f"refused: {name}: {reason}") for name, reason in self.refusals.items()),
            (self.failure, f"failed: {self.failure}"),
        ]  # fmt: skip
        return "\n".join(one_line(text) for shown, text in lines if shown)

    def trace(self) -> dict[str, Any]:
        """Phases and reads in Chrome's trace format, for chrome://tracing and Perfetto."""
        tracks = {name: number for number, name in enumerate(sorted({s.track for s in self.spans}))}
        process = {"pid": os.getpid()}
        events: list[dict[str, Any]] = [
            process | {"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": name}}
            for name, tid in tracks.items()
        ]
        for name, track, start, end in self.spans:
            times = {"ts": start * 1e6, "dur": max(end - start, 0.0) * 1e6}
            events.append(process | times | {"ph": "X", "name": name, "tid": tracks[track]})
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes `trace` to a JSON file. Raises OSError.

        Args:
            path: The file. It is replaced if it exists.

        Example:
            >>> gdsload.last_report().save_trace("trace.json")
        """
        try:
            with open(path, "w", encoding="utf-8") as out:
                json.dump(self.trace(), out)
        except OSError as error:
            error.filename = os.fspath(path)  # that of a full disk has none
            raise

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Internal: measures a phase; the times of a repeated phase are added."""
        start = time.monotonic()
        try:
            yield
        finally:
            end = time.monotonic()
            self.phases[name] = self.phases.get(name, 0.0) + end - start
            self._spans.append(Span(name, "phases", start, end))
            self.publish()

    def begin(self) -> None:
        """Internal: reports to observers, if there are any, that the load begins."""
        around = enclosing.get()
        publisher = None if around is None or around is self else around._publisher
        told = () if publisher is None else publisher.observers  # with the events of that one
        wanted = [*_observers.values(), *([] if self._on_event is None else [self._on_event])]
        observers = [each for each in wanted if each not in told]
        if observers:
            from gdsload.events import Publisher

            self._publisher = Publisher(self, observers, self._kind)

    def publish(self) -> None:
        """Internal: reports to observers what was recorded since the last call."""
        if self._publisher is not None:
            self._publisher.publish()

    def end(self) -> None:
        """Internal: reports to observers that the load has ended."""
        publisher, self._publisher, self._on_event = self._publisher, None, None
        if publisher is not None:
            publisher.end()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Internal: measures the load from its first step to its last; then it is `last_report`."""
        start, cpu = time.monotonic(), time.process_time()
        try:
            self.begin()
            yield
        except GeneratorExit:  # the caller closed a stream: not a failure
            raise
        except BaseException as error:
            self.failure = f"{type(error).__name__}: {error}"
            raise
        else:
            self.failure = ""  # one of a load inside it was handled
        finally:
            self.seconds = time.monotonic() - start
            self.cpu_seconds = time.process_time() - cpu
            self.peak_rss_bytes = peak_rss_bytes()
            if (around := enclosing.get()) is not None and around is not self:
                around.add(self)
                around.publish()
            with _lock:
                _last[:] = [self]
            if _log.isEnabledFor(logging.INFO):
                first, *others = self.summary().splitlines()
                _log.info("%s", first)
                for line in others:
                    _log.debug("%s", line)
            self.end()


_log = logging.getLogger("gdsload")
_lock = fork_safe_lock(sys.modules[__name__])
_last: list[LoadReport] = []
_observers: dict[object, OnEvent] = {}


def observe(on_event: OnEvent) -> Callable[[], None]:
    """Calls `on_event` with the events of all loads and prefetches of this process.

    Args:
        on_event: Called with `gdsload.events`. Those that began before are not reported.

    Returns:
        A function that ends it for loads that begin later.

    Raises:
        TypeError: `on_event` cannot be called.

    Example:
        >>> stop = gdsload.telemetry.observe(print)
    """
    if not callable(on_event):
        raise TypeError(f"on_event={on_event!r} must be a function of an event")
    key = object()  # the same function may be registered twice
    _observers[key] = on_event

    def stop() -> None:
        _observers.pop(key, None)

    return stop


def last_report() -> LoadReport:
    """Returns the report of the last load in this process that ended, failed or not.

    Raises:
        LookupError: No load has ended yet.

    Example:
        >>> print(gdsload.last_report().summary())
    """
    with _lock:
        if not _last:
            raise LookupError("no load has ended in this process yet")
        return _last[0]
