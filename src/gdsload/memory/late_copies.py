"""Memory that copies still use after their load has ended: the device is busy, or a read hangs.

It is kept until these copies have ended, so that it is not reused before. Not responsible for the
copies (`backends.staging`, `backends.host_copies`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NamedTuple

from gdsload.system.lifecycle import fork_safe_lock


class _Kept(NamedTuple):
    owners: object  # what keeps the memory alive
    ended: Callable[[], bool]
    pid: int


_lock = fork_safe_lock(sys.modules[__name__])
_kept: list[_Kept] = []


def keep(owners: object, ended: Callable[[], bool]) -> None:
    """Keeps `owners` until `forget_ended` finds that `ended()` is true."""
    with _lock:
        _kept.append(_Kept(owners, ended, os.getpid()))


def forget_ended() -> None:
    """Frees the memory of copies that have ended since. A load that lacks memory calls it."""
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
