"""Residency: which bytes of a file the page cache holds, to choose the cheapest I/O mode.

Uses `cachestat`, which takes microseconds, or `mincore` on older kernels and for overlays, where
`cachestat` finds no page: the file below has them. Neither reads from the disk or knows the caches
of other hosts. Both require owning the file or write access: otherwise `cachestat` fails with
EPERM, and `mincore` reports every page as resident. gVisor has no `cachestat`, and its `mincore`
reports every page of every file: there, residency is not available.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from mmap import PAGESIZE

from gdsload._native import system
from gdsload.system.capabilities import CAP_FOWNER, has_capability
from gdsload.system.storage import is_overlay

# A large range is judged by this many samples of this size: to query each page of 15 GB takes
# 0.1 s, longer than mapping them.
SAMPLES = 64
SAMPLE_BYTES = 1 << 20
# A range is mapped if this share of it is warm; the cold pages are faulted in, or read before.
WARM_SHARE = 0.98


def resident_bytes(file: int | str | os.PathLike[str], offset: int = 0, length: int = 0) -> int:
    """Bytes of `file` (descriptor or path) between `offset` and `offset + length` in page cache.

    Counted in whole pages and cut to the range; `length` 0 means up to the end of the file. Raises
    OSError if the file cannot be opened or its residency is not available, PermissionError if it
    belongs to another user.
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
    return min(_resident_pages(file, offset, length) * PAGESIZE, length)


def _resident_pages(fd: int, offset: int, length: int) -> int:
    """By `cachestat`; by `mincore` where that is not allowed, and for files of an overlay."""
    try:
        pages = system.cachestat(fd, offset, length)
        if pages or not is_overlay(fd):
            return pages
        refusal = OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EOPNOTSUPP):
            raise
        refusal = error
    if not _mincore_is_true(fd):
        raise PermissionError(
            errno.EPERM,
            "the kernel reports the page cache of a file only to its owner and to users with"
            " write access: try as one of them, or as root",
        ) from refusal
    return system.mincore_pages(fd, offset, length)


def _mincore_is_true(fd: int) -> bool:
    """Whether mincore reports the true residency of a file to this process: to its owner, to root,
    and to those who may write to it."""
    user = os.geteuid()
    if os.fstat(fd).st_uid == user or _owns_all_files(user):
        return True
    return os.access(f"/proc/self/fd/{fd}", os.W_OK, effective_ids=True)


@cache
def _owns_all_files(_user: int) -> bool:
    """Whether this process has the rights of every owner: uid 0 of a container may not."""
    return has_capability(CAP_FOWNER)


def estimated_bytes(fd: int, offset: int, length: int) -> int:
    """`resident_bytes` of a range; an estimate from sampled pages for a file of another user, and
    where residency is not available.

    A sampled page counts if it can be read without waiting. For one that cannot, the kernel may
    begin to read ahead.
    """
    try:
        return resident_bytes(fd, offset, length)
    except OSError:
        samples = _sample_offsets(offset, length)
        return length * sum(_readable_at_once(fd, at) for at in samples) // len(samples)


