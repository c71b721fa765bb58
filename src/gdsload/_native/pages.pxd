# The page size, as the kernel says it: 4 KiB on x86-64, 4, 16 or 64 KiB on arm64. The alignment of
# direct I/O and of cuFile is another matter and does not follow from it.

from libc.stdint cimport uint64_t

cdef extern from "<unistd.h>" nogil:
    enum:
        _SC_PAGESIZE
    long sysconf(int name)

cdef inline uint64_t page_bytes() noexcept nogil:
    return <uint64_t>sysconf(_SC_PAGESIZE)

cdef inline uint64_t page_floor(uint64_t place) noexcept nogil:
    """The border of a page at or below a place."""
    return place & ~(page_bytes() - 1)

cdef inline uint64_t page_ceil(uint64_t place) noexcept nogil:
    """The border of a page at or above a place."""
    return page_floor(place + page_bytes() - 1)
