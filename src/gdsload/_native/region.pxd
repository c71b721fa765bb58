# A region: one mapping that tensors live in. It is counted, because it must outlive whatever looks
# at it: the arena, every tensor that views it, and every read in flight into it, on whichever
# thread the last of them ends. All of it is C, so that a tensor may die without the GIL.

from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.stdlib cimport free

from gdsload._native.atomics cimport gds_add, gds_load_flag
from gdsload._native.pthreads cimport (
    pthread_mutex_destroy,
    pthread_mutex_lock,
    pthread_mutex_t,
    pthread_mutex_unlock,
)

cdef extern from "<sys/mman.h>" nogil:
    int munmap(void *address, size_t length)

cdef enum:
    UNIT_BYTES = 2097152  # what is populated at a time: one huge page on x86-64 and most of arm64

cdef struct CRegion:
    char *base
    uint64_t length      # bytes from there on
    char *mapping        # what the system gave: the same, or a little more at either end
    uint64_t mapped
    int64_t references
    int anonymous        # its pages can be given back one by one; a file's mapping keeps them
    CPool *pool          # where its memory goes back to; NULL: to the system
    CRegion *next_idle
    CLease *lease        # who counts it; NULL: nobody
    uint8_t *ready       # a flag for each unit that is populated; NULL where nobody populates

# Counts the regions that somebody's memory was lent as, whoever holds them: when none is left, the
# memory can be used for something else.
cdef struct CLease:
    int64_t references   # the Python object and each region

# Regions that are kept between models: backed, populated, and free to be taken again.
cdef struct CPool:
    pthread_mutex_t lock
    int64_t references   # the Python object and each region
    uint64_t limit       # bytes it may hold, in use and idle together; 0: it is closed
    uint64_t held
    uint64_t idle
    CRegion *first       # idle ones, the least recently used first
    CRegion *last

cdef inline void release_pool(CPool *self) noexcept nogil:
    if gds_add(&self.references, -1) > 0:
        return
    pthread_mutex_destroy(&self.lock)
    free(self)

cdef inline void release_lease(CLease *self) noexcept nogil:
    if gds_add(&self.references, -1) == 0:
        free(self)

cdef inline void free_region(CRegion *region) noexcept nogil:
    munmap(region.mapping, region.mapped)
    free(region.ready)
    free(region)

cdef inline int keep_region(CPool *self, CRegion *region) noexcept nogil:
    """Makes a region idle, if there is room for it."""
    cdef int kept
    pthread_mutex_lock(&self.lock)
    kept = self.held <= self.limit
    if kept:
        region.next_idle = NULL
        if self.last == NULL:
            self.first = region
        else:
            self.last.next_idle = region
        self.last = region
        self.idle += region.length
    else:
        self.held -= region.length
    pthread_mutex_unlock(&self.lock)
    return kept

cdef inline void retain_region(CRegion *region) noexcept nogil:
    gds_add(&region.references, 1)

cdef inline void release_region(CRegion *region) noexcept nogil:
    cdef CLease *lease = region.lease
    if gds_add(&region.references, -1) > 0:
        return
    if region.pool != NULL:
        if keep_region(region.pool, region):
            return
        release_pool(region.pool)
    free_region(region)
    if lease != NULL:  # not before its memory is unmapped
        release_lease(lease)

cdef inline int region_ready(CRegion *region, uint64_t first, uint64_t last) noexcept nogil:
    """Whether units first to last are populated, as far as somebody populates them at all."""
    cdef uint64_t unit
    if region == NULL or region.ready == NULL:
        return 1
    for unit in range(first, last + 1):
        if not gds_load_flag(&region.ready[unit]):
            return 0
    return 1
