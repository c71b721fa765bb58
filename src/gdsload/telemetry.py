"""Loads as OpenTelemetry spans and Prometheus metrics, for the whole process.

Needs the extra `telemetry`; nothing of it is imported before the first call. Not
responsible for exporters: the provider and the registry are those of the application.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from gdsload.errors import extra_hint
from gdsload.report import Span, observe as observe

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider
    from prometheus_client import CollectorRegistry

    from gdsload.events import Event

__all__ = ["observe", "record_metrics", "record_spans"]

_HINT = f"{{}} is not installed: {extra_hint('telemetry')}"
# Fields of the report that are attributes of its span.
_ATTRIBUTES = (
    "source", "device", "backend", "engine", "choice", "tensors", "wanted_bytes", "read_bytes",
    "cached_bytes", "rate", "retries", "integration",
)  # fmt: skip
# Bytes per second: from a network disk to several NVMe disks.
_RATE_BUCKETS = tuple(rate * 1e9 for rate in (0.1, 0.25, 0.5, 1, 2, 3, 5, 7, 10, 15, 25, 50, 100))
# Seconds: from a small model in the page cache to a large one on a slow disk.
_SECONDS_BUCKETS = (0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600)


def _label(name: str) -> str:
    """A name of the report as a label: of a source its scheme, or "directory". Sources come and go,
    and each label would be a series that stays."""
    return " -> ".join(
        part.partition("://")[0] if "://" in part else "directory" if part[:1] == "/" else part
        for part in name.split(" -> ")
    )


def record_spans(tracer_provider: TracerProvider | None = None) -> Callable[[], None]:
    """Records an OpenTelemetry span for each load, with its phases as children.

    A span is recorded when its load has ended, below the span that is current in this thread. It is
    named "gdsload.load" or "gdsload.prefetch". Its attributes are fields of `LoadReport`, and the
    bytes by I/O path; refusals and failovers are span events. A phase that repeats is one child,
    from its first start to its last end, with the attributes `gdsload.seconds` (the sum) and
    `gdsload.count`.

    Args:
        tracer_provider: None is the global provider.

    Returns:
        A function that ends the recording for loads that begin later.

    Raises:
        ImportError: OpenTelemetry is not installed.

    Example:
        >>> gdsload.telemetry.record_spans()
    """
    try:
        from opentelemetry import trace
    except ImportError as error:
        raise ImportError(_HINT.format("OpenTelemetry"), name=error.name) from error

    from gdsload.events import LoadEnded

    tracer = trace.get_tracer("gdsload", tracer_provider=tracer_provider)

    def on_event(event: Event) -> None:
        if not isinstance(event, LoadEnded):
            return
        report, to_epoch = event.report, time.time() - time.monotonic()
        whole = tracer.start_span(
            f"gdsload.{event.kind}",
            start_time=_nanoseconds(event.time - report.seconds),
            attributes={f"gdsload.{name}": getattr(report, name) for name in _ATTRIBUTES}
            | {f"gdsload.path.{path}": nbytes for path, nbytes in report.paths.items()},
        )
        phases: dict[str, list[Span]] = {}
        for span in report.spans:
            if span.track == "phases":
                phases.setdefault(span.name, []).append(span)
        for name, spans in phases.items():
            child = tracer.start_span(
                name,
                trace.set_span_in_context(whole),
                start_time=_nanoseconds(to_epoch + min(span.start for span in spans)),
                attributes={
                    "gdsload.seconds": sum(span.end - span.start for span in spans),
                    "gdsload.count": len(spans),
                },
            )
            child.end(_nanoseconds(to_epoch + max(span.end for span in spans)))
        for name, reason in report.refusals.items():
            whole.add_event("refused", {"gdsload.name": name, "gdsload.reason": reason})
        for backends, nbytes in report.failovers.items():
            whole.add_event("failed over", {"gdsload.backends": backends, "gdsload.bytes": nbytes})
        if report.failure:
            whole.set_status(trace.StatusCode.ERROR, report.failure)
        whole.end(_nanoseconds(event.time))

    return observe(on_event)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def record_metrics(registry: CollectorRegistry | None = None) -> Callable[[], None]:
    """Counts loads in Prometheus metrics.

    All have the label `kind`: "load" or "prefetch". Bytes that a load takes over from a prefetch
    have the path "prefetched" in the load, and their I/O path in the prefetch.

    | metric | labels | |
    |---|---|---|
    | `gdsload_loads_total` | | loads that ended |
    | `gdsload_failed_loads_total` | `error` | loads that failed, by the type of error |
    | `gdsload_bytes_total` | `path` | bytes by I/O path |
    | `gdsload_cached_bytes_total` | | bytes of remote files that the local cache had |
    | `gdsload_phase_seconds_total` | `phase` | seconds of each phase without the phases inside it |
    | `gdsload_refusals_total` | `name` | loads in which an alternative was refused |
    | `gdsload_failover_bytes_total` | `backends` | bytes that one backend failed to read |
    | `gdsload_retries_total` | | repeated read operations |
    | `gdsload_load_seconds` | | histogram of the seconds of a load |
    | `gdsload_read_bytes_per_second` | | histogram of the rate of the reads in a load |

    Args:
        registry: Where the metrics are registered. None is the default registry.

    Returns:
        A function that removes the metrics from the registry and ends the counting.

    Raises:
        ImportError: prometheus_client is not installed.
        ValueError: The registry has these metrics already.

    Example:
        >>> stop = gdsload.telemetry.record_metrics()
    """
    try:
        from prometheus_client import REGISTRY, Counter, Histogram
    except ImportError as error:
        raise ImportError(_HINT.format("prometheus_client"), name=error.name) from error

    from gdsload.events import LoadEnded

    where = REGISTRY if registry is None else registry

    def counter(name: str, text: str, *labels: str) -> Counter:
        one = Counter(f"gdsload_{name}", text, ("kind", *labels), registry=where)
        made.callback(where.unregister, one)
        return one

    def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        one = Histogram(f"gdsload_{name}", text, ("kind",), buckets=buckets, registry=where)
        made.callback(where.unregister, one)
        return one

    with ExitStack() as made:
        loads = counter("loads", "Loads that ended")
        failed = counter("failed_loads", "Loads that failed", "error")
        nbytes_by = counter("bytes", "Bytes by I/O path", "path")
        cached = counter("cached_bytes", "Bytes of remote files that the local cache had")
        seconds_by = counter("phase_seconds", "Seconds by phase", "phase")
        refusals = counter("refusals", "Loads in which an alternative was refused", "name")
        failovers = counter("failover_bytes", "Bytes that one backend failed to read", "backends")
        retries = counter("retries", "Repeated read operations")
        seconds = histogram("load_seconds", "Seconds of a load", _SECONDS_BUCKETS)
        rates = histogram("read_bytes_per_second", "Rate of the reads in a load", _RATE_BUCKETS)
        registered = made.pop_all()

    def on_event(event: Event) -> None:
        if not isinstance(event, LoadEnded):
            return
        report, kind = event.report, event.kind
        loads.labels(kind).inc()
        if report.failure:
            failed.labels(kind, report.failure.partition(":")[0]).inc()
        for path, nbytes in report.paths.items():
            nbytes_by.labels(kind, path).inc(nbytes)
        cached.labels(kind).inc(report.cached_bytes)
        for phase, took in report.exclusive_phases().items():
            seconds_by.labels(kind, phase).inc(max(took, 0.0))
        # Not each file and each source: labels must not grow in number.
        for name in {_label(name.partition(" on ")[0]) for name in report.refusals}:
            refusals.labels(kind, name).inc()
        for backends, nbytes in report.failovers.items():
            failovers.labels(kind, _label(backends)).inc(nbytes)
        retries.labels(kind).inc(report.retries)
        seconds.labels(kind).observe(report.seconds)
        if report.rate:
            rates.labels(kind).observe(report.rate)

    stop_observing = observe(on_event)

    def stop() -> None:
        stop_observing()
        registered.close()

    return stop
