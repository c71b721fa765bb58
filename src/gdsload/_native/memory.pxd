# A region: one mapping that tensors view. It is reference counted in C, so that a tensor can be
# freed without the GIL: it must outlive its buffer, every tensor that views it, and every read in
# flight into it, on whichever thread the last of them ends.

from libc.stdint cimport int64_t, uint8_t, uint64_t

from gdsload._native.atomics cimport gds_add
from gdsload._native.pthreads cimport pthread_mutex_t

cdef enum:
    UNIT_BYTES = 2097152  # touched at a time: one huge page on x86-64 and most of arm64

# Counts the regions that part of a file is lent as. When none is left, the memory can be reused.
cdef struct CLease:
    int64_t references   # the Python object and each region

# Regions that are used again within a load: backed, touched, and free to be taken again.
cdef struct CPool:
    pthread_mutex_t lock
    int pid              # of its process: in a forked child, the lock may never be unlocked
    int64_t references   # the Python object and each region
    uint64_t limit       # bytes it may hold, in use and idle together; 0: it is closed
    uint64_t held
    uint64_t idle
    CRegion *first       # idle ones, the least recently used first
    CRegion *last

cdef struct CRegion:
    char *base
    uint64_t length      # bytes from `base`
    char *mapping        # the whole mapping: the same, or a little more at either end
    uint64_t mapped
    int64_t references
    int anonymous        # its pages can be given back one by one; those of a file cannot
    CPool *pool          # to which the memory returns; NULL: to the system
    CRegion *next_idle
    CLease *lease        # that counts it, or NULL
    uint8_t *touched     # a flag for each unit; NULL: the memory needs no first touch
    void (*destroy)(CRegion *region) noexcept nogil

cdef inline void retain_region(CRegion *region) noexcept nogil:
    gds_add(&region.references, 1)

cdef inline void release_region(CRegion *region) noexcept nogil:
    if gds_add(&region.references, -1) == 0:
        region.destroy(region)
