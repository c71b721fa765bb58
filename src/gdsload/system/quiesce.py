"""Quiesce and resume: prepare a process for a snapshot (CRIU, cuda-checkpoint), and continue.

Objects that hold something that a snapshot cannot carry (rings, contexts, descriptors, pins)
register here as holders. They release it on `quiesce`, and acquire it again when they are next
used. Not responsible for what a holder holds.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from gdsload.errors import GdsloadError
from gdsload.system import lifecycle
from gdsload.system.gc_control import imports_done

_POLL_SECONDS = 0.005

# The depth of a holder. Loads use the rings, and rings are registered with the cuFile driver.
LOAD, RING, DRIVER = 0, 1, 2


class Holder:
    """An object that holds something that a snapshot cannot carry."""

    def busy(self) -> str:
        """The work in progress, in a few words; empty if it can be quiesced now."""
        return ""

    def quiesce(self) -> None:
        """Releases everything. Later use acquires it again."""

    def resume(self) -> None:
        """Acquires again what depends on the outside, such as files; raises if that has changed."""


def quiesce(timeout: float = 30.0) -> None:
    """Releases every ring, AIO context, descriptor, pin and native thread of gdsload, and closes
    the cuFile driver.

    Waits for loads and prefetches in progress, and for files of the local cache that are being
    flushed. Memory that was read stays, in tensors and in prefetches. An open `safe_open` or
    `Checkpoint` opens its files again when it is next used, or with `resume`, and raises
    FileChanged if they have changed. Start no load in other threads meanwhile.

    Args:
        timeout: seconds to wait.

    Raises:
        GdsloadError: a load or a prefetch is still in progress, for example a stream that is not
            consumed, or weights are served. Nothing was released.

    Example:
        >>> gdsload.quiesce()  # now dump the process; in the restored process:
        >>> gdsload.resume()
    """
    deadline = time.monotonic() + timeout
    while True:
        with _gate:
            found = holders()
            reasons = [reason for holder in found if (reason := holder.busy())]
            if not reasons:
                for holder in found:
                    holder.quiesce()
                return
        if time.monotonic() >= deadline:
            # A load is busy, and so is its session: the reason is the same.
            raise GdsloadError(f"cannot quiesce: {'; '.join(dict.fromkeys(reasons))}")
        time.sleep(_POLL_SECONDS)


@contextmanager
def loading(source: str) -> Iterator[None]:
    """A load, which `quiesce` waits for: from the opening of its files to its end. It ends what
    `ease_imports` has begun: every load comes here."""
    imports_done()
    work = _Load(source)
    with _gate:
        register(work)
    try:
        yield
    finally:
        unregister(work)


class _Load(Holder):
    def __init__(self, source: str) -> None:
        self._source = source

    def busy(self) -> str:
        return f"{self._source} is being read"  # always: `quiesce` is never called


def resume() -> None:
    """Opens again the files of objects that were open at `quiesce`.

    Loads do so by themselves; this reports at once whether the files are unchanged.

    Raises:
        CheckpointError: a file has changed (FileChanged) or is missing (CheckpointNotFound).
    """
    for holder in holders():
        holder.resume()


def register(holder: Holder, depth: int = LOAD) -> None:
    """Registers a holder for as long as it lives. Deeper holders are quiesced later."""
    with _lock:
        _holders[holder] = depth


def holders() -> list[Holder]:
    """The registered holders in the order of quiescing: by depth, then oldest first."""
    with _lock:
        found = list(_holders.items())
    return [holder for holder, _ in sorted(found, key=lambda item: item[1])]


def unregister(holder: Holder) -> None:
    """Undoes `register`. May be called again."""
    with _lock:
        _holders.pop(holder, None)


_lock = lifecycle.fork_safe_lock(sys.modules[__name__])
# A load begins inside it, and all holders are quiesced inside it.
_gate = lifecycle.fork_safe_lock(sys.modules[__name__], "_gate")
_holders: weakref.WeakKeyDictionary[Holder, int] = weakref.WeakKeyDictionary()
lifecycle.in_child(_holders.clear)
