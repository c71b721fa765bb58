"""What really happened in a load: which road the bytes took, how long each phase was, and why the
better roads were refused. A report is filled while the load runs and never changes afterwards.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from gdsload.system.lifecycle import fork_safe_lock


class Span(NamedTuple):
    """Something that took time: monotonic seconds, on a named track of the trace."""

    name: str
    track: str
    start: float
    end: float


@dataclass(slots=True)
class LoadReport:
    """One load. Bytes, seconds and counts; `paths` maps "backend/engine/way" to bytes.

    `choice` says which backend cold bytes took and why, `rates` what was measured of backends in
    bytes per second, `failovers` how many bytes failed on one and were read by another.

    Of a model: `integration` is the way into transformers that ran ("hook", "safe_open" or
    "stock"), `integration_reason` why it was not the first of these, `fates` how many tensors
    became parameters as they are ("keep"), were converted or cast ("convert"), or were not read
    ("skip").
    `modules_ready` says, for `on_module_ready`, whether modules were told of as they came, or at
    the end and why.
    """

    source: str
    device: str = "cpu"
    backend: str = ""
    engine: str = ""
    choice: str = ""
    tensors: int = 0
    wanted_bytes: int = 0
    read_bytes: int = 0
    requests: int = 0
    short_reads: int = 0
    retries: int = 0
    paths: dict[str, int] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    failovers: dict[str, int] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    pages: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_rss_bytes: int = 0
    failure: str = ""
    integration: str = ""
    integration_reason: str = ""
    modules_ready: str = ""
    fates: dict[str, int] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list, repr=False)

    @property
    def rate(self) -> float:
        """Wanted bytes per second of the whole load, 0.0 if it took no time."""
        return self.wanted_bytes / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Everything but the spans, for JSON."""
        facts = asdict(self)
        del facts["spans"]
        return {**facts, "bytes_per_second": self.rate}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def summary(self) -> str:
        """A few lines for people."""
        lines = [
            f"{self.source} -> {self.device}: {self.tensors} tensors,"
            f" {self.wanted_bytes / 1e9:.3f} GB in {self.seconds:.3f} s"
            f" ({self.rate / 1e9:.2f} GB/s), {self.cpu_seconds:.2f} s CPU"
        ]
        roads = [f"{road} {size / 1e9:.3f} GB" for road, size in self.paths.items() if size]
        lines.append("road: " + (", ".join(roads) or "no bytes were read"))
        if self.choice:
            rates = ", ".join(f"{name} {rate / 1e9:.2f} GB/s" for name, rate in self.rates.items())
            lines.append(f"backend: {self.choice}{f' ({rates})' if rates else ''}")
        lines += [
            f"failed, and read again: {way}, {size:,} bytes" for way, size in self.failovers.items()
        ]
        lines.append(
            "phases: " + ", ".join(f"{name} {took:.3f} s" for name, took in self.phases.items())
        )
        if self.requests:
            lines.append(
                f"{self.requests} requests, {self.short_reads} short reads continued,"
                f" {self.retries} retries"
            )
        if self.integration:
            why = f" ({self.integration_reason})" if self.integration_reason else ""
            counts = ", ".join(f"{count} {label}" for label, count in self.fates.items())
            lines.append(
                f"path into transformers: {self.integration}{why}; {counts or 'no labels'}"
            )
        lines += [f"refused: {name}: {why}" for name, why in self.refusals.items()]
        if self.failure:
            lines.append(f"failed: {self.failure}")
        return "\n".join(lines)

    def trace(self) -> dict[str, Any]:
        """The phases and requests in Chrome's trace format (chrome://tracing, Perfetto)."""
        pid = os.getpid()
        tracks = {name: number for number, name in enumerate(sorted({s.track for s in self.spans}))}
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
            for name, tid in tracks.items()
        ]
        events += [
            {
                "ph": "X",
                "name": span.name,
                "pid": pid,
                "tid": tracks[span.track],
                "ts": span.start * 1e6,
                "dur": max(span.end - span.start, 0.0) * 1e6,
            }
            for span in self.spans
        ]
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the trace as a JSON file."""
        with open(path, "w", encoding="utf-8") as out:
            json.dump(self.trace(), out)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a phase; a phase entered twice adds up."""
        start = time.monotonic()
        try:
            yield
        finally:
            end = time.monotonic()
            self.phases[name] = self.phases.get(name, 0.0) + end - start
            self.spans.append(Span(name, "phases", start, end))

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Times the load from its first step to its last and makes it the last report."""
        start, cpu = time.monotonic(), time.process_time()
        try:
            yield
        except GeneratorExit:  # a stream that its caller had enough of
            raise
        except BaseException as error:
            self.failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            self.seconds = time.monotonic() - start
            self.cpu_seconds = time.process_time() - cpu
            self.peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
            _keep(self)


_lock = fork_safe_lock(sys.modules[__name__])
_last: list[LoadReport] = []


def _keep(report: LoadReport) -> None:
    with _lock:
        _last[:] = [report]


def last_report() -> LoadReport:
    """The report of the load that ended last in this process, failed or not.

    Raises LookupError before the first one.
    """
    with _lock:
        if not _last:
            raise LookupError("nothing was loaded in this process yet")
        return _last[0]
