# Pages of memory and of the page cache. Their size, as the kernel reports it: 4 KiB on x86-64; 4, 16 or
# 64 KiB on arm64. The alignment of direct I/O and of cuFile does not follow from it.

from libc.stdint cimport uint64_t, uintptr_t
from posix.mman cimport madvise
from posix.unistd cimport _SC_PAGESIZE, sysconf

cdef enum:
    MADV_POPULATE_READ = 22      # of Linux 5.14 and newer

cdef extern from * nogil:
    """
    #include <stdint.h>
    #include <sys/syscall.h>
    #include <unistd.h>
    #ifndef SYS_cachestat
    #define SYS_cachestat 451
    #endif
    static inline int64_t pages_in_cache(int fd, uint64_t offset, uint64_t length) {
        uint64_t range[2] = {offset, length}, found[5];  /* found[0]: pages in the cache */
        return syscall(SYS_cachestat, fd, range, found, 0) ? -1 : (int64_t)found[0];
    }
    """
    # Pages of a range of a file in the page cache; -1 and errno if the kernel does not tell.
    long long pages_in_cache(int fd, uint64_t offset, uint64_t length)

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
