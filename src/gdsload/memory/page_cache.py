"""Residency: which bytes of a file the page cache holds, to choose the cheapest I/O mode.

Uses `cachestat`, which takes microseconds, or `mincore` on older kernels. Neither reads from the
disk or knows the caches of other hosts. Both require owning the file or write access: otherwise
`cachestat` fails with EPERM, and `mincore` reports every page as resident.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from mmap import PAGESIZE

from gdsload._native import system

# A large range is judged by this many samples of this size: asking about each page of 15 GB takes
# 0.1 s, longer than mapping them.
SAMPLES = 64
SAMPLE_BYTES = 1 << 20
# What is warm but for a few pages is mapped all the same, and they are faulted in.
WARM_SHARE = 0.98


def resident_bytes(file: int | str | os.PathLike[str], offset: int = 0, length: int = 0) -> int:
    """Bytes of `file` (descriptor or path) between `offset` and `offset + length` in page cache.

    Counted in whole pages and cut to the range; `length` 0 means up to the end of the file. Raises
    OSError where the file cannot be opened or asked about, PermissionError where it is somebody
    else's.
    """
    if not isinstance(file, int):
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return resident_bytes(fd, offset, length)
        finally:
            os.close(fd)
    length = length or os.fstat(file).st_size - offset
    if length <= 0:
        return 0
    try:
        pages = system.cachestat(file, offset, length)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EOPNOTSUPP):
            raise
        if not _is_told(file, root=error.errno == errno.ENOSYS and os.geteuid() == 0):
            raise PermissionError(
                errno.EPERM,
                "the kernel reports the page cache of a file only to its owner and to users with"
                " write access",
            ) from error
        pages = system.mincore_pages(file, offset, length)
    return min(pages * PAGESIZE, length)


def _is_told(fd: int, *, root: bool) -> bool:
    """Whether mincore tells this process the truth of a file. `root`: by its rights alone."""
    if root or os.fstat(fd).st_uid == os.geteuid():
        return True
    return os.access(f"/proc/self/fd/{fd}", os.W_OK, effective_ids=True)


def estimated_bytes(fd: int, offset: int, length: int) -> int:
    """The same as `resident_bytes` of a range; of somebody else's file an estimate, by pages of it
    that can be read without waiting. Where one cannot, the kernel may begin to read ahead there."""
    try:
        return resident_bytes(fd, offset, length)
    except PermissionError:
        views = _spots(offset, length)
        return length * sum(_answers(fd, view) for view in views) // len(views)


def _spots(offset: int, length: int) -> list[int]:
    """Places all over a range, its ends among them."""
    number = min(SAMPLES, -(-length // PAGESIZE))
    step = (length - 1) / max(number - 1, 1)
    return [offset + int(step * place) for place in range(number)]


def _answers(fd: int, view: int) -> bool:
    """Whether a byte of a file is there at once; no is also said where that cannot be asked."""
    try:
        return os.preadv(fd, [bytearray(1)], view, os.RWF_NOWAIT) == 1
    except OSError:
        return False


def wholly_resident(fd: int, offset: int, length: int) -> bool:
    """Whether every page that the range touches is in the page cache."""
    first = offset // PAGESIZE * PAGESIZE
    length = offset + length - first
    length = -(-length // PAGESIZE) * PAGESIZE
    try:
        return resident_bytes(fd, first, length) >= length
    except OSError:  # a filesystem that cannot be asked: what is not known to be warm is cold
        return False


def mostly_resident(fd: int, offset: int, length: int) -> bool:
    """Whether a range is warm: all of its samples nearly so. A small range is asked about whole."""
    if length <= SAMPLES * SAMPLE_BYTES:
        views, size = [offset], length
    else:
        step = (length - SAMPLE_BYTES) / (SAMPLES - 1)
        views = [offset + int(step * number) for number in range(SAMPLES)]
        size = SAMPLE_BYTES
    found = 0
    try:
        for number, view in enumerate(views, start=1):
            found += resident_bytes(fd, view, size)
            if found < WARM_SHARE * size * number - size:  # cold for certain: no need to go on
                return False
    except PermissionError:  # of somebody else's file the first cold page is the last that is tried
        return length > 0 and all(_answers(fd, view) for view in _spots(offset, length))
    except OSError:  # a filesystem that cannot be asked: what is not known to be warm is cold
        return False
    return found >= WARM_SHARE * size * len(views)


def residency(fd: int, length: int) -> str:
    """Whether "all", "none" or "some" of the first `length` bytes of a file are in the page cache.

    A large file is sampled: "all" and "none" may then be wrong for a few pages.
    """
    if length > SAMPLES * SAMPLE_BYTES:
        warm = {wholly_resident(fd, view, 1) for view in _spots(0, length)}
        return "some" if len(warm) > 1 else "all" if warm.pop() else "none"
    try:
        found = resident_bytes(fd, 0, length) if length else 0
    except OSError:  # a filesystem that cannot be asked: what is not known to be warm is cold
        found = 0
    return "some" if 0 < found < length else "all" if found else "none"


def absent_ranges(fd: int, offset: int, length: int) -> Iterator[tuple[int, int]]:
    """The parts (offset, length) of a range that are not in the page cache, in file order.

    `offset` is a multiple of the page size. Raises what `resident_bytes` raises.
    """
    if not length:
        return
    resident = resident_bytes(fd, offset, length)
    if not resident:
        yield offset, length
    elif resident < length:
        half = max(length // 2 // PAGESIZE, 1) * PAGESIZE
        yield from absent_ranges(fd, offset, half)
        yield from absent_ranges(fd, offset + half, length - half)


def evict(path: str | os.PathLike[str]) -> int:
    """Asks the kernel to forget a file's pages: how many bytes are resident afterwards.

    Pages that are dirty, mapped by a process or being read stay; a benchmark has to look at the
    answer. Raises OSError where the file cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a read-only filesystem has nothing to write back
            os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return resident_bytes(fd)
    finally:
        os.close(fd)


def drop_caches() -> bool:
    """Drops the page cache of the whole machine; False where this process may not."""
    try:
        with open("/proc/sys/vm/drop_caches", "w") as knob:
            os.sync()
            knob.write("1\n")
    except OSError:
        return False
    return True
