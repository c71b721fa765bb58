"""Reads the pages of a private mapping into the page cache, without a copy.

The page cache holds a file in folios. Small ones are slow on a virtual disk, whose host maps each of
them separately, and cost more to allocate and to map. A huge one can cost milliseconds where a
hypervisor must find the memory. The kernel's own read-ahead makes folios in between: it follows who
reads a file in order, and each window that it reads has folios four times the size of those of the
window before. But it follows one reader per open file. So each read here opens the file again, and
the folios begin small:

    leave a mark ─► open again, map the range ─► populate (the read-ahead of this reader)
                 ─► populate the mapping of the load ─► touch it

The kernel marks one page of each window. When this page is read, it reads the next window ahead. A
reader that finds its first page missing begins with folios of one page, and half of its window lies
before that page. A reader that finds a marked page reads ahead from there, in folios of four pages.

In a virtual machine, the first access of the processor to a page that a disk has written takes a
fault of the hypervisor, which can cost as much as reading it. So the threads that read touch each
page, while the disk works for others. The kernel does it for them, by a write that copies a byte of
each page to a file in memory: a page that is gone, since the file was truncated, is an error of the
write, and not a signal that ends the process.

Reads of several windows each, at different places of the file, are the fastest
(`system.storage.fill_request_bytes`). Filesystems without large folios take the same way with small ones.
Not responsible for: choosing between this and direct reads (`loading.io_mode`).
"""

from libc.errno cimport errno
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdio cimport snprintf
from posix.fcntl cimport O_NOCTTY, O_NONBLOCK, O_RDONLY, POSIX_FADV_WILLNEED, open, posix_fadvise
from posix.mman cimport MAP_FAILED, MAP_PRIVATE, PROT_READ, madvise, mmap, munmap
from posix.uio cimport iovec, pwritev
from posix.unistd cimport close, pread

from gdsload._native.atomics cimport gds_load
from gdsload._native.engine cimport Read
from gdsload._native.memory cimport UNIT_BYTES
from gdsload._native.pages cimport page_bytes, page_floor
from gdsload._native.pthreads cimport monotonic_ns

cdef extern from "<fcntl.h>" nogil:
    int O_CLOEXEC

cdef extern from "<sys/mman.h>" nogil:
    int MADV_DONTFORK

cdef extern from "<sys/syscall.h>" nogil:
    long SYS_memfd_create

cdef extern from "<unistd.h>" nogil:
    long syscall(long number, ...)

cdef enum:
    MFD_CLOEXEC = 1
    TOUCHED_PAGES = 512          # by one write; at most 1024
    MADV_POPULATE_READ = 22      # of Linux 5.14 and newer
    COPY_BYTES = 65536           # on the stack of a worker
    # A read that takes longer ends short, and the pump continues it: a slow disk is no stalled one.
    MOST_NS = 1000000000

# The range of a read in a mapping of its own, whose read-ahead is of this reader alone.
cdef struct Window:
    char *base                   # NULL: none
    uint64_t length
    uint64_t offset              # of `base` in the file


cdef int open_again(const Read *read) noexcept nogil:
    """The file of a read with a read-ahead of its own, or -1."""
    cdef char[32] name
    snprintf(name, sizeof(name), b"/proc/self/fd/%d", read.fd)
    return open(name, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY)


cdef void leave_mark(const Read *read) noexcept nogil:
    """Reads the first two pages of a range: the kernel reads a few more and marks one of them."""
    cdef char first, second
    cdef int fd
    fd = open_again(read) if read.length >= UNIT_BYTES else -1
    if fd < 0:
        return
    if pread(fd, &first, 1, <int64_t>read.offset) == 1:
        pread(fd, &second, 1, <int64_t>(read.offset + page_bytes()))
    close(fd)


