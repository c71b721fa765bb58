"""Cancelling a load from outside: from another thread or from an event loop.

The load runs in a context with a `CancelToken`. Code in it that waits calls `check` again and
again. Threads that wait for its reads, as those of transformers do, have no such context: the load
registers a function that ends these reads (`ended_by`). No thread is killed.
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
    """The load was cancelled before its end. There is no model."""


class CancelToken:
    """Cancels one load. May be used from any thread, and more than once."""

    def __init__(self) -> None:
        self.asked = False
        self.over = False  # the last call of `run` has ended
        self._lock = fork_safe_lock(self)
        self._ends: list[Callable[[], object]] = []

    def ask(self) -> None:
        """Cancels the load without waiting for its end.

        Each registered function is called in a thread of its own, because it may wait for reads
        that cannot be cancelled; in the caller's if no thread can be started.
        """
        with self._lock:
            self.asked = True
            ends = list(self._ends)
        for end in ends:
            if start_thread(end, "gdsload-stop") is None:
                end()

    def run(self, call: Callable[..., Result], *args: Any, **named: Any) -> Result:
        """Calls a function that this token cancels, and returns its result.

        Raises:
            LoadCancelled: It was cancelled before or during the call, even if the call has not
                noticed.
        """
        token = _current.set(self)
        self.over = False
        try:
            check()
            result = call(*args, **named)
            check()
            return result
        finally:
            _current.reset(token)
            self.over = True


_current: ContextVar[CancelToken | None] = ContextVar("gdsload.stop", default=None)


def check() -> None:
    """Raises LoadCancelled if this load was cancelled."""
    token = _current.get()
    if token is not None and token.asked:
        raise LoadCancelled("the load was cancelled")


@contextmanager
def ended_by(end: Callable[[], object]) -> Iterator[None]:
    """Registers `end`, which a cancellation of this load calls from another thread.

    Raises:
        LoadCancelled: The load was cancelled already.
    """
    token = _current.get()
    if token is None:
        yield
        return
    with token._lock:
        token._ends.append(end)
    try:
        check()
        yield
    finally:
        with token._lock:
            token._ends.remove(end)
