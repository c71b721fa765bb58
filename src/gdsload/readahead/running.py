"""The prefetches of this process: which of them still hold something, and which were the last.

What a prefetch is, it knows itself. Here they are found, ended before the interpreter goes down,
and forgotten in a child.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Protocol

from gdsload.system import lifecycle

REMEMBERED = 32  # those that `warmup.status` can still tell of when they have ended


class Underway(Protocol):
    """A prefetch that was begun."""

    @property
    def over(self) -> bool:
        """Whether it reads no more and holds nothing that a load could take."""

    def close(self) -> None:
        """Ends it."""

    def orphan(self) -> None:
        """Tells it that this is a child of the process that reads."""


def begin(one: Underway) -> None:
    """Keeps it until it is over."""
    with _lock:
        _alive.append(one)
        _started.append(one)


def end(one: Underway) -> None:
    """Lets go of it; also where that was done before."""
    with _lock:
        if one in _alive:
            _alive.remove(one)


def current() -> list[Underway]:
    """Those that still read, or hold what nobody has taken; oldest first."""
    with _lock:
        _alive[:] = [one for one in _alive if not one.over]
        return list(_alive)


def started() -> list[Underway]:
    """The last ones, oldest first, ended or not."""
    with _lock:
        return list(_started)


_lock = lifecycle.fork_safe_lock(sys.modules[__name__])  # reentrant: signal handlers may ask, too
_alive: list[Underway] = []
_started: deque[Underway] = deque(maxlen=REMEMBERED)


def _close_all() -> None:
    for one in current():
        one.close()


def _forget() -> None:
    for one in {id(one): one for one in [*_alive, *_started]}.values():
        one.orphan()
    _alive.clear()
    _started.clear()


lifecycle.in_child(_forget)
# Daemon threads that wake while the interpreter goes down are stopped for good: end them before.
lifecycle.at_exit(lifecycle.PREFETCHES, _close_all)