cdef Window open_window(const Read *read) noexcept nogil:
    """Without /proc or memory there is none: the mapping of the load is populated alone then."""
    cdef Window window
    cdef char *mapped
    cdef int fd
    window.base = NULL
    leave_mark(read)
    fd = open_again(read)
    if fd < 0:
        return window
    window.offset = <uint64_t>page_floor(<uintptr_t>read.offset)
    window.length = read.offset + read.length - window.offset
    mapped = <char *>mmap(
        NULL, window.length, PROT_READ, MAP_PRIVATE, fd, <int64_t>window.offset
    )
    close(fd)  # the mapping keeps the open file
    if mapped != MAP_FAILED:
        window.base = mapped
        madvise(mapped, window.length, MADV_DONTFORK)
    return window


cdef int populate(char *address, uint64_t length) noexcept nogil:
    """Makes a range of a mapping present: 0, or -1 if a page cannot be read, or the kernel is old."""
    cdef char *start = <char *>page_floor(<uintptr_t>address)
    return madvise(start, address + length - start, MADV_POPULATE_READ)


cdef void touch(int sink, char *address, uint64_t length) noexcept nogil:
    """Makes the kernel read the first byte of each page of a range that is present.

    ``sink``: a file in memory, or -1: nothing is touched.
    """
    cdef iovec[TOUCHED_PAGES] firsts
    cdef char *end = address + length
    cdef int count
    while sink >= 0 and address < end:
        count = 0
        while count < TOUCHED_PAGES and address < end:
            firsts[count].iov_base = address
            firsts[count].iov_len = 1
            count += 1
            address = <char *>page_floor(<uintptr_t>address) + page_bytes()
        if pwritev(sink, firsts, count, 0) < 0:
            return  # what is wrong with a page is found where it is read


cdef int64_t read_unit(
    const Read *read, const Window *window, int sink, uint64_t done, uint64_t length
) noexcept nogil:
    """Reads part of a unit into the page cache, and maps it: bytes, or -errno if nothing was read.

    The error of a page that cannot be read is that of a ``pread``, which also does the work of
    kernels without MADV_POPULATE_READ.
    """
    cdef char[COPY_BYTES] copy
    cdef uint64_t offset = read.offset + done, copied = 0
    cdef int64_t got
    if window.base != NULL:
        populate(window.base + (offset - window.offset), length)
    else:  # page faults would read page by page, or far more than the unit
        posix_fadvise(read.fd, <int64_t>offset, <int64_t>length, POSIX_FADV_WILLNEED)
    if populate(read.address + done, length) == 0:
        touch(sink, read.address + done, length)
        return <int64_t>length
    while copied < length:
        got = pread(
            read.fd, copy, min(length - copied, <uint64_t>COPY_BYTES), <int64_t>(offset + copied)
        )
        if got < 0 and copied == 0:
            return -errno
        if got <= 0:
            break
        copied += <uint64_t>got
    return <int64_t>copied


cdef int64_t read_mapped(const Read *read, int64_t *cancelled, int64_t cancels) noexcept nogil:
    """Reads the pages of a mapping: bytes, or -errno if nothing was read.

    ``cancelled``: the number of cancellations, and ``cancels`` what it was before the read. After
    another one no further unit is read.
    """
    cdef Window window = open_window(read)
    cdef int sink = <int>syscall(SYS_memfd_create, <char *>b"gdsload-touch", MFD_CLOEXEC)
    cdef int64_t until = monotonic_ns() + MOST_NS, got = 0
    cdef uint64_t done = 0, length
    while done < read.length:
        length = min(UNIT_BYTES - (read.offset + done) % UNIT_BYTES, read.length - done)
        got = read_unit(read, &window, sink, done, length)
        if got <= 0:
            break
        done += <uint64_t>got
        # Short: the pump reads the rest, or meets the end of the file.
        if (
            <uint64_t>got < length
            or gds_load(cancelled) != cancels
            or monotonic_ns() > until
        ):
            break
    if window.base != NULL:
        munmap(window.base, window.length)
    if sink >= 0:
        close(sink)
    return <int64_t>done if done else got
