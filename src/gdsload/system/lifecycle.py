"""What becomes of the process-wide state of gdsload when the process forks, and when it ends.

A child of fork() has one thread. A lock that another thread of the parent held stays locked there
for ever, so locks that outlive a function are made here, and a child gets new ones. When the
process ends, parts are closed in one order, the users of a thing before the thing:

    prefetches ─► staging rings ─► cuFile ─► CUDA

Not responsible for what each part does: it registers its own functions.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

# The steps of the end of the process, in their order.
PREFETCHES, RINGS, CUFILE, CUDA = range(4)
# How long a step waits for one lock. A thread that holds it may be in a driver call that hangs.
LOCK_SECONDS = 5.0

_lock_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_in_child: list[Callable[[], None]] = []
_steps: list[tuple[int, Callable[[], None]]] = []
_ending = threading.Event()


def fork_safe_lock(owner: object, attribute: str = "_lock") -> threading.RLock:
    """A reentrant lock, to be kept in this attribute of its owner, an object or a module: a child
    of fork() finds a new one there.

    A `with` that the forking thread is in keeps the lock that it has taken.
    """
    _lock_names[owner] = attribute
    return threading.RLock()


def in_child(forget: Callable[[], None]) -> None:
    """Calls `forget` in every child of fork(), when all locks are new."""
    _in_child.append(forget)


def at_exit(step: int, end: Callable[[], None]) -> None:
    """Calls `end` when the process ends, in this step. It must return within seconds."""
    _steps.append((step, end))


def is_ending() -> bool:
    """Whether the process ends: nothing that a step has closed may be opened again."""
    return _ending.is_set()


def _after_fork() -> None:
    for owner, attribute in list(_lock_names.items()):
        setattr(owner, attribute, threading.RLock())
    for forget in _in_child:
        forget()


def _end() -> None:
    _ending.set()
    with ExitStack() as last_in_first_out:  # one that raises keeps none of the others from running
        for _, end in sorted(_steps, key=lambda each: each[0], reverse=True):
            last_in_first_out.callback(end)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_end)
