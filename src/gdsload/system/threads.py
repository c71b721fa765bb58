"""Python threads whose start cannot hang.

`threading.Thread.start` waits for an event that the new thread sets. If there is no memory for its
first frame, the thread dies before that, and `start` would hang.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

_LOOK_SECONDS = 0.05  # interval of checks whether the new thread is alive


def start_thread(run: Callable[[], object], name: str) -> threading.Thread | None:
    """Starts a daemon thread. None if the system has no thread, or no memory, left.

    Also None while the interpreter ends: then a new thread never runs.
    """
    if sys.is_finalizing():
        return None
    thread = _Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError):
        return None
    return thread


class _Alive:
    """Referenced by the new thread alone: freed, or `over`, when the thread has ended."""

    __slots__ = ("__weakref__", "over")

    def __init__(self) -> None:
        self.over = False


class _Started(threading.Event):
    """Set by the new thread. Waiting for it raises RuntimeError if that thread is dead."""

    alive: weakref.ref[_Alive] | None = None

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is not None:
            return super().wait(timeout)
        while not super().wait(_LOOK_SECONDS):
            if self._is_dead() and not self.is_set():
                raise RuntimeError("the new thread died before it ran: there is no memory for it")
        return True

    def _is_dead(self) -> bool:
        """A function of its own, so that no variable keeps the object between two looks."""
        if self.alive is None:
            return False
        alive = self.alive()
        return alive is None or alive.over


class _Thread(threading.Thread):
    """A thread whose `start` raises RuntimeError if it dies early.

    It replaces `_started`, which `threading.Thread.start` waits for, and `_bootstrap`, which the
    new thread runs. Both names are the same from Python 3.10 to 3.14.
    """

    def __init__(self, **words: Any) -> None:
        super().__init__(**words)
        self._started = _Started()

    @property
    def _bootstrap(self) -> Callable[[], None]:
        alive = _Alive()
        self._started.alive = weakref.ref(alive)
        return partial(_bootstrap, self, alive)

    def start(self) -> None:
        try:
            super().start()
        except (RuntimeError, MemoryError):  # it never runs, and does not remove itself
            if not self._started.is_set():
                getattr(threading, "_limbo", {}).pop(self, None)
            raise


def _bootstrap(thread: threading.Thread, alive: _Alive) -> None:
    try:
        threading.Thread._bootstrap(thread)  # type: ignore[attr-defined]
    finally:
        alive.over = True
