"""Regions of host memory, and tensors that view them.

A `Region` is an anonymous mapping to read into, or a private mapping of a file. `Region.view`
returns a DLPack capsule: the tensor made from it shares the ownership of the region. Anonymous pages
go back to the system when the tensor is freed, even if other tensors of the region live on, unless
they are of a host pool. Private copies of pages of a file, which a write makes, stay until the region
is freed.
"""

cimport cython
from cpython.pycapsule cimport PyCapsule_New
from libc.errno cimport errno
from libc.stdint cimport int64_t, uint8_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from posix.mman cimport (
    MADV_DONTNEED, MADV_NOHUGEPAGE, MAP_ANONYMOUS, MAP_FAILED, MAP_NORESERVE, MAP_PRIVATE,
    MAP_SHARED, PROT_READ, PROT_WRITE, madvise, mmap, munmap,
)
from posix.unistd cimport getpid

import os

from gdsload._native.atomics cimport gds_add, gds_load
from gdsload._native.dlpack cimport DL_CPU, DLManagedTensor, View, new_view
from gdsload._native.pages cimport page_ceil, page_floor
from gdsload._native.pthreads cimport (
    pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_unlock,
)

cdef enum:
    # A smaller tensor keeps its pages until the region is freed: to free them would cost more than
    # it gains.
    LEAST_FREED_BYTES = 65536


cdef void delete_view(DLManagedTensor *managed) noexcept nogil:
    cdef View *view = <View *>managed.manager_ctx
    cdef CRegion *region = <CRegion *>view.owner
    cdef uintptr_t first = <uintptr_t>managed.dl_tensor.data
    cdef uintptr_t end = first + view.nbytes
    if region.anonymous and region.pool == NULL and view.nbytes >= LEAST_FREED_BYTES:
        # Only whole pages: neighbours share the edges, and the kernel rounds the length up to its
        # page size.
        first = page_ceil(first)
        end = page_floor(end)
        if end > first:
            madvise(<void *>first, end - first, MADV_DONTNEED)
    release_region(region)
    free(view)


cdef void release_pool(CPool *self) noexcept nogil:
    if gds_add(&self.references, -1) > 0:
        return
    pthread_mutex_destroy(&self.lock)
    free(self)


cdef void release_lease(CLease *self) noexcept nogil:
    if gds_add(&self.references, -1) == 0:
        free(self)


cdef void free_region(CRegion *region) noexcept nogil:
    munmap(region.mapping, region.mapped)
    free(region.touched)
    free(region)


cdef int make_idle(CPool *self, CRegion *region) noexcept nogil:
    """Returns a region to the pool, if there is room for it, and not in a forked child."""
    cdef int fits
    if self.pid != getpid():
        return 0
    pthread_mutex_lock(&self.lock)
    fits = self.held <= self.limit
    if fits:
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
    return fits


cdef void destroy_region(CRegion *region) noexcept nogil:
    """Runs when the last reference is gone."""
    cdef CLease *lease = region.lease
    if region.pool != NULL:
        if make_idle(region.pool, region):
            return
        release_pool(region.pool)
    free_region(region)
    if lease != NULL:  # not before its memory is unmapped
        release_lease(lease)


cdef CRegion *new_region(void *base, uint64_t length, int anonymous) except NULL:
    """A region over a mapping, which it owns; the mapping is undone if there is no memory."""
    cdef CRegion *region = <CRegion *>calloc(1, sizeof(CRegion))
    if region == NULL:
        munmap(base, length)
        raise MemoryError(f"no memory to track a region of {length} bytes")
    region.base = region.mapping = <char *>base
    region.length = region.mapped = length
    region.anonymous = anonymous
    region.references = 1
    region.destroy = destroy_region
    return region


cdef uint64_t whole_units(uint64_t length) noexcept nogil:
    return (length + UNIT_BYTES - 1) & ~<uint64_t>(UNIT_BYTES - 1)


