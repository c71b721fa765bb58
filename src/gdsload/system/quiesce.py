"""A process made still, so that it can be dumped: by CRIU, cuda-checkpoint, or a snapshot.

Whoever holds what a dump cannot carry (rings, contexts, descriptors, pins) registers itself here
and gives it back when asked; it takes it again when it is next used. Nothing here knows what the
holders are.
"""

from __future__ import annotations

import sys
import time
import weakref
from typing import NamedTuple, Protocol

from gdsload.errors import GdsloadError
from gdsload.system import lifecycle

_LOOK_SECONDS = 0.005


# How deep a holder lies: a load uses the rings, and a ring is registered with cuFile's driver.
LOAD, RING, DRIVER = 0, 1, 2


class Holder(Protocol):
    """Somebody who holds what a dump cannot carry."""

    def busy(self) -> str:
        """What is under way, in a few words; empty where it can be made still now."""

    def quiesce(self) -> None:
        """Gives everything back. What is asked of it later takes it again."""

    def resume(self) -> None:
        """Takes back what it can only have if the world is still the same; raises if not."""


def quiesce(timeout: float = 30.0) -> None:
    """Closes every ring, AIO context, descriptor, pin and native thread of gdsload, and the driver
    of cuFile.

    Reads under way are waited for, `timeout` seconds at most. What is in memory stays there:
    tensors, and what a prefetch has landed. What is held beyond it (an opened `safe_open`, a
    `Checkpoint`) opens its files again when it is next used, or with `resume`, and raises
    FileChanged where they are not the same any more. Call it while no thread starts a load.

    Raises GdsloadError, having closed nothing, where a load or a prefetch is still under way after
    `timeout` seconds: a stream that is half-way does not end by itself.
    """
    deadline = time.monotonic() + timeout
    held = holders()
    while reasons := [reason for holder in held if (reason := holder.busy())]:
        if time.monotonic() >= deadline:
            raise GdsloadError(f"this process cannot be made still: {'; '.join(reasons)}")
        time.sleep(_LOOK_SECONDS)
    for holder in held:
        holder.quiesce()


def resume() -> None:
    """Opens again what `quiesce` closed and somebody still holds. Loads do so by themselves; this
    finds out at once whether the files are still what they were.

    Raises FileChanged, CheckpointNotFound and their kinds where they are not.
    """
    for holder in holders():
        holder.resume()


def register(holder: Holder, depth: int = LOAD) -> None:
    """Registers somebody, for as long as it lives. What others use is deeper, and rests later."""
    with _lock:
        _holders.append(_Held(weakref.ref(holder), depth))


def holders() -> list[Holder]:
    """Who is registered and alive, in the order in which they rest: the users of a thing before
    the thing, and of one depth the oldest first."""
    with _lock:
        alive = [(each, holder) for each in _holders if (holder := each.ref()) is not None]
        _holders[:] = [each for each, _ in alive]
    return [holder for _, holder in sorted(alive, key=lambda pair: pair[0].depth)]


def unregister(holder: Holder) -> None:
    """Undoes `hold`; also where it was undone before."""
    with _lock:
        _holders[:] = [each for each in _holders if each.ref() not in (None, holder)]


class _Held(NamedTuple):
    ref: weakref.ref[Holder]
    depth: int


_lock = lifecycle.fork_safe_lock(sys.modules[__name__])
_holders: list[_Held] = []


lifecycle.in_child(_holders.clear)
