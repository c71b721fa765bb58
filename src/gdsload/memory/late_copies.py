"""Memory that copies still use after their load has ended: the device is busy, or a read hangs.

It is kept until these copies have ended, so that it is not reused before. A thread frees it then,
since no other load may follow. Not responsible for the copies (`backends.staging`,
`backends.host_copies`).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from gdsload.system import lifecycle
from gdsload.system.threads import start_thread

# The thread looks after this time, and less and less often.
_FIRST_LOOK_SECONDS, _LAST_LOOK_SECONDS = 0.02, 1.0
_WAIT_SECONDS = 0.001
# How long one thread waits while another asks whether copies have ended: a call of cuFile may hang.
_ASK_SECONDS = 0.1


class _Kept(NamedTuple):
    owners: object  # what keeps the memory alive
    ended: Callable[[], bool]
    pid: int


class _Noted(threading.local):
    """What this thread has kept inside `awaited`; None outside of it."""

    kept: list[_Kept] | None = None


_lock = lifecycle.fork_safe_lock(sys.modules[__name__])
_asking = lifecycle.fork_safe_lock(sys.modules[__name__], "_asking")
_noted = _Noted()
_kept: dict[int, _Kept] = {}  # by its address, so that entries come and go in one step
_watching: list[threading.Thread] = []  # that of `_forget_soon`, while it runs
lifecycle.in_child(_watching.clear)


def keep(owners: object, ended: Callable[[], bool]) -> None:
    """Keeps `owners` until `ended()` is true."""
    entry = _Kept(owners, ended, os.getpid())
    _kept[id(entry)] = entry
    if _noted.kept is not None:
        _noted.kept.append(entry)
    with _lock:
        if any(thread.is_alive() for thread in _watching):
            return
    if (thread := start_thread(_forget_soon, "gdsload-late-copies")) is not None:
        _watching[:] = [thread]  # without it, a later load frees them


def _forget_soon() -> None:
    seconds = _FIRST_LOOK_SECONDS
    while not lifecycle.is_ending():
        time.sleep(seconds)
        seconds = min(2 * seconds, _LAST_LOOK_SECONDS)
        forget_ended()
        with _lock:
            if not any(each.pid == os.getpid() for each in list(_kept.values())):
                _watching.clear()
                return


@contextmanager
def awaited(seconds: float) -> Iterator[None]:
    """At its end, waits until the copies that this thread has left inside it have ended, up to
    `seconds`. Those of other threads do not count, nor those of a block inside this one."""
    noted: list[_Kept] = []
    outer, _noted.kept = _noted.kept, noted
    try:
        yield
    finally:
        _noted.kept = outer
        _wait_for(noted, seconds)


def _wait_for(entries: Sequence[_Kept], seconds: float) -> None:
    wanted, end = set(map(id, entries)), time.monotonic() + seconds
    while not wanted.isdisjoint(_kept) and time.monotonic() < end:
        forget_ended()
        if not wanted.isdisjoint(_kept):
            time.sleep(_WAIT_SECONDS)


def forget_ended() -> None:
    """Frees the memory of copies that have ended since. Loads call it before they need memory."""
    with lifecycle.taken(_asking, _ASK_SECONDS) as mine:
        if not mine:
            return
        for key, each in list(_kept.items()):
            # Copies of the parent of a forked process cannot be asked about.
            if each.pid == os.getpid() and _has_ended(each):
                _kept.pop(key, None)


def _has_ended(entry: _Kept) -> bool:
    with suppress(Exception):  # it cannot be asked now
        return entry.ended()
    return False


def owners() -> list[object]:
    """What is kept."""
    return [each.owners for each in list(_kept.values())]
