"""Slots: memory that was registered once, lent to reads piece by piece. Whose memory it is, and what
it is registered with, is the business of whoever makes the ring (gdsload.memory.staging_ring).
"""

cimport cython
from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport calloc, malloc
from libc.string cimport memset

from gdsload._native.pthreads cimport (
    pthread_mutex_init,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from gdsload._native.stage cimport CRing, release_ring

cdef extern from "<sys/mman.h>" nogil:
    enum:
        MADV_HUGEPAGE
        MADV_WIPEONFORK
    int madvise(void *address, size_t length, int advice)

cdef extern from "<sys/syscall.h>" nogil:
    enum:
        SYS_mbind

cdef extern from "<unistd.h>" nogil:
    long syscall(long number, ...)

cdef enum:
    MPOL_PREFERRED = 1


@cython.final
cdef class Ring:
    """Memory that was registered once, in slots that are lent to reads and come back."""

    cdef CRing *ring

    def __cinit__(self, uint64_t base, uint64_t slot_bytes, int count):
        """``count`` slots of ``slot_bytes`` bytes from address ``base``; whose they are is the
        caller's business, and they must be there as long as a slot is lent."""
        cdef CRing *made
        cdef int i
        if count < 1 or slot_bytes < 1:
            raise ValueError(f"a ring of {count} slots of {slot_bytes} bytes holds nothing")
        made = <CRing *>calloc(1, sizeof(CRing))
        if made == NULL:
            raise MemoryError("no memory for a ring")
        self.ring = made
        made.references = 1
        made.base = <char *><uintptr_t>base
        made.slot_bytes = slot_bytes
        made.count = made.idle_count = count
        pthread_mutex_init(&made.lock, NULL)
        made.idle = <int *>malloc(count * sizeof(int))
        if made.idle == NULL:
            raise MemoryError("no memory for a ring")
        for i in range(count):
            made.idle[i] = count - 1 - i

    def handle(self):
        """Its C struct, as a capsule for stages; valid while this object lives."""
        return PyCapsule_New(self.ring, b"gdsload.memory.staging_ring", NULL)

    @property
    def address(self):
        return <uintptr_t>self.ring.base

    @property
    def slot_bytes(self):
        return self.ring.slot_bytes

    @property
    def count(self):
        """Slots, in all."""
        return self.ring.count

    @property
    def lost(self):
        """Slots that were taken out of use: a read of them was never heard of again."""
        return self.ring.lost

    @property
    def lent(self):
        """Slots that somebody has, lost ones included."""
        cdef int lent
        pthread_mutex_lock(&self.ring.lock)
        lent = self.ring.count - self.ring.idle_count
        pthread_mutex_unlock(&self.ring.lock)
        return lent

    def settle(self, int node):
        """Before its pages are there: asks for huge ones, near ``node`` (-1: anywhere), and that a
        child of fork() sees zeros in their place.

        A fork otherwise copies pinned pages, or, before Linux 5.12, gives the next write of the
        parent a new page, while the device goes on reading the old one.

        All are wishes: a kernel without huge pages or NUMA leaves the memory as good as it was.
        True where the node was accepted.
        """
        cdef unsigned long nodes[16]
        cdef uint64_t nbytes = self.ring.slot_bytes * <uint64_t>self.ring.count
        madvise(self.ring.base, nbytes, MADV_HUGEPAGE)
        madvise(self.ring.base, nbytes, MADV_WIPEONFORK)
        if node < 0 or node >= 1024:
            return False
        memset(nodes, 0, sizeof(nodes))
        nodes[node // 64] = 1UL << (node % 64)
        return syscall(SYS_mbind, self.ring.base, nbytes, MPOL_PREFERRED, nodes, 1025UL, 0) == 0

    def retire(self):
        """Takes every slot out of use; False where one is lent or lost, and nothing was done."""
        cdef int home
        pthread_mutex_lock(&self.ring.lock)
        home = self.ring.idle_count == self.ring.count
        if home:
            self.ring.idle_count = 0
        pthread_mutex_unlock(&self.ring.lock)
        return bool(home)

    def __dealloc__(self):
        if self.ring != NULL:
            release_ring(self.ring)
