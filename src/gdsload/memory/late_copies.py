"""Memory that copies still use after their load has ended: the device is busy, or a read hangs.

It is kept until these copies have ended, so that it is not reused before. A thread frees it then,
since no other load may follow. Not responsible for the copies (`backends.staging`,
`backends.host_copies`).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from gdsload.system import lifecycle
from gdsload.system.threads import start_thread

# The thread looks after this time, and less and less often.
_FIRST_LOOK_SECONDS, _LAST_LOOK_SECONDS = 0.02, 1.0
_WAIT_SECONDS = 0.001


class _Kept(NamedTuple):
    owners: object  # what keeps the memory alive
    ended: Callable[[], bool]
    pid: int


_lock = lifecycle.fork_safe_lock(sys.modules[__name__])
_kept: list[_Kept] = []
_watching: list[bool] = []  # one entry while the thread runs
lifecycle.in_child(_watching.clear)


def keep(owners: object, ended: Callable[[], bool]) -> None:
    """Keeps `owners` until `ended()` is true."""
    with _lock:
        _kept.append(_Kept(owners, ended, os.getpid()))
        watched = bool(_watching)
        _watching[:] = [True]
    if not watched and start_thread(_forget_soon, "gdsload-late-copies") is None:
        _watching.clear()  # a later load frees it


def _forget_soon() -> None:
    seconds = _FIRST_LOOK_SECONDS
    while not lifecycle.is_ending():
        time.sleep(seconds)
        seconds = min(2 * seconds, _LAST_LOOK_SECONDS)
        with suppress(Exception):  # of one that cannot be asked now
            forget_ended()
        with _lock:
            if not any(each.pid == os.getpid() for each in _kept):
                _watching.clear()
                return


def wait_for(owners: Sequence[object], seconds: float) -> None:
    """Waits until the copies of these owners have ended, up to `seconds`."""
    end = time.monotonic() + seconds
    wanted = {id(one) for one in owners}
    while time.monotonic() < end:
        forget_ended()
        with _lock:
            if not any(id(each.owners) in wanted for each in _kept):
                return
        time.sleep(_WAIT_SECONDS)


def forget_ended() -> None:
    """Frees the memory of copies that have ended since. Loads call it before they need memory."""
    ended: list[_Kept] = []
    kept: list[_Kept] = []
    with _lock:
        for each in _kept:
            # Copies of the parent of a forked process cannot be asked about.
            is_over = each.pid == os.getpid() and each.ended()
            (ended if is_over else kept).append(each)
        _kept[:] = kept
    ended.clear()  # not under the lock: to free device memory waits for the device


def owners() -> list[object]:
    """What is kept."""
    with _lock:
        return [each.owners for each in _kept]
