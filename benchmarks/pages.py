"""States of free memory: how a process makes one before its load, and the cost of a first touch.

huge   memory touched as huge pages, and freed
small  memory touched as pages of 4 KiB, and freed
idle   as small, and then left alone: a host with free page reporting takes memory back
none   memory as it was found
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

STATES = ("huge", "small", "idle", "none")
UNIT_BYTES, PAGE_BYTES = 2 << 20, 4 << 10
UNITS = 512  # measured at most: 1 GiB of each kind


class Memory(NamedTuple):
    """A state of free memory."""

    state: str = "none"
    prepare_bytes: int = 0
    idle_seconds: float = 0.0

    def touch(self) -> None:
        """Touches memory as this state wants it, by all CPUs, and frees it."""
        if self.prepare_bytes:
            import numpy

            memory = fresh(self.prepare_bytes, huge=self.state == "huge")
            with ThreadPoolExecutor() as threads:
                list(threads.map(touch, numpy.array_split(memory, os.cpu_count() or 1)))

    def wait(self) -> None:
        time.sleep(self.idle_seconds)


def touch(array: Any) -> None:
    """Writes to each page of an array of bytes."""
    array[::PAGE_BYTES] = 1


def fresh(nbytes: int, *, huge: bool) -> Any:
    """An array over memory that nothing has touched, aligned to 2 MiB."""
    import numpy

    memory = mmap.mmap(-1, nbytes + UNIT_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    array = numpy.frombuffer(memory, numpy.uint8)
    first = -array.ctypes.data % UNIT_BYTES
    return array[first : first + nbytes]


def costs(memory: Memory, nbytes: int) -> dict[str, float]:
    """Seconds of the first touch of a unit of 2 MiB in this state, as a huge page and as 512 small
    pages: means over `nbytes` of memory of each kind, 1 GiB at most."""
    units = min(nbytes // UNIT_BYTES + 1, UNITS)
    memory.touch()
    memory.wait()
    found, held = {}, []
    for kind in ("huge", "small"):
        array = fresh(units * UNIT_BYTES, huge=kind == "huge")
        began = time.perf_counter()
        touch(array)
        found[kind] = (time.perf_counter() - began) / units
        held.append(array)
    return found