def _sample_offsets(offset: int, length: int) -> list[int]:
    """Offsets spread evenly over a range, with its first and last byte."""
    count = min(SAMPLES, -(-length // PAGESIZE))
    step = (length - 1) / max(count - 1, 1)
    return [offset + int(step * number) for number in range(count)]


def _readable_at_once(fd: int, offset: int) -> bool:
    """Whether a byte of a file can be read without waiting; False if the kernel cannot say.

    The call starts to read a cold page. If the page arrives while the call runs, it looks warm. The
    count of blocks that this thread has read shows that it came from the disk.
    """
    before = _blocks_read()
    try:
        found = os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except OSError:
        return False
    return found and _blocks_read() == before


def _blocks_read() -> int:
    """Blocks that this thread had read from disks; 0 on kernels that do not count them."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_inblock


def _samples_readable_at_once(fd: int, offset: int, length: int) -> bool:
    """Whether all sampled pages of a range are; stops at the first that is not."""
    return all(_readable_at_once(fd, at) for at in _sample_offsets(offset, length))


def wholly_resident(fd: int, offset: int, length: int) -> bool:
    """Whether every page that the range touches is in the page cache."""
    first = offset // PAGESIZE * PAGESIZE
    length = offset + length - first
    length = -(-length // PAGESIZE) * PAGESIZE
    try:
        return resident_bytes(fd, first, length) >= length
    except OSError:  # residency is not available: unknown counts as cold
        return False


def has_arrived(fd: int, offset: int, length: int) -> bool:
    """Whether no page of a range is still being read, or could not be read.

    `cachestat` counts such a page as resident, but it may never arrive. A process that maps the
    file and uses the page waits without end, or is killed by SIGBUS. True if this process may only
    sample the file: a sample is of a page that has arrived. False if the kernel cannot tell: before
    6.14 `cachestat` answers to everybody, and `mincore` does not.
    """
    try:
        counted = system.cachestat(fd, offset, length)
    except OSError:
        return True
    try:
        return _mincore_is_true(fd) and system.mincore_pages(fd, offset, length) >= counted
    except OSError:  # it cannot be mapped either
        return False


def is_large(length: int) -> bool:
    """Whether a range of so many bytes is sampled."""
    return length > SAMPLES * SAMPLE_BYTES


def mostly_resident(fd: int, offset: int, length: int) -> bool:
    """Whether nearly all of a range is resident. Large ranges are sampled, small ones are not."""
    if not is_large(length):
        samples, size = [offset], length
    else:
        step = (length - SAMPLE_BYTES) / (SAMPLES - 1)
        samples = [offset + int(step * number) for number in range(SAMPLES)]
        size = SAMPLE_BYTES
    cold, most_cold = 0, (1 - WARM_SHARE) * size * len(samples)
    try:
        for at in samples:
            cold += size - resident_bytes(fd, at, size)
            if cold > most_cold:
                return False
    except PermissionError:  # a file of another user
        return length > 0 and _samples_readable_at_once(fd, offset, length)
    except OSError:  # residency is not available: unknown counts as cold
        return False
    return True


def residency(fd: int, length: int) -> str:
    """Whether "all", "none" or "some" of the first `length` bytes of a file are in the page cache.

    A large file is sampled: "all" and "none" may then be wrong for a few pages. One of another user
    is always sampled, and "some" of it is "none".
    """
    try:
        if is_large(length):
            warm = {resident_bytes(fd, at, 1) for at in _sample_offsets(0, length)}
            return "some" if len(warm) > 1 else "all" if warm.pop() else "none"
        found = resident_bytes(fd, 0, length) if length else 0
    except PermissionError:  # a file of another user
        return "all" if _samples_readable_at_once(fd, 0, length) else "none"
    except OSError:  # residency is not available: unknown counts as cold
        found = 0
    return "some" if 0 < found < length else "all" if found else "none"


def forget(fd: int) -> None:
    """Drops the pages of a file, as far as nobody has mapped them. The kernel keeps pages that it
    failed to read, and counts them as resident: to use one by a mapping ends by SIGBUS."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def resident_share(files: Sequence[tuple[int, int]]) -> float:
    """About which part, 0 to 1, of files (descriptor, size in bytes) is in the page cache.

    Some pages of each are sampled, in the middle of equal parts: the first pages are read with the
    header. What the kernel does not tell counts as absent.
    """
    total = sum(size for _, size in files)
    resident = 0.0
    for fd, size in files:
        count = max(SAMPLES * size // max(total, 1), 1)
        samples = [size * (2 * number + 1) // (2 * count) for number in range(count)]
        resident += size * sum(wholly_resident(fd, at, 1) for at in samples) / count
    return resident / max(total, 1)


def absent_ranges(fd: int, length: int) -> list[tuple[int, int]]:
    """The parts (offset, length) of the first `length` bytes of a file that are not in the page
    cache, in file order, with present bytes between any two of them.

    Raises what `resident_bytes` raises.
    """
    found: list[tuple[int, int]] = []
    for start, nbytes in _absent_halves(fd, 0, length):
        if found and sum(found[-1]) == start:
            found[-1] = found[-1][0], found[-1][1] + nbytes
        else:
            found.append((start, nbytes))
    return found


def _absent_halves(fd: int, offset: int, length: int) -> Iterator[tuple[int, int]]:
    if not length:
        return
    resident = resident_bytes(fd, offset, length)
    if not resident:
        yield offset, length
    elif resident < length:
        half = max(length // 2 // PAGESIZE, 1) * PAGESIZE
        yield from _absent_halves(fd, offset, half)
        yield from _absent_halves(fd, offset + half, length - half)


def evict(path: str | os.PathLike[str]) -> int:
    """Drops a file from the page cache and returns the bytes that are still resident.

    Pages that are dirty, mapped by a process or being read stay, so a benchmark checks the result.
    Raises OSError if the file cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a read-only filesystem has nothing to write back
            os.fsync(fd)
        forget(fd)
        return resident_bytes(fd)
    finally:
        os.close(fd)


def drop_caches() -> bool:
    """Drops the page cache of the whole machine; False if this process may not."""
    try:
        with open("/proc/sys/vm/drop_caches", "w") as knob:
            os.sync()
            knob.write("1\n")
    except OSError:
        return False
    return True
