"""Cancelling a load from outside: from another thread or from an event loop.

The load runs in a context with a `CancelToken`. Code in it that waits calls `check` again and
again. Threads that wait for its reads, as those of transformers do, have no such context: what they
wait for keeps the token (`current`). No thread is killed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

from gdsload.errors import GdsloadError

Result = TypeVar("Result")

# What waits looks this often for a Ctrl-C, a cancelled load, and errors of other threads.
WAKE_SECONDS = 0.1


class LoadCancelled(GdsloadError, RuntimeError):
    """The load was cancelled before its end. There is no model."""


class CancelToken:
    """Cancels one load. May be used from any thread, and more than once."""

    def __init__(self) -> None:
        self.asked = False
        self.over = False  # the last call of `run` has ended

    def ask(self) -> None:
        """Cancels the load without waiting for its end."""
        self.asked = True

    def check(self) -> None:
        """Raises LoadCancelled if the load was cancelled."""
        if self.asked:
            raise LoadCancelled("the load was cancelled")

    def run(self, call: Callable[..., Result], *args: Any, **named: Any) -> Result:
        """Calls a function that this token cancels, and returns its result.

        Raises:
            LoadCancelled: It was cancelled before or during the call, even if the call has not
                noticed.
        """
        token = _current.set(self)
        self.over = False
        try:
            self.check()
            result = call(*args, **named)
            self.check()
            return result
        finally:
            _current.reset(token)
            self.over = True


_NEVER = CancelToken()  # nobody cancels it
_current: ContextVar[CancelToken] = ContextVar("gdsload.cancellation", default=_NEVER)


def current() -> CancelToken:
    """The token of this load."""
    return _current.get()


def check() -> None:
    """Raises LoadCancelled if this load was cancelled."""
    _current.get().check()
