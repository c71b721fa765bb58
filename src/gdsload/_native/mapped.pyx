"""Reads the pages of a private mapping into the page cache, without a copy.

The page cache holds a file in folios: 4 KiB each, or up to a huge page on filesystems that have
large folios (XFS, ext4 of Linux 6.16). Huge ones make a cold load as fast as direct reads: there is
one to allocate and to map for 512 small ones, and unlike anonymous memory it is not cleared first.
As anonymous huge pages they can cost milliseconds each where a hypervisor must find the memory: so
their CPU time is measured, and small folios are used while huge ones are expensive. Loads of one file
in several processes share the folios and their costs, so that none of them measures these: they use
small ones. For each unit of 2 MiB:

    huge     advise MADV_HUGEPAGE ─► populate: one fault, one folio
    small    ask the kernel to read the unit ─► populate

Not responsible for: choosing between this and direct reads (`loading.io_mode`).
"""

from libc.errno cimport errno
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from posix.fcntl cimport F_UNLCK, F_WRLCK, POSIX_FADV_WILLNEED, fcntl, flock, posix_fadvise
from posix.mman cimport MADV_HUGEPAGE, madvise
from posix.unistd cimport SEEK_SET, getpid, pread

from gdsload._native.atomics cimport gds_load
from gdsload._native.engine cimport Read
from gdsload._native.first_touch cimport AUTO, FirstTouch, chosen_huge, cpu_ns, huge_took
from gdsload._native.memory cimport UNIT_BYTES
from gdsload._native.pages cimport page_bytes, page_floor

cdef extern from "<sys/uio.h>" nogil:
    cdef struct iovec:
        void *iov_base
        size_t iov_len
    ssize_t process_vm_readv(
        int pid, const iovec *local, unsigned long count, const iovec *remote,
        unsigned long pages, unsigned long flags,
    )

cdef extern from "<fcntl.h>" nogil:
    int F_OFD_GETLK

# The byte of a file that each load of it holds a shared lock on (`system.load_locks`): far behind its
# end, and no program locks bytes there for another reason.
LOAD_LOCK_OFFSET = (1 << 62) + 0x676473
cdef int64_t _lock_offset = LOAD_LOCK_OFFSET

cdef enum:
    MADV_POPULATE_READ = 22      # of Linux 5.14 and newer
    COPY_BYTES = 65536           # on the stack of a worker
    SAMPLE_BYTES = 262144
    MOST_PAGES = 256             # touched by one call
    SLOW_PAGE_NS = 3000          # an access to a page that the machine has costs a tenth of this


cdef void touch_pages(char *address, uint64_t length, uint64_t step) noexcept nogil:
    """Reads a byte of every ``step`` bytes. The kernel does it: an access by this thread would be
    SIGBUS if the file has been truncated; and a ``pread`` would make the kernel read ahead."""
    cdef char[MOST_PAGES] copy
    cdef iovec[MOST_PAGES] pages
    cdef iovec to
    cdef uint64_t at = 0
    cdef int count
    while at < length:
        count = 0
        while count < MOST_PAGES and at < length:
            pages[count].iov_base = address + at
            pages[count].iov_len = 1
            count += 1
            at += step
        to.iov_base, to.iov_len = copy, count
        process_vm_readv(getpid(), &to, 1, pages, count, 0)


cdef void back_pages(char *address, uint64_t length) noexcept nogil:
    """Makes a hypervisor back the pages that a disk has written to.

    It does so when a processor accesses them first, one by one: here, several threads do it.
    """
    cdef int64_t took = cpu_ns()
    cdef uint64_t samples = (length + SAMPLE_BYTES - 1) // SAMPLE_BYTES
    touch_pages(address, length, SAMPLE_BYTES)
    if cpu_ns() - took > <int64_t>samples * SLOW_PAGE_NS:
        touch_pages(address, length, page_bytes())


cdef int64_t populate(
    int fd, char *address, uint64_t length, uint64_t offset, int huge
) noexcept nogil:
    """Reads part of a unit into the page cache, and maps it: bytes, or -errno if nothing was read.

    The error of a page that cannot be read is that of a ``pread``, which also does the work of
    kernels without MADV_POPULATE_READ.
    """
    cdef char[COPY_BYTES] copy
    cdef char *start = <char *>page_floor(<uintptr_t>address)
    cdef uint64_t done = 0
    cdef int64_t got
    if huge:
        madvise(address, length, MADV_HUGEPAGE)
    else:  # without it, page faults would read page by page, or far more than the unit
        posix_fadvise(fd, <int64_t>offset, <int64_t>length, POSIX_FADV_WILLNEED)
    if madvise(start, address + length - start, MADV_POPULATE_READ) == 0:
        back_pages(address, length)
        return <int64_t>length
    while done < length:
        got = pread(
            fd, copy, min(length - done, <uint64_t>COPY_BYTES), <int64_t>(offset + done)
        )
        if got < 0 and done == 0:
            return -errno
        if got <= 0:
            break
        done += <uint64_t>got
    return <int64_t>done


cpdef bint is_shared(int fd) noexcept nogil:
    """Whether other loads of the file have announced themselves. False where the filesystem has no
    locks."""
    cdef flock lock
    lock.l_type, lock.l_whence, lock.l_pid = F_WRLCK, SEEK_SET, 0
    lock.l_start, lock.l_len = _lock_offset, 1
    return fcntl(fd, F_OFD_GETLK, &lock) == 0 and lock.l_type != F_UNLCK


cdef int64_t read_mapped(FirstTouch *self, const Read *read, int64_t cancels) noexcept nogil:
    """Reads the pages of a mapping: bytes, or -errno if nothing was read.

    ``cancels``: as for `read_first_touch`.
    """
    cdef uint64_t done = 0, length, offset
    cdef int64_t got, took
    cdef int huge
    while done < read.length:
        offset = read.offset + done
        length = min(UNIT_BYTES - offset % UNIT_BYTES, read.length - done)
        huge = (
            length == UNIT_BYTES
            and <uintptr_t>(read.address + done) % UNIT_BYTES == 0
            and chosen_huge(self)
            and (self.mode != AUTO or not is_shared(read.fd))
        )
        took = cpu_ns()
        got = populate(read.fd, read.address + done, length, offset, huge)
        if huge:
            huge_took(self, cpu_ns() - took)
        if got < 0:
            return <int64_t>done if done else got
        done += <uint64_t>got
        # Short: the pump reads the rest, or meets the end of the file.
        if <uint64_t>got < length or gds_load(&self.cancels) != cancels:
            break
    return <int64_t>done