@cython.final
cdef class Region:
    """One mapping. It lives until its last tensor and its last read are gone."""

    cdef CRegion *region
    cdef object __weakref__

    @staticmethod
    def anonymous(uint64_t length):
        """New zeroed memory of at least ``length`` bytes, aligned to a huge page.

        Raises MemoryError if the address space is used up.
        """
        cdef uint64_t whole = whole_units(length)
        cdef char *mapped
        cdef Region self = Region.__new__(Region)
        if length == 0 or whole < length:
            raise ValueError(f"invalid length of a region: {length} bytes")
        # Nothing is reserved: callers have checked that the memory is available, and a plan that
        # reads parts of a file leaves the rest of its region untouched.
        mapped = <char *>mmap(
            NULL, whole + UNIT_BYTES, PROT_READ | PROT_WRITE,
            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0,
        )
        if mapped == MAP_FAILED:
            raise MemoryError(
                f"no address space for {length} bytes (ulimit -v limits it, vm.overcommit_memory=2,"
                f" or vm.max_map_count): {os.strerror(errno)}"
            )
        # The rest at both ends costs address space only.
        self.region = new_region(mapped, whole + UNIT_BYTES, 1)
        self.region.base = mapped + (-<uintptr_t>mapped & (UNIT_BYTES - 1))
        self.region.length = whole
        self.region.touched = <uint8_t *>calloc(whole // UNIT_BYTES, 1)
        if self.region.touched == NULL:
            raise MemoryError(f"no memory to track a region of {length} bytes")
        # Small pages, unless the threads that read measure that huge ones are cheaper now.
        # All of the mapping, so that the kernel merges it with that of another region: the number of
        # mappings is limited, too.
        madvise(mapped, whole + UNIT_BYTES, MADV_NOHUGEPAGE)
        return self

    @staticmethod
    def file(int fd, uint64_t length):
        """A private, writable mapping of the first ``length`` bytes of an open file. Raises OSError.

        Pages are shared with the page cache until they are written to; the file never changes.
        """
        return map_file(fd, 0, length, MAP_PRIVATE)

    def __dealloc__(self):
        if self.region != NULL:
            release_region(self.region)

    @property
    def address(self):
        """Its first address."""
        return <uintptr_t>self.region.base

    @property
    def length(self):
        """Bytes mapped."""
        return self.region.length

    @property
    def references(self):
        """Number of owners: this object, tensors, and reads in flight."""
        return self.region.references

    def handle(self):
        """Its C struct, as a capsule for the pump."""
        return PyCapsule_New(self.region, b"gdsload.region", NULL)

    def view(self, uint64_t offset, uint64_t nbytes, tuple shape, int code, int bits):
        """A DLPack capsule over ``nbytes`` bytes at ``offset``: a CPU tensor of that shape.

        ``code`` and ``bits`` are DLPack's (0 int, 1 uint, 2 float, 4 bfloat, 5 complex, 6 bool).
        There must not be two views of the same bytes: the first to be freed gives the pages back.
        """
        self.require(offset, nbytes)
        view = new_view(
            self.region, delete_view, DL_CPU, 0, <uint64_t>self.region.base + offset, nbytes,
            shape, code, bits,
        )
        retain_region(self.region)
        return view

    def read(self, uint64_t offset, uint64_t nbytes):
        """A copy of some bytes, for tests."""
        self.require(offset, nbytes)
        return (<char *>self.region.base + offset)[:nbytes]

    cdef require(self, uint64_t offset, uint64_t nbytes):
        if offset > self.region.length or nbytes > self.region.length - offset:
            raise ValueError(
                f"{nbytes} bytes at {offset} exceed a region of {self.region.length} bytes"
            )


cdef Region map_file(int fd, uint64_t offset, uint64_t length, int flags):
    cdef Region made = Region.__new__(Region)
    cdef void *mapped
    with nogil:  # the server of a distant filesystem may be asked
        mapped = mmap(
            NULL, length, PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, fd, <int64_t>offset
        )
    if mapped == MAP_FAILED:
        raise OSError(errno, os.strerror(errno))
    made.region = new_region(mapped, length, 0)
    return made


@cython.final
cdef class Pool:
    """Memory that is used again within a load: unused regions, to be taken again.

    A taken region is backed by physical memory and full of old bytes. It returns as a whole, when its
    last tensor and its last read are gone.
    """

    cdef CPool *pool
    cdef readonly int pid

    def __cinit__(self, uint64_t limit):
        """``limit``: bytes that it may hold, in use and idle together."""
        self.pool = <CPool *>calloc(1, sizeof(CPool))
        if self.pool == NULL:
            raise MemoryError("no memory for a pool")
        pthread_mutex_init(&self.pool.lock, NULL)
        self.pool.references = 1
        self.pool.limit = limit
        self.pid = self.pool.pid = getpid()

    def take(self, uint64_t length):
        """A region of at least ``length`` bytes: an idle one that fits, or a new one. To make room,
        the least recently used regions are freed; if that is not enough, the new region does not
        belong to the pool. Raises MemoryError as `Region.anonymous` does.
        """
        cdef CPool *pool = self.pool
        cdef Region made
        cdef CRegion *found
        cdef CRegion *gone
        cdef uint64_t whole = whole_units(length)
        cdef int room
        with nogil:
            pthread_mutex_lock(&pool.lock)
            found = self.unlink(whole, whole + whole // 4)
            gone = NULL
            if found == NULL:
                gone = self.shrink(pool.limit - whole if whole < pool.limit else 0)
            room = found == NULL and pool.held + whole <= pool.limit
            if room:
                pool.held += whole
            pthread_mutex_unlock(&pool.lock)
            self.drop(gone)
        if found != NULL:
            found.references = 1
            made = Region.__new__(Region)
            made.region = found
            return made
        try:
            made = Region.anonymous(length)
        except BaseException:
            if room:
                pthread_mutex_lock(&pool.lock)
                pool.held -= whole
                pthread_mutex_unlock(&pool.lock)
            raise
        if room:
            gds_add(&pool.references, 1)
            made.region.pool = pool
        return made

    cdef CRegion *unlink(self, uint64_t least, uint64_t most) noexcept nogil:
        """Takes the smallest idle region of these lengths out of the list."""
        cdef CRegion *region = self.pool.first
        cdef CRegion *before = NULL
        cdef CRegion *best = NULL
        cdef CRegion *before_best = NULL
        while region != NULL:
            if least <= region.length <= most and (best == NULL or region.length < best.length):
                best, before_best = region, before
            before, region = region, region.next_idle
        if best == NULL:
            return NULL
        if before_best == NULL:
            self.pool.first = best.next_idle
        else:
            before_best.next_idle = best.next_idle
        if self.pool.last == best:
            self.pool.last = before_best
        self.pool.idle -= best.length
        return best

    cdef CRegion *shrink(self, uint64_t most) noexcept nogil:
        """Takes idle regions out, the least recently used first, until `most` bytes are held."""
        cdef CPool *pool = self.pool
        cdef CRegion *gone = NULL
        cdef CRegion *region
        while pool.first != NULL and pool.held > most:
            region = pool.first
            pool.first = region.next_idle
            pool.held -= region.length
            pool.idle -= region.length
            region.next_idle = gone
            gone = region
        if pool.first == NULL:
            pool.last = NULL
        return gone

    cdef void drop(self, CRegion *gone) noexcept nogil:
        cdef CRegion *region
        while gone != NULL:
            region = gone
            gone = region.next_idle
            free_region(region)
            release_pool(self.pool)

    def close(self):
        """Frees idle memory, and later the memory in use. Idempotent."""
        cdef CRegion *gone
        with nogil:
            pthread_mutex_lock(&self.pool.lock)
            self.pool.limit = 0
            gone = self.shrink(0)
            pthread_mutex_unlock(&self.pool.lock)
            self.drop(gone)

    @property
    def idle(self):
        """Bytes of idle regions."""
        return self.pool.idle

    def __dealloc__(self):
        if self.pool == NULL:
            return
        if self.pid == getpid():
            self.close()
        release_pool(self.pool)


@cython.final
cdef class Lease:
    """Lends parts of a file as regions, and counts those alive: as objects, as tensors or for reads
    in flight."""

    cdef CLease *lease

    def __cinit__(self):
        self.lease = <CLease *>calloc(1, sizeof(CLease))
        if self.lease == NULL:
            raise MemoryError("no memory for a lease")
        self.lease.references = 1

    def lend(self, int fd, uint64_t offset, uint64_t length, bint shared):
        """A mapping of ``length`` bytes at ``offset``, a multiple of the page size. Writes to a
        ``shared`` one go to the file; another one is copied on write. Raises OSError."""
        cdef Region made = map_file(fd, offset, length, MAP_SHARED if shared else MAP_PRIVATE)
        gds_add(&self.lease.references, 1)
        made.region.lease = self.lease
        return made

    @property
    def lent(self):
        """Number of regions alive."""
        return gds_load(&self.lease.references) - 1

    def __dealloc__(self):
        if self.lease != NULL:
            release_lease(self.lease)
