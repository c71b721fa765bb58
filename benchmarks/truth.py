"""The checks of a sweep: the content of the file, and the highest rate of its device.

A rate is believed only where the right bytes arrived, where the device's own counter says that it
read them, and where it is no higher than the device's: what it read over the time it was busy, or
what a plain reader gets.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from . import cache, machine
from .records import Refused

PAGE_BYTES = 4096
READER_BYTES, READER_THREADS = 4 << 20, 8
# Less says more of starting threads than of the device: a small file is read again and again.
LEAST_BYTES, MOST_BYTES = 256 << 20, 1 << 30
# Above the best of the plain reader's runs: what one reader may be better than another.
TOLERANCE = 1.25
# Less than what was claimed may the device's counter have grown: it counts whole sectors.
SHORT_SHARE = 0.001


def page_sums(memory: Any) -> Any:
    """The sum of each page taken as 64-bit integers."""
    return memory.view(numpy.uint64).reshape(-1, PAGE_BYTES // 8).sum(axis=1)


class Truth:
    """The page sums of a file, read once the ordinary way; its pages are put out of the cache."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size // PAGE_BYTES * PAGE_BYTES
        if not self.size:
            raise Refused(f"{path}: {PAGE_BYTES} bytes are the least that a sweep reads")
        try:
            self.sums = numpy.concatenate(list(self._read()))
        except OSError as error:
            raise Refused(f"{path}: {error.strerror}") from error

    def _read(self) -> Iterator[Any]:
        step = bytearray(READER_BYTES)
        with self.path.open("rb", buffering=0) as opened:
            left = self.size
            while left:
                part = memoryview(step)[: min(left, len(step))]
                got = opened.readinto(part) or 0
                whole = got // PAGE_BYTES * PAGE_BYTES
                if not whole:
                    raise Refused(f"{self.path}: it ended while it was read")
                opened.seek(whole - got, os.SEEK_CUR)
                yield page_sums(numpy.frombuffer(part[:whole], numpy.uint8))
                left -= whole

    def evict(self) -> None:
        """Raises Refused where the file's pages stay in the page cache."""
        cache.require_cold_can_be([self.path])
        left = cache.evict([self.path])
        if left:
            raise Refused(f"{self.path}: {left:,} bytes of it stay in the page cache")

    def check(self, offset: int, memory: Any) -> None:
        """Raises Refused for memory that does not hold what the file has there."""
        first = offset // PAGE_BYTES
        found = page_sums(memory)
        wrong = numpy.flatnonzero(found != self.sums[first : first + len(found)])
        if len(wrong):
            at = offset + int(wrong[0]) * PAGE_BYTES
            raise Refused(
                f"{self.path}: {len(wrong)} pages did not arrive as they are in the file, the first"
                f" at byte {at:,}: what was measured was not a read of them"
            )


class Counted(NamedTuple):
    """What a device has read, and how long it was busy, since the machine started."""

    nbytes: int
    busy_seconds: float


class Device:
    """The storage below a file: its own account of its reads, and the rate of a plain reader."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.key = machine.diskstats_key(path)
        self.counter = "the device" if self.key else "the kernel"
        self.limits: list[float] = []

    def counted(self) -> Counted | None:
        """The account as it stands; of a device that has none (as below an overlay) the kernel's
        account of this process, and None where there is not even that."""
        if self.key is None:
            own = machine.own_read_bytes()
            return None if own is None else Counted(own, 0.0)
        return Counted(machine.disk_reads()[self.key], machine.disk_busy_seconds()[self.key])

    def require_read(self, before: Counted | None, claimed: int, what: str) -> Counted | None:
        """What it did since `before`. Raises Refused where it read less than was claimed."""
        now = self.counted()
        if now is None or before is None:
            return None
        did = Counted(now.nbytes - before.nbytes, now.busy_seconds - before.busy_seconds)
        if did.nbytes < claimed * (1 - SHORT_SHARE):
            raise Refused(
                f"{what}: {claimed:,} bytes were reported as read, but {self.counter} counted"
                f" {did.nbytes:,}: the rest came from somewhere else{cache.holes([self.path])}"
            )
        return did

    @property
    def limit(self) -> float:
        """Bytes per second of the best of the plain reader's runs so far."""
        return max(self.limits)

    def measure(self) -> float:
        """Reads the file once more by plain direct reads from several threads into memory that is
        touched already. Raises Refused where the file does no direct I/O."""
        size = min(self.path.stat().st_size, MOST_BYTES) // PAGE_BYTES * PAGE_BYTES
        times = max(LEAST_BYTES // size, 1)
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            raise Refused(
                f"{self.path}: its filesystem does no direct I/O: {error.strerror}"
            ) from error
        offsets = iter([*range(0, size, READER_BYTES)] * times)
        lock = threading.Lock()
        errors: list[OSError] = []
        threads = [
            threading.Thread(target=_reader, args=(fd, size, offsets, lock, errors))
            for _ in range(READER_THREADS)
        ]
        before, began = self.counted(), time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took = time.perf_counter() - began
        os.close(fd)
        if errors:
            raise Refused(f"{self.path}: the plain reader failed: {errors[0]}")
        self.require_read(before, size * times, "the plain reader")
        self.limits.append(size * times / took)
        return self.limits[-1]

    def require_possible(self, rate: float, did: Counted | None, what: str) -> None:
        """Raises Refused for a rate above the device's own.

        That is what it read over the time that it was busy with it, or what a plain reader gets:
        a disk that is throttled by the minute may be faster now than it was then, and its account
        of busy time is too coarse for small reads.
        """
        own = did.nbytes / did.busy_seconds if did is not None and did.busy_seconds else 0.0
        possible = max(own, self.limit)
        if rate > TOLERANCE * possible:
            raise Refused(
                f"{what}: {rate / 1e9:.2f} GB/s, where the device itself gave"
                f" {own / 1e9:.2f} and a plain reader got {self.limit / 1e9:.2f}: this is no rate"
                " of this device"
            )


def _reader(fd: int, size: int, offsets: Any, lock: Any, errors: list[OSError]) -> None:
    with mmap.mmap(-1, READER_BYTES) as memory:
        memory[:] = bytes(READER_BYTES)
        while True:
            with lock:
                offset = next(offsets, None)
            if offset is None:
                return
            try:
                with memoryview(memory)[: min(READER_BYTES, size - offset)] as part:
                    os.preadv(fd, [part], offset)
            except OSError as error:
                errors.append(error)
                return
