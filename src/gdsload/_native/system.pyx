"""What the kernel knows of a file: the alignment of direct I/O, its attributes, and its pages in the
page cache, which it reads if it is asked to. And of memory: how much of it is untouched.

Raw system calls, because the supported C libraries are older than these calls.
"""

from libc.errno cimport EINVAL, ENOSYS, EOPNOTSUPP, EPERM, errno
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset
from posix.mman cimport (
    MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, MAP_SHARED, PROT_NONE, PROT_READ, mincore, mmap, munmap
)

import os

from gdsload._native.pages cimport (
    MADV_POPULATE_READ, advise, page_bytes, page_floor, pages_in_cache,
)

cdef extern from "<sys/syscall.h>" nogil:
    enum: SYS_statx

cdef extern from "<sys/vfs.h>" nogil:
    cdef struct statfs:
        long f_type
    int fstatfs(int fd, statfs *found)

cdef extern from "<unistd.h>" nogil:
    long syscall(long number, ...)

cdef enum:
    AT_EMPTY_PATH = 0x1000
    AT_STATX_FORCE_SYNC = 0x2000
    AT_STATX_DONT_SYNC = 0x4000
    STATX_BASIC_STATS = 0x7ff
    STATX_DIOALIGN = 0x2000
    STATX_BYTES = 256
    INODE_AT = 32                # struct statx is kernel ABI: these offsets never change
    DEVICE_AT = 136
    DIO_MEM_ALIGN_AT = 152
    DIO_OFFSET_ALIGN_AT = 156
    # Pages checked by one mincore: 1 MiB of vector, 4 GiB of file where a page is 4 KiB.
    MINCORE_PAGES = 1048576


cdef long ask(int fd, int flags, unsigned int mask, uint8_t *answer) noexcept nogil:
    """Fills the struct statx of an open file: 0, or -1 and errno."""
    cdef const char *itself = b""
    return syscall(SYS_statx, fd, itself, AT_EMPTY_PATH | flags, mask, answer)


def direct_alignment(int fd):
    """Alignment in bytes of (addresses, offsets and lengths) for direct I/O on this file.

    (0, 0) if the filesystem reports that it has none; None if the kernel (before 6.1) or the
    filesystem does not report it.
    """
    cdef uint8_t answer[STATX_BYTES]
    cdef uint32_t mask, memory, offset
    cdef long failed
    memset(answer, 0, STATX_BYTES)
    with nogil:  # the server of a distant filesystem is not asked
        failed = ask(fd, AT_STATX_DONT_SYNC, STATX_DIOALIGN, answer)
    if failed:
        return None
    memcpy(&mask, answer, 4)
    if not mask & STATX_DIOALIGN:
        return None
    memcpy(&memory, answer + DIO_MEM_ALIGN_AT, 4)
    memcpy(&offset, answer + DIO_OFFSET_ALIGN_AT, 4)
    return memory, offset


def filesystem_magic(int fd):
    """The number of the type of the filesystem of an open file, as statfs tells; 0 if it fails."""
    cdef statfs found
    cdef int failed
    with nogil:
        failed = fstatfs(fd, &found)
    return 0 if failed else <uint32_t>found.f_type


def known_identity(int fd):
    """(st_dev, st_ino) of an open file, without a question to the server or the daemon of most
    distant filesystems, which ``fstat`` may ask.

    Kernels before 4.11, and some sandboxes, answer by ``fstat``. Raises OSError.
    """
    cdef uint8_t answer[STATX_BYTES]
    cdef uint64_t inode
    cdef uint32_t[2] device
    cdef long failed
    with nogil:
        failed = ask(fd, AT_STATX_DONT_SYNC, STATX_BASIC_STATS, answer)
    if failed:
        status = os.fstat(fd)
        return status.st_dev, status.st_ino
    memcpy(&inode, answer + INODE_AT, 8)
    memcpy(device, answer + DEVICE_AT, 8)
    return os.makedev(device[0], device[1]), inode


def refresh_attributes(int fd):
    """Asks the server or the daemon of a distant filesystem for the attributes of a file: `fstat`
    may answer from a cache.

    Asks nothing on kernels before 4.11, or if a sandbox forbids it. Raises OSError.
    """
    cdef uint8_t answer[STATX_BYTES]
    cdef long failed
    with nogil:
        failed = ask(fd, AT_STATX_FORCE_SYNC, STATX_BASIC_STATS, answer)
    if failed and errno != ENOSYS and errno != EPERM:
        raise OSError(errno, os.strerror(errno))


