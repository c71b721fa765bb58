"""Python threads whose start cannot hang, and events that Ctrl-C cannot break.

`threading.Thread.start` waits for an event that the new thread sets. If there is no memory for its
first frame, the thread dies before that, and `start` would hang.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

_LOOK_SECONDS = 0.05  # interval of checks whether the new thread is alive


def start_thread(
    run: Callable[[], object], name: str, *, daemon: bool = True
) -> threading.Thread | None:
    """Starts a thread. None if the system has no thread, or no memory, left.

    Also None while the interpreter ends: then a new thread never runs. It waits for the end of
    threads that are no daemons.
    """
    if sys.is_finalizing():
        return None
    thread = _Thread(target=run, name=name, daemon=daemon)
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


class SafeEvent:
    """As `threading.Event`, but setting it cannot hang.

    A waiter of `threading.Event` has its lock for a moment. If Ctrl-C comes in that moment, the
    lock stays taken, and the thread that sets the event waits for it without end.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._open = threading.Lock()  # taken until it is set, and by each waiter for a moment
        self._open.acquire()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        with suppress(RuntimeError):  # another thread has set it
            self._open.release()

    def wait(self, seconds: float) -> bool:
        """Whether it is set now. If Ctrl-C ends one waiter, another may wait all its seconds."""
        if not self._is_set and self._open.acquire(timeout=seconds):
            SafeEvent.set(self)  # for the next waiter
        return self._is_set


def condition() -> tuple[threading.RLock, threading.Condition]:
    """A lock, and a condition of it that has no lock of its own.

    Enter the lock, not the condition: `Condition.__enter__` is Python code, in which Ctrl-C may
    come when it has the lock, which then stays taken.
    """
    lock = threading.RLock()
    return lock, threading.Condition(lock)


class _Started(SafeEvent):
    """Set when the new thread runs. Waiting for it raises RuntimeError if that thread is dead."""

    alive: weakref.ref[_Alive] | None = None

    def set(self) -> None:
        """`threading` calls this too early: the thread may still die of what it does next."""

    def runs(self) -> None:
        super().set()

    def _at_fork_reinit(self) -> None:
        """What `threading` calls in a forked child: nobody waits there."""

    def wait(self, seconds: float | None = None) -> bool:
        if seconds is not None:
            return super().wait(seconds)
        while not super().wait(_LOOK_SECONDS):
            if self.never_runs():
                raise RuntimeError("the new thread died before it ran: there is no memory for it")
        return True

    def never_runs(self) -> bool:
        """A function of its own, so that no variable keeps the object between two looks."""
        alive = None if self.alive is None else self.alive()
        return (alive is None or alive.over) and not self.is_set()


class _Thread(threading.Thread):
    """A thread whose `start` raises RuntimeError if it dies early.

    It replaces `_started`, which `threading.Thread.start` waits for, and `_bootstrap`, which the
    new thread runs. Both names are the same from Python 3.10 to 3.14.
    """

    def __init__(self, **words: Any) -> None:
        super().__init__(**words)
        self._started = _Started()

    def run(self) -> None:
        self._started.runs()
        super().run()

    @property
    def _bootstrap(self) -> Callable[[], None]:
        alive = _Alive()
        self._started.alive = weakref.ref(alive)
        return partial(_bootstrap, self, alive)

    def start(self) -> None:
        try:
            super().start()
        except BaseException:  # also Ctrl-C
            if self._started.never_runs():  # so it does not remove itself
                getattr(threading, "_limbo", {}).pop(self, None)
            raise


def _bootstrap(thread: threading.Thread, alive: _Alive) -> None:
    try:
        threading.Thread._bootstrap(thread)  # type: ignore[attr-defined]
    finally:
        alive.over = True
