"""One file of the local cache: its bytes, and a list of the ranges that are there.

    <name>    the bytes at their offsets; sparse until all are there
    pieces    JSON of the version, then a line for each event, only ever appended to:
              START END CHECKSUM                these bytes were written
              START END -                       they differ from their checksum
              sealed INODE SIZE MTIME CTIME     all bytes are there, compared, and on the disk

A line is written after its bytes, so that a process may be killed at any time. What a crash of the
system leaves behind, is compared before it is used. A flush that fails empties `pieces`. Processes
share an entry by locks that the kernel releases when they end:

    flock on the bytes                shared by all users; exclusive to remove the entry
    range lock on `pieces`, WRITERS   shared by those who may write; alone for `seal`
    range lock on `pieces`, others    a range of bytes that a process is fetching

Not responsible for choosing what is removed (`cache`).
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
import weakref
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any, NamedTuple

from gdsload.system.lifecycle import fork_safe_lock, in_child
from gdsload.system.parallel import in_thread, parallel_map
from gdsload.system.stall import STALL_SECONDS

# Pieces end at multiples of it: so much is read to compare a part of it with its checksum.
BLOCK_BYTES = 4 << 20
# Bytes per second. A flush shows no progress: one that is as fast as that has not stalled.
_SLOWEST_FLUSH = 20_000_000
_WRITERS = 1 << 62  # no file has this byte
_LOCK = "hhqqi0q"  # the members of fcntl's structure
_EVENT = re.compile(
    rb"^(?:(\d{1,18}) (\d{1,18}) ([0-9a-f]{32}|-)"
    rb"|sealed (\d{1,20}) (\d{1,20}) (\d{1,20}) (\d{1,20}))$",
    re.MULTILINE,
)
_DROPPED = "-"


_entries: weakref.WeakSet[Entry] = weakref.WeakSet()


class CachedRange(NamedTuple):
    """Bytes `start` to `end` of the file, within one block, and their checksum."""

    start: int
    end: int
    checksum: str


class Entry:
    """The open files of one entry. They are closed with the last reference to it.

    Attributes:
        path: The path of the bytes.
        size: The size of the file in bytes.
    """

    def __init__(
        self, path: str, size: int, data_fd: int, events_fd: int, hasher: Callable[[], Any]
    ) -> None:
        """Owns the descriptors from now on. `hasher` makes an object as those of hashlib."""
        self._data_fd, self._events_fd = data_fd, events_fd
        self.path, self.size, self.hasher = path, size, hasher
        self._lock = fork_safe_lock(self)
        self._parsed_bytes = 0
        self._ranges: dict[int, list[CachedRange]] = {}  # by block
        self._compared: set[CachedRange] = set()
        self._seal: tuple[int, ...] = ()
        mode = fcntl.fcntl(events_fd, fcntl.F_GETFL) & os.O_ACCMODE
        self.writable = mode != os.O_RDONLY and self._range_lock(fcntl.F_RDLCK, _WRITERS, 1)
        self._refresh()
        _entries.add(self)

    def forget(self) -> None:
        """In a child of fork(): leaves the locks to the parent. No byte is there any more."""
        self.writable = False
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in (self._data_fd, self._events_fd):
            os.dup2(null, fd, inheritable=False)  # closed by `__del__`
        os.close(null)

    def __del__(self, _close: Callable[[int], None] = os.close) -> None:
        _close(self._data_fd)
        _close(self._events_fd)

    # --- which bytes are there ---------------------------------------------------------------

    def _refresh(self) -> None:
        """Reads the lines that were appended since the last call, by any process."""
        with self._lock, suppress(OSError):  # then what is not known is fetched
            size = os.fstat(self._events_fd).st_size
            raw = os.pread(self._events_fd, max(size - self._parsed_bytes, 0), self._parsed_bytes)
            raw = raw[: raw.rfind(b"\n") + 1]  # the last line may be half written
            self._parsed_bytes += len(raw)
            for start, end, checksum, *seal in _EVENT.findall(raw):
                if checksum:
                    self._note(CachedRange(int(start), int(end), checksum.decode()))
                else:
                    self._seal = tuple(map(int, seal))

    def _note(self, cached: CachedRange) -> None:
        block, in_block = divmod(cached.start, BLOCK_BYTES)
        length = cached.end - cached.start
        if cached.end > self.size or not 0 < length <= BLOCK_BYTES - in_block:
            return  # a damaged line
        known = self._ranges.setdefault(block, [])
        known[:] = [each for each in known if each[:2] != cached[:2]]
        if cached.checksum != _DROPPED:
            known.append(cached)

    def range_at(self, offset: int) -> CachedRange | None:
        """The range with this byte that reaches furthest, None if the byte is not there."""
        for refreshed in (False, True):
            if refreshed:
                self._refresh()
            with self._lock:
                found = [
                    cached
                    for cached in self._ranges.get(offset // BLOCK_BYTES, ())
                    if cached.start <= offset < cached.end
                ]
            if found:
                return max(found, key=lambda cached: cached.end)
        return None

    def gap_end(self, offset: int, end: int) -> int:
        """Where the bytes end that are not there, from `offset`, which is not there, to `end`."""
        with self._lock:
            for block in range(offset // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
                starts = [cached.start for cached in self._ranges.get(block, ())]
                if starts := [start for start in starts if offset < start < end]:
                    return min(starts)
        return end

    def is_whole(self) -> bool:
        """Whether all bytes are there."""
        self._refresh()
        end = 0
        for cached in self._all_ranges():
            if cached.start > end:
                break
            end = max(end, cached.end)
        return end == self.size

    def uncompared(self) -> list[CachedRange]:
        """The ranges that this object has neither written nor compared with their checksums."""
        with self._lock:
            return [cached for cached in self._all_ranges() if cached not in self._compared]

    def _all_ranges(self) -> list[CachedRange]:
        """All ranges in the order of their bytes."""
        with self._lock:
            return sorted(cached for each in self._ranges.values() for cached in each)

    # --- bytes -------------------------------------------------------------------------------

    def read(self, cached: CachedRange) -> bytes | None:
        """The bytes of a range; None if they differ from their checksum, or cannot be read. Then
        they count as not there."""
        try:
            data = os.pread(self._data_fd, cached.end - cached.start, cached.start)
        except OSError:
            data = b""
        digest = self.hasher()
        digest.update(data)
        if len(data) == cached.end - cached.start and digest.hexdigest() == cached.checksum:
            self._compared.add(cached)
            return data
        dropped = cached._replace(checksum=_DROPPED)
        with self._lock:
            self._note(dropped)
        if self.writable:
            with suppress(OSError):
                self._append("{} {} {}", *dropped)
        return None

    def write(self, offset: int, data: memoryview) -> None:
        """Writes bytes at `offset`; `record` then says that they are there. Raises OSError."""
        while data:
            written = os.pwrite(self._data_fd, data, offset)
            offset += written
            data = data[written:]

    def record(self, start: int, end: int, checksum: str) -> None:
        """Says that these bytes, of one block, were written. Raises OSError."""
        self._append("{} {} {}", start, end, checksum)
        with self._lock:
            self._note(cached := CachedRange(start, end, checksum))
            self._compared.add(cached)

    def _append(self, form: str, *values: object) -> None:
        # The first line break ends a line that a full disk cut off.
        os.write(self._events_fd, f"\n{form.format(*values)}\n".encode())

    # --- whole files -------------------------------------------------------------------------

    def is_sealed(self) -> bool:
        """Whether all bytes are there and the file was not written to since they were compared."""
        return bool(self._seal) and self._seal == _identity(self._data_fd)

    def seal(self) -> bool:
        """Makes sure that all bytes, which are there, are right and on the disk, and says so.

        Returns whether they are; False also while others may write. Raises OSError if the disk has
        lost any or does not answer (StallError), and LoadCancelled.
        """
        if not (
            self._range_lock(fcntl.F_WRLCK, _WRITERS, 1) if self.writable else self._unwritten()
        ):
            return False
        try:
            before = _identity(self._data_fd)
            if not self._compare(self.uncompared()) or _identity(self._data_fd) != before:
                return False
            if self.writable:
                seconds = STALL_SECONDS + self.size // _SLOWEST_FLUSH
                # A thread that hangs keeps the entry, and so its descriptors open.
                in_thread(self._sync, self.path, stall_seconds=seconds)
                self._append("sealed {} {} {} {}", *before)
            self._seal = before
        finally:
            if self.writable:
                self._range_lock(fcntl.F_RDLCK, _WRITERS, 1)
        return True

    def _sync(self) -> None:
        """Flushes the bytes to the disk. If that fails, no bytes count as there. Raises OSError."""
        try:
            os.fdatasync(self._data_fd)
        except OSError:
            # The kernel tells of a failed write once, and the bytes are still right in the page
            # cache: the next comparison and the next flush would find nothing wrong.
            with self._lock:
                self._ranges.clear()
            with suppress(OSError):
                os.ftruncate(self._events_fd, 0)
            raise

    def _compare(self, ranges: list[CachedRange]) -> bool:
        """Whether all are as their checksums say. Those that differ count as not there."""
        found = parallel_map(
            lambda cached: self.read(cached) is not None, ranges, path_of=lambda _: self.path
        )
        with closing(found):
            return all(list(found))  # each of them, so that all that differ are dropped

    def reader(self) -> int:
        """A descriptor for reading alone, which the caller closes. As long as it is open, the entry
        is not removed. Raises OSError."""
        fd = os.open(f"/proc/self/fd/{self._data_fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        return fd

    # --- locks -------------------------------------------------------------------------------

    def claim(self, start: int, end: int) -> bool:
        """Whether this process may fetch these bytes: no other one is doing so. Then `unclaim`."""
        return self._range_lock(fcntl.F_WRLCK, start, end - start)

    def unclaim(self, start: int, end: int) -> None:
        """Ends `claim`."""
        self._range_lock(fcntl.F_UNLCK, start, end - start)

    def _range_lock(self, kind: int, start: int, length: int) -> bool:
        """Whether a lock was taken. It belongs to the open file, not to the process: two loads of
        one process exclude each other, too. Raises OSError if the filesystem has no locks."""
        try:
            fcntl.fcntl(self._events_fd, fcntl.F_OFD_SETLK, _lock_of(kind, start, length))
        except (BlockingIOError, PermissionError):  # another one has it
            return False
        return True

    def _unwritten(self) -> bool:
        """Whether nobody may write, for a process that may not do so itself. Raises OSError as
        `_range_lock` does."""
        asked = _lock_of(fcntl.F_WRLCK, _WRITERS, 1)
        found = fcntl.fcntl(self._events_fd, fcntl.F_OFD_GETLK, asked)
        return bool(struct.unpack(_LOCK, found)[0] != fcntl.F_RDLCK)  # `seal` has another kind


def _forget_all() -> None:
    for entry in list(_entries):
        with suppress(OSError):  # no descriptor is left
            entry.forget()
    _entries.clear()


in_child(_forget_all)


def _lock_of(kind: int, start: int, length: int) -> bytes:
    """The C structure of a lock."""
    return struct.pack(_LOCK, kind, os.SEEK_SET, start, length, 0)


def _identity(fd: int) -> tuple[int, ...]:
    status = os.fstat(fd)
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
