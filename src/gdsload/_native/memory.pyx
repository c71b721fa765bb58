"""Regions of memory, and tensors that view them.

A `Region` is an anonymous mapping to read into, or a private mapping of a file. `Region.view`
hands out a DLPack capsule: the tensor made from it shares the region's ownership, and when it dies
its pages go back to the system at once, though other tensors of the region live on.
"""

cimport cython
from cpython.pycapsule cimport PyCapsule_New
from libc.errno cimport errno
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from posix.unistd cimport getpid

import os

from gdsload._native.atomics cimport gds_add, gds_load, gds_load_flag
from gdsload._native.dlpack cimport DLManagedTensor, describe, drop_capsule
from gdsload._native.pages cimport page_ceil, page_floor
from gdsload._native.pthreads cimport (
    pthread_mutex_init,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from gdsload._native.region cimport (
    UNIT_BYTES,
    CLease,
    CPool,
    CRegion,
    free_region,
    release_lease,
    release_pool,
    release_region,
    retain_region,
)

cdef extern from "<sys/mman.h>" nogil:
    enum:
        PROT_READ
        PROT_WRITE
        MAP_PRIVATE
        MAP_SHARED
        MAP_ANONYMOUS
        MAP_NORESERVE
        MADV_NOHUGEPAGE
        MADV_DONTNEED
        MADV_WILLNEED
    void *mmap(void *address, size_t length, int protection, int flags, int fd, int64_t offset)
    int munmap(void *address, size_t length)
    int madvise(void *address, size_t length, int advice)

cdef void *MAP_FAILED = <void *><uintptr_t>-1

cdef enum:
    # A tensor smaller than this keeps its pages until the region goes: giving them back would
    # cost more than it frees.
    GIVE_BACK_BYTES = 65536

cdef struct View:
    DLManagedTensor managed
    CRegion *region
    uint64_t nbytes


cdef void delete_view(DLManagedTensor *managed) noexcept nogil:
    cdef View *view = <View *>managed.manager_ctx
    cdef uintptr_t first = <uintptr_t>managed.dl_tensor.data
    cdef uintptr_t end = first + view.nbytes
    if view.region.anonymous and view.region.pool == NULL and view.nbytes >= GIVE_BACK_BYTES:
        # Only whole pages: the edges are shared with the neighbours, and the kernel rounds the
        # length up to a page, whatever the size of one is.
        first = page_ceil(first)
        end = page_floor(end)
        if end > first:
            madvise(<void *>first, end - first, MADV_DONTNEED)
    release_region(view.region)
    free(view)


cdef CRegion *new_region(void *base, uint64_t length, int anonymous) noexcept:
    cdef CRegion *region = <CRegion *>calloc(1, sizeof(CRegion))
    if region == NULL:
        munmap(base, length)
        return NULL
    region.base = <char *>base
    region.length = length
    region.mapping = region.base
    region.mapped = length
    region.anonymous = anonymous
    region.references = 1
    return region


@cython.final
cdef class Region:
    """One mapping. Its memory lives until the last tensor and the last read of it are gone."""

    cdef CRegion *region

    @staticmethod
    def anonymous(uint64_t length):
        """Fresh zeroed memory of at least ``length`` bytes that starts on a huge page's border.

        Raises MemoryError with the number of bytes where the address space is used up.
        """
        cdef uint64_t whole = (length + UNIT_BYTES - 1) & ~<uint64_t>(UNIT_BYTES - 1)
        cdef char *mapped
        cdef Region self = Region.__new__(Region)
        if length == 0 or whole < length:
            raise ValueError(f"a region of {length} bytes cannot be")
        # Nothing is reserved: whether the memory is there was asked before, and a plan that reads
        # parts of a file leaves the rest of its region untouched.
        mapped = <char *>mmap(
            NULL, whole + UNIT_BYTES, PROT_READ | PROT_WRITE,
            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0,
        )
        if mapped == MAP_FAILED:
            raise MemoryError(f"no address space for {length} bytes: {os.strerror(errno)}")
        # What is left over at the ends costs address space alone, and giving it back now would have
        # to wait for whoever makes memory ready.
        self.region = new_region(mapped, whole + UNIT_BYTES, 1)
        if self.region == NULL:
            raise MemoryError(f"no memory to keep count of a region of {length} bytes")
        self.region.base = mapped + (-<uintptr_t>mapped & (UNIT_BYTES - 1))
        self.region.length = whole
        # Small pages unless somebody measured that huge ones are cheaper now: see populate.pyx.
        madvise(self.region.base, whole, MADV_NOHUGEPAGE)
        return self

    @staticmethod
    def file(int fd, uint64_t length):
        """A private, writable mapping of the first ``length`` bytes of an open file.

        Pages are shared with the page cache until they are written to; the file never changes.
        """
        cdef void *mapped
        cdef Region self = Region.__new__(Region)
        mapped = mmap(
            NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, 0
        )
        if mapped == MAP_FAILED:
            raise OSError(errno, os.strerror(errno))
        self.region = new_region(mapped, length, 0)
        if self.region == NULL:
            raise MemoryError(f"no memory to keep count of a mapping of {length} bytes")
        return self

    def __dealloc__(self):
        if self.region != NULL:
            release_region(self.region)

    @property
    def address(self):
        """Where it starts."""
        return <uintptr_t>self.region.base

    @property
    def length(self):
        """Bytes mapped."""
        return self.region.length

    @property
    def references(self):
        """How many owners it has: this object, tensors, and reads in flight."""
        return self.region.references

    def populated(self, uint64_t offset, uint64_t nbytes):
        """Whether a populator has been over all of these bytes, for this load or one before it."""
        cdef uint64_t unit
        if self.region.ready == NULL or nbytes == 0 or offset + nbytes > self.region.length:
            return False
        for unit in range(offset // UNIT_BYTES, (offset + nbytes - 1) // UNIT_BYTES + 1):
            if not gds_load_flag(&self.region.ready[unit]):
                return False
        return True

    def handle(self):
        """Its C struct, as a capsule for the pump and the populator."""
        return PyCapsule_New(self.region, b"gdsload.region", NULL)

    def view(self, uint64_t offset, uint64_t nbytes, tuple shape, int code, int bits):
        """A DLPack capsule over ``nbytes`` bytes at ``offset``: a CPU tensor of that shape.

        ``code`` and ``bits`` are DLPack's (0 int, 1 uint, 2 float, 4 bfloat, 5 complex, 6 bool).
        Two views of the same bytes must not be handed out: the first to die gives its pages back.
        """
        cdef View *view
        if offset > self.region.length or nbytes > self.region.length - offset:
            raise ValueError(
                f"a view of {nbytes} bytes at {offset} leaves a region of {self.region.length}"
            )
        view = <View *>malloc(sizeof(View) + len(shape) * sizeof(int64_t))
        if view == NULL:
            raise MemoryError("no memory for a view")
        try:
            describe(
                &view.managed, self.region.base + offset, <int64_t *>(view + 1), shape, code, bits
            )
        except BaseException:
            free(view)
            raise
        view.region = self.region
        view.nbytes = nbytes
        view.managed.manager_ctx = view
        view.managed.deleter = delete_view
        retain_region(self.region)
        return PyCapsule_New(view, b"dltensor", drop_capsule)

    def read(self, uint64_t offset, uint64_t nbytes):
        """A copy of some bytes, for callers without torch."""
        if offset > self.region.length or nbytes > self.region.length - offset:
            raise ValueError(
                f"{nbytes} bytes at {offset} leave a region of {self.region.length}"
            )
        return (<char *>self.region.base + offset)[:nbytes]


@cython.final
cdef class Pool:
    """Memory kept between models: regions that nobody uses any more, to be taken again.

    A taken region is as the last one left it: backed by the machine, and full of old bytes. Its
    memory comes back as a whole, when the last tensor and the last read of it are gone.
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
        self.pid = getpid()

    def take(self, uint64_t length):
        """A region of at least ``length`` bytes: an idle one that fits, or a fresh one. What makes
        room for it is the least recently used; where none can be made, it is not the pool's.

        Raises MemoryError as `Region.anonymous` does.
        """
        cdef CPool *pool = self.pool
        cdef Region made
        cdef CRegion *found
        cdef CRegion *gone
        cdef uint64_t whole = (length + UNIT_BYTES - 1) & ~<uint64_t>(UNIT_BYTES - 1)
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
        cdef CRegion **link = &self.pool.first
        cdef CRegion **best = NULL
        cdef CRegion *region
        cdef CRegion *before = NULL
        cdef CRegion *before_best = NULL
        while link[0] != NULL:
            region = link[0]
            if least <= region.length <= most and (
                best == NULL or region.length < best[0].length
            ):
                best, before_best = link, before
            before = region
            link = &region.next_idle
        if best == NULL:
            return NULL
        region = best[0]
        best[0] = region.next_idle
        if self.pool.last == region:
            self.pool.last = before_best
        self.pool.idle -= region.length
        return region

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

    def trim(self, uint64_t most):
        """Gives idle memory back to the system, until no more than ``most`` bytes are held."""
        cdef CRegion *gone
        with nogil:
            pthread_mutex_lock(&self.pool.lock)
            gone = self.shrink(most)
            pthread_mutex_unlock(&self.pool.lock)
            self.drop(gone)

    def close(self):
        """Gives idle memory back, and later what is in use still. May be called again."""
        self.pool.limit = 0
        self.trim(0)

    @property
    def limit(self):
        """Bytes that it may hold; 0 once closed."""
        return self.pool.limit

    @property
    def held(self):
        """Bytes of its regions, in use and idle."""
        return self.pool.held

    @property
    def idle(self):
        """Bytes that nobody uses."""
        return self.pool.idle

    def __dealloc__(self):
        if self.pool == NULL:
            return
        if self.pid == getpid():
            self.close()
        release_pool(self.pool)


@cython.final
cdef class Lease:
    """Lends parts of a file as regions, and knows how many of them live: as objects, as tensors or
    under reads that are in flight."""

    cdef CLease *lease

    def __cinit__(self):
        self.lease = <CLease *>calloc(1, sizeof(CLease))
        if self.lease == NULL:
            raise MemoryError("no memory for a lease")
        self.lease.references = 1

    def lend(self, int fd, uint64_t offset, uint64_t length, bint shared):
        """A mapping of ``length`` bytes at ``offset``, a multiple of the page. What is written to a
        ``shared`` one is the file's, and seen by all; of another it is its own.

        Raises OSError as `Region.file` does.
        """
        cdef void *mapped
        cdef Region made = Region.__new__(Region)
        mapped = mmap(
            NULL, length, PROT_READ | PROT_WRITE,
            (MAP_SHARED if shared else MAP_PRIVATE) | MAP_NORESERVE, fd, offset,
        )
        if mapped == MAP_FAILED:
            raise OSError(errno, os.strerror(errno))
        made.region = new_region(mapped, length, 0)
        if made.region == NULL:
            raise MemoryError(f"no memory to keep count of a mapping of {length} bytes")
        gds_add(&self.lease.references, 1)
        made.region.lease = self.lease
        return made

    @property
    def lent(self):
        """Regions that live."""
        return gds_load(&self.lease.references) - 1

    def __dealloc__(self):
        if self.lease != NULL:
            release_lease(self.lease)
