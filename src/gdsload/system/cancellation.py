"""A load that somebody else may end: from another thread, or from an event loop.

Whoever starts the load runs it in a context with a `CancelToken`; what waits inside it registers
how it
is ended. Native reads go on until then, and no thread is ever killed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from gdsload.errors import GdsloadError
from gdsload.system.lifecycle import fork_safe_lock
from gdsload.system.threads import start_thread

Result = TypeVar("Result")


class LoadCancelled(GdsloadError, RuntimeError):
    """The load was told to end before it had. Whoever told it gets no model and no other error."""


class CancelToken:
    """The wish that a load ends. May be asked from any thread, once or more often."""

    def __init__(self) -> None:
        self.asked = False
        self._lock = fork_safe_lock(self)
        self._ends: list[Callable[[], object]] = []

    def ask(self) -> None:
        """Returns at once, where a thread can be started: what is ended waits a little for reads
        that cannot be called back."""
        with self._lock:
            self.asked = True
            ends = list(self._ends)
        for end in ends:
            if start_thread(end, "gdsload-stop") is None:
                end()

    def run(self, call: Callable[..., Result], *args: Any, **named: Any) -> Result:
        """Calls with this stop in place. Raises LoadCancelled where it was asked meanwhile, also if
        the call did not look."""
        token = _current.set(self)
        try:
            check()
            result = call(*args, **named)
            check()
            return result
        finally:
            _current.reset(token)


_current: ContextVar[CancelToken | None] = ContextVar("gdsload.stop", default=None)


def check() -> None:
    """Raises LoadCancelled where this load was told to end."""
    stop = _current.get()
    if stop is not None and stop.asked:
        raise LoadCancelled("the load was cancelled")


@contextmanager
def ended_by(end: Callable[[], object]) -> Iterator[None]:
    """Within it, `end` is called, from another thread, when this load is told to end. Raises
    LoadCancelled where it has been."""
    stop = _current.get()
    if stop is None:
        yield
        return
    with stop._lock:
        stop._ends.append(end)
    try:
        check()
        yield
    finally:
        with stop._lock:
            stop._ends.remove(end)
