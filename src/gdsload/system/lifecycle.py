"""The process-wide state of gdsload when the process forks, and when it ends.

A child of fork() has one thread. A lock that another thread of the parent held would never be
unlocked in the child. So locks that outlive a function are created here, and a child gets new ones.
When the process ends, resources are closed in one order, each after its users:

    prefetches ─► staging rings ─► cuFile ─► CUDA ─► the process itself, if a command asks for it

Not responsible for closing them: each module registers its own functions.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

# The steps of the end of the process, in their order.
PREFETCHES, RINGS, CUFILE, CUDA, PROCESS = range(5)
# How long a step waits for one lock. A thread that holds it may be in a driver call that hangs.
LOCK_SECONDS = 5.0

_lock_names: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
_in_child: list[Callable[[], None]] = []
_steps: list[tuple[int, Callable[[], None]]] = []
_ending = threading.Event()


def fork_safe_lock(owner: object, attribute: str = "_lock") -> threading.RLock:
    """A reentrant lock, which a child of fork() replaces by a new one.

    A `with` block around the fork still releases the old lock, which it holds.

    Args:
        owner: The object or the module that has the lock.
        attribute: The attribute of `owner` that the caller assigns the lock to.
    """
    _lock_names.setdefault(owner, set()).add(attribute)
    return threading.RLock()


@contextmanager
def taken(lock: threading.RLock, seconds: float = 0.0) -> Iterator[bool]:
    """Takes a lock if it is free, or gets free within `seconds`: whether this thread has it.

    The lock is released even if Ctrl-C comes while `lock.acquire` returns.
    """
    is_owned: Callable[[], bool] = lock._is_owned  # type: ignore[attr-defined]
    outside = not is_owned()
    try:
        yield lock.acquire(timeout=seconds) if outside else True
    finally:
        if outside and is_owned():
            lock.release()


def in_child(forget: Callable[[], None]) -> None:
    """Calls `forget` in every child of fork(), after all locks were replaced."""
    _in_child.append(forget)


def at_exit(step: int, end: Callable[[], None]) -> None:
    """Calls `end` in this step of the process's end. It must return within seconds."""
    _steps.append((step, end))


def is_ending() -> bool:
    """Whether the process is ending: nothing that a step has closed may be opened again."""
    return _ending.is_set()


def _after_fork() -> None:
    for owner, attributes in list(_lock_names.items()):
        for attribute in attributes:
            setattr(owner, attribute, threading.RLock())
    for forget in _in_child:
        forget()


def _end() -> None:
    _ending.set()
    with ExitStack() as last_in_first_out:  # an error does not prevent the other steps
        for _, end in sorted(_steps, key=lambda each: each[0], reverse=True):
            last_in_first_out.callback(end)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_end)
