"""What happens in a load: the values that `on_event=` is called with.

A load reports `LoadStarted` first and `LoadEnded` last. Between them it reports what its
`LoadReport` has recorded since the last event: after each phase, and when the backend was opened or
has read; the path "prefetched" just before the end. Events come in the threads that work for the
load, one at a time; the load waits for the callable, whose type is `OnEvent`. An exception of it is
logged once and does not end the load.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from gdsload.system.lifecycle import fork_safe_lock, taken

if TYPE_CHECKING:
    from gdsload.report import LoadReport

__all__ = [
    "BackendChosen",
    "Event",
    "FailedOver",
    "LoadEnded",
    "LoadStarted",
    "PathRefused",
    "PathUsed",
    "PhaseEnded",
    "Retried",
]


@dataclass(frozen=True, slots=True)
class Event:
    """Anything that happens in a load.

    Attributes:
        time: Seconds since the epoch.
        source: The checkpoint, as the caller named it.
    """

    time: float
    source: str


@dataclass(frozen=True, slots=True)
class LoadStarted(Event):
    """A load has begun.

    Attributes:
        device: Where the tensors are needed, as far as it is known.
        kind: "load", or "prefetch" for reads that a later load takes over.
    """

    device: str
    kind: str


@dataclass(frozen=True, slots=True)
class BackendChosen(Event):
    """A backend was opened. Reported again if the backend, the engine or the reason changes.

    Attributes:
        backend: Its name.
        engine: Its engine: that of the posix backend, or the mode of cuFile; "" if it has none.
        reason: Why it was chosen, or "".
    """

    backend: str
    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class PathUsed(Event):
    """The first bytes of this load came by an I/O path.

    Attributes:
        path: The I/O path, as in `LoadReport.paths`.
        nbytes: How many bytes, so far.
    """

    path: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class PathRefused(Event):
    """A faster alternative is not used.

    Attributes:
        name: The alternative, as in `LoadReport.refusals`.
        reason: Why.
    """

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Retried(Event):
    """Read operations were repeated.

    Attributes:
        count: How many.
    """

    count: int


@dataclass(frozen=True, slots=True)
class FailedOver(Event):
    """A backend failed, and another one read its bytes.

    Attributes:
        backends: Which ones, as "from -> to".
        nbytes: How many bytes.
    """

    backends: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class PhaseEnded(Event):
    """A phase has ended, at `time`. Phases may lie inside others, and repeat.

    Attributes:
        phase: Its name, as in `LoadReport.phases`.
        seconds: How long it took.
    """

    phase: str
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadEnded(Event):
    """A load has ended.

    Attributes:
        report: What it did. `report.failure` is the error that ended it, or "".
        kind: As for `LoadStarted`.
    """

    report: LoadReport
    kind: str


OnEvent = Callable[[Event], object]
_log = logging.getLogger("gdsload")
# The exceptions that were logged: of each observer, or of the object that it is a method of, the
# name of the observer and the type of the exception.
_logged: WeakKeyDictionary[object, set[tuple[str, type]]] = WeakKeyDictionary()


class Publisher:
    """Finds out what a report has recorded, and calls the observers. One for each load."""

    def __init__(self, report: LoadReport, observers: Sequence[OnEvent], kind: str) -> None:
        self._report, self.observers, self._kind = report, observers, kind
        self._lock = fork_safe_lock(self)
        self._logged: set[tuple[str, type]] = set()  # of observers that cannot be remembered
        self._backend = ("", "", "")
        self._refusals: dict[str, str] = {}
        self._paths: set[str] = set()
        self._ending = False
        self._retries = 0
        self._failovers: dict[str, int] = {}
        self._spans = 0
        self._call(LoadStarted(time.time(), report.source, report.device, kind))

    def publish(self) -> None:
        """Calls the observers with the new events. If another thread is doing so, returns: the next
        call, or `end`, publishes them."""
        with taken(self._lock) as mine:
            if mine:
                for event in self._news():
                    self._call(event)

    def end(self) -> None:
        """Calls the observers with what is new and with the end of the load."""
        with self._lock:
            self._ending = True
            self.publish()
            self._call(LoadEnded(time.time(), self._report.source, self._report, self._kind))

    def _news(self) -> Iterator[Event]:
        """What was recorded since the last call. Other threads may record meanwhile."""
        report, now = self._report, time.time()
        source, monotonic = report.source, time.monotonic()
        backend = report.backend, report.engine, report.choice
        if backend != self._backend and report.backend:
            self._backend = backend
            yield BackendChosen(now, source, *backend)
        for name, reason in list(report.refusals.items()):
            if self._refusals.get(name) != reason:
                self._refusals[name] = reason
                yield PathRefused(now, source, name, reason)
        for path, nbytes in list(report.paths.items()):
            # A model's own prefetch takes its bytes out of "prefetched" at the end.
            final = self._ending or path != "prefetched"
            if nbytes and final and path not in self._paths:
                self._paths.add(path)
                yield PathUsed(now, source, path, nbytes)
        if (retries := report.retries - self._retries) > 0:
            self._retries += retries
            yield Retried(now, source, retries)
        for backends, nbytes in list(report.failovers.items()):
            if (more := nbytes - self._failovers.get(backends, 0)) > 0:
                self._failovers[backends] = nbytes
                yield FailedOver(now, source, backends, more)
        while self._spans < len(report.spans):
            span = report.spans[self._spans]
            self._spans += 1
            if span.track == "phases":
                ended = now - monotonic + span.end
                yield PhaseEnded(ended, source, span.name, span.end - span.start)

    def _is_first(self, observer: OnEvent, name: str, error: type) -> bool:
        """Whether an observer raises errors of a type for the first time, in this process if
        that can be remembered, else in this load."""
        try:
            logged = _logged.setdefault(getattr(observer, "__self__", observer), set())
        except TypeError:  # it has no hash, or no weak references
            logged = self._logged
        is_first = (name, error) not in logged
        logged.add((name, error))
        return is_first

    def _call(self, event: Event) -> None:
        for observer in self.observers:
            try:
                observer(event)
            except Exception as error:
                name = getattr(observer, "__qualname__", type(observer).__qualname__)
                if self._is_first(observer, name, type(error)):
                    _log.warning("on_event %s failed; the load goes on", name, exc_info=True)
