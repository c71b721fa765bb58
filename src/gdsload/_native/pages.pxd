# The page size, as the kernel reports it: 4 KiB on x86-64; 4, 16 or 64 KiB on arm64. The alignment
# of direct I/O and of cuFile does not follow from it.

from libc.stdint cimport uint64_t, uintptr_t
from posix.mman cimport madvise
from posix.unistd cimport _SC_PAGESIZE, sysconf

cdef inline uint64_t page_bytes() noexcept nogil:
    return <uint64_t>sysconf(_SC_PAGESIZE)

cdef inline uint64_t page_floor(uint64_t address) noexcept nogil:
    """`address` rounded down to a page."""
    return address & ~(page_bytes() - 1)

cdef inline uint64_t page_ceil(uint64_t address) noexcept nogil:
    """`address` rounded up to a page."""
    return page_floor(address + page_bytes() - 1)

cdef inline int advise(char *address, uint64_t length, int advice) noexcept nogil:
    """``madvise`` for each page of a range: 0 or -1."""
    cdef char *first = <char *>page_floor(<uintptr_t>address)
    return madvise(first, <size_t>(address + length - first), advice)
