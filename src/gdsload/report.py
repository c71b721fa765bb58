"""`LoadReport`: the I/O paths of the bytes, the time of each phase, and refused alternatives.

A report is filled while the load runs and does not change afterwards. Not responsible for deciding
anything.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from gdsload.system.lifecycle import fork_safe_lock

if TYPE_CHECKING:
    from gdsload.checkpoint import TensorInfo


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
        backend: The backend that read, "" if none did.
        engine: The engine of the posix backend, "" if it did not read.
        choice: Which backend read cold bytes, and why.
        tensors: Number of tensors.
        wanted_bytes: Size of these tensors, in bytes.
        read_bytes: Bytes that were read, gaps between tensors included.
        requests: Number of read operations.
        short_reads: Number of short reads; each was continued.
        retries: Number of repeated operations.
        verify: The check of the bytes: "size", "checksum", "sha256" or the path of a manifest.
        verified_bytes: Bytes that were compared with a checksum: of wanted tensors, or of whole
            files in the hub cache. A slice is compared in the blocks that it contains wholly.
        filesystem: The type of the network or FUSE filesystem that was read, or "".
        depth: Reads in flight at most, 0 if nothing was read.
        paths: Bytes by I/O path, "backend/engine/mode".
        rates: Measured bytes per second of each backend.
        failovers: Bytes that failed on one backend and were read by another.
        refusals: Why a faster alternative was not used, by its name.
        phases: Seconds of each phase.
        pages: Units of 2 MiB of fresh host memory that were touched as "huge" and "small" pages.
        seconds: Seconds from the first step to the last.
        cpu_seconds: Processor seconds of the whole process in this time.
        peak_rss_bytes: Largest resident memory of the process so far, in bytes.
        failure: The error that ended the load, or "".
        integration: For a model, the way into transformers: "hook", "safe_open" or "stock".
        integration_reason: Why it was not "hook", or "".
        modules_ready: With `on_module_ready`, whether modules were reported during the load, or at
            its end and why.
        fates: For a model, the number of tensors by fate: "keep" (used as they are), "convert"
            (converted or cast), "skip" (not read).
        spans: Time intervals for `trace`.
    """

    def __init__(self, source: str, device: str = "cpu") -> None:
        self.source = source
        self.device = device
        self.backend = ""
        self.engine = ""
        self.choice = ""
        self.tensors = 0
        self.wanted_bytes = 0
        self.read_bytes = 0
        self.requests = 0
        self.short_reads = 0
        self.retries = 0
        self.verify = "size"
        self.verified_bytes = 0
        self.filesystem = ""
        self.depth = 0
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
        self.spans: list[Span] = []

    def __repr__(self) -> str:
        return f"LoadReport({self.to_dict()})"

    @property
    def rate(self) -> float:
        """Wanted bytes per second over the whole load; 0.0 before its end."""
        return self.wanted_bytes / self.seconds if self.seconds else 0.0

    def count(self, infos: Collection[TensorInfo]) -> None:
        """Records the number and the size of the wanted tensors."""
        self.tensors = len(infos)
        self.wanted_bytes = sum(info.nbytes for info in infos)

    def to_dict(self) -> dict[str, Any]:
        """All fields except the spans, and `bytes_per_second`."""
        facts = {
            name: dict(value) if isinstance(value, dict) else value
            for name, value in vars(self).items()
            if name != "spans"
        }
        return {**facts, "bytes_per_second": self.rate}

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def summary(self) -> str:
        """A few lines of text for a person."""
        lines = [
            f"{self.source} -> {self.device}: {self.tensors} tensors,"
            f" {self.wanted_bytes / 1e9:.3f} GB in {self.seconds:.3f} s"
            f" ({self.rate / 1e9:.2f} GB/s), {self.cpu_seconds:.2f} s CPU"
        ]
        paths = [f"{path} {size / 1e9:.3f} GB" for path, size in self.paths.items() if size]
        lines.append("I/O paths: " + (", ".join(paths) or "no bytes were read"))
        if self.filesystem:
            lines.append(f"filesystem: {self.filesystem}, {self.depth} reads in flight at most")
        if self.choice:
            rates = ", ".join(f"{name} {rate / 1e9:.2f} GB/s" for name, rate in self.rates.items())
            lines.append(f"backend: {self.choice}{f' ({rates})' if rates else ''}")
        lines += [
            f"failover: {backends}, {size:,} bytes" for backends, size in self.failovers.items()
        ]
        phases = ", ".join(f"{name} {took:.3f} s" for name, took in self.phases.items())
        lines.append(f"phases: {phases}")
        if self.requests:
            lines.append(
                f"{self.requests} requests, {self.short_reads} short reads continued,"
                f" {self.retries} retries"
            )
        if self.verify != "size":
            left = max(self.wanted_bytes - self.verified_bytes, 0)
            lines.append(
                f"verified by {self.verify}: {self.verified_bytes:,} bytes, not verified: {left:,}"
            )
        if self.integration:
            why = f" ({self.integration_reason})" if self.integration_reason else ""
            fates = ", ".join(f"{count} {fate}" for fate, count in self.fates.items()) or "no fates"
            lines.append(f"path into transformers: {self.integration}{why}; {fates}")
        lines += [f"refused: {name}: {why}" for name, why in self.refusals.items()]
        if self.failure:
            lines.append(f"failed: {self.failure}")
        return "\n".join(lines)

    def trace(self) -> dict[str, Any]:
        """Phases and requests in Chrome's trace format, for chrome://tracing and Perfetto."""
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
        """Writes `trace` to a JSON file. Raises OSError."""
        with open(path, "w", encoding="utf-8") as out:
            json.dump(self.trace(), out)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures a phase; the times of a repeated phase are added."""
        start = time.monotonic()
        try:
            yield
        finally:
            end = time.monotonic()
            self.phases[name] = self.phases.get(name, 0.0) + end - start
            self.spans.append(Span(name, "phases", start, end))

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Measures the load from its first step to its last; then it is `last_report`."""
        start, cpu = time.monotonic(), time.process_time()
        try:
            yield
        except GeneratorExit:  # the caller closed a stream: not a failure
            raise
        except BaseException as error:
            self.failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            self.seconds = time.monotonic() - start
            self.cpu_seconds = time.process_time() - cpu
            self.peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
            with _lock:
                _last[:] = [self]


_lock = fork_safe_lock(sys.modules[__name__])
_last: list[LoadReport] = []


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