def cachestat(int fd, uint64_t offset, uint64_t length):
    """Number of pages of a range of the file in the page cache (kernel 6.5 and later).

    Raises OSError: ENOSYS on older kernels, EPERM if the caller neither owns the file nor may write
    to it.
    """
    cdef int64_t pages
    with nogil:
        pages = pages_in_cache(fd, offset, length)
    if pages < 0:
        raise OSError(errno, os.strerror(errno))
    return pages


cdef int untouched_count = -1    # the answer of `counts_untouched`; -1: it was not asked


cdef int counts_untouched(uint64_t page) noexcept nogil:
    """Whether mincore counts a page that nobody can have touched. The kernel is asked once."""
    global untouched_count
    cdef unsigned char vec = 0
    cdef void *mapped
    if untouched_count < 0:
        mapped = mmap(NULL, page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
        if mapped == MAP_FAILED:
            return 0
        mincore(mapped, page, &vec)
        munmap(mapped, page)
        untouched_count = vec & 1
    return untouched_count


def mincore_pages(int fd, uint64_t offset, uint64_t length):
    """`cachestat` by mincore, through a mapping of the range: for kernels before it.

    Raises OSError: EOPNOTSUPP if mincore counts every mapped page, as in gVisor.
    """
    cdef uint64_t page = page_bytes()
    cdef uint64_t first = page_floor(offset)
    cdef uint64_t end = offset + length
    cdef uint64_t part, i, pages, resident = 0
    cdef unsigned char *vec
    cdef void *mapped
    cdef int failed = 0
    if length == 0:
        return 0
    if counts_untouched(page):
        raise OSError(EOPNOTSUPP, "this kernel counts every mapped page as resident")
    vec = <unsigned char *>malloc(MINCORE_PAGES)
    if vec == NULL:
        raise MemoryError("no memory to query the page cache")
    while first < end and not failed:
        part = min(end - first, <uint64_t>MINCORE_PAGES * page)
        pages = (part + page - 1) // page  # the entries that mincore writes
        with nogil:
            mapped = mmap(NULL, part, PROT_READ, MAP_SHARED, fd, <int64_t>first)
            if mapped == MAP_FAILED:
                failed = errno
            else:
                if mincore(mapped, part, vec) != 0:
                    failed = errno
                else:
                    for i in range(pages):
                        resident += vec[i] & 1
                munmap(mapped, part)
        first += part
    free(vec)
    if failed:
        raise OSError(failed, os.strerror(failed))
    return resident


def populate(int fd, uint64_t offset, uint64_t length):
    """Reads the absent pages of a range of a file into the page cache, through a mapping of its own.

    A kernel before Linux 5.14 reads nothing. Raises OSError if a page cannot be read, or the file
    cannot be mapped.
    """
    cdef uint64_t first = page_floor(offset)
    cdef void *mapped
    cdef int failed = 0
    length += offset - first
    with nogil:
        mapped = mmap(NULL, length, PROT_READ, MAP_SHARED, fd, <int64_t>first)
        if mapped == MAP_FAILED:
            failed = errno
        else:
            if advise(<char *>mapped, length, MADV_POPULATE_READ) != 0 and errno != EINVAL:
                failed = errno
            munmap(mapped, length)
    if failed:
        raise OSError(failed, os.strerror(failed))


def untouched_bytes(uint64_t address, uint64_t length):
    """Bytes of anonymous memory, from the start of a page, that no page of the machine stands for
    yet. 0 if the kernel does not tell, or if the memory is not there, as in a child of a fork."""
    cdef uint64_t page = page_bytes()
    cdef uint64_t end = address + length
    cdef uint64_t part, i, untouched = 0
    cdef unsigned char vec[4096]
    if counts_untouched(page):
        return 0
    with nogil:
        while address < end:
            part = min(end - address, <uint64_t>4096 * page)
            if mincore(<void *>address, part, vec) != 0:
                break
            for i in range((part + page - 1) // page):
                untouched += page * (1 - (vec[i] & 1))
            address += part
    return min(untouched, length)
