"""Copies to host memory by several threads, and casts bfloat16 to float32 on the way.

Where the memory is fresh, the thread that copies makes it ready just before: each unit of 2 MiB as a
huge page or as small ones, as for reads (`first_touch`). Small pages are touched a few at a time, so
that they are still in the processor's cache when bytes are copied to them.

    copies, by address ──► pieces, none across two units ──► the threads take unit after unit

The threads live for one call, and the caller is one of them: it waits for nothing that cannot end.
Not responsible for other casts, which are torch's; for these the memory can be touched alone.
"""

cimport cython
from cpython.pycapsule cimport PyCapsule_GetPointer

from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from gdsload._native.atomics cimport gds_add, gds_load_flag
from gdsload._native.engine cimport FreshMemory
from gdsload._native.first_touch cimport (
    FirstTouch, close_first_touch, note_small, open_first_touch, small_took, touch_huge, touch_pages,
)
from gdsload._native.memory cimport UNIT_BYTES, CRegion
from gdsload._native.page_choice cimport AUTO
from gdsload._native.pthreads cimport run_threads

cdef enum:
    # Touched and copied at a time: it stays in the cache of one core. With 64 KiB to 256 KiB, reading
    # and casting 1.5 GB takes a sixth less time than with 2 MiB.
    STEP_BYTES = 262144

# Part of a copy, within one unit.
cdef struct Piece:
    char *target
    const char *source           # NULL: the memory is only touched
    uint64_t nbytes              # of the target
    int widens                   # the source is bfloat16, and the target float32

cdef struct Job:
    FirstTouch *first_touch
    FreshMemory memory           # `region` is NULL: all memory was touched before
    Piece *pieces                # by address
    int64_t *firsts              # the first piece of each unit, and the number of all pieces
    int64_t units
    int64_t taken                # units that threads have taken


cdef uint64_t unit_of(const char *address) noexcept nogil:
    return <uintptr_t>address // UNIT_BYTES


cdef void widen(uint32_t *target, const uint16_t *source, uint64_t count) noexcept nogil:
    cdef uint64_t i
    for i in range(count):
        target[i] = <uint32_t>source[i] << 16


cdef int64_t copy_piece(const Piece *piece, int touches) noexcept nogil:
    """Copies a piece. `touches`: first touches its pages. Returns the CPU time of touching."""
    cdef uint64_t done = 0, length
    cdef int64_t took = 0
    while done < piece.nbytes:
        length = min(piece.nbytes - done, <uint64_t>STEP_BYTES)
        if touches:
            took += touch_pages(piece.target + done, length)
        if piece.source == NULL:
            pass
        elif piece.widens:
            widen(
                <uint32_t *>(piece.target + done), <const uint16_t *>(piece.source + done // 2),
                length // 4,
            )
        else:
            memcpy(piece.target + done, piece.source + done, length)
        done += length
    return took


cdef void copy_unit(Job *self, int64_t number) noexcept nogil:
    """Copies all pieces in one unit, which no other thread writes to."""
    cdef const Piece *pieces = self.pieces
    cdef int64_t first = self.firsts[number], end = self.firsts[number + 1], took = 0
    cdef CRegion *region = self.memory.region
    cdef uint64_t unit = 0, nbytes = 0
    cdef int fresh = 0, touches = 0
    if region != NULL and region.base <= pieces[first].target < region.base + region.length:
        unit = <uint64_t>(pieces[first].target - region.base) // UNIT_BYTES
        fresh = not gds_load_flag(&region.touched[unit])
        # Of a unit of small pages, an earlier call has touched those that it copied to.
        touches = not (fresh and touch_huge(self.first_touch, &self.memory, unit))
    for piece in range(first, end):
        took += copy_piece(&pieces[piece], touches)
        nbytes += pieces[piece].nbytes
    if fresh and touches:
        note_small(&self.memory, unit)
        if nbytes == UNIT_BYTES:
            small_took(self.first_touch, took)


cdef void *copy_units(void *arg) noexcept nogil:
    """What each thread does: takes units until there are no more."""
    cdef Job *self = <Job *>arg
    cdef int64_t number
    while True:
        number = gds_add(&self.taken, 1) - 1
        if number >= self.units:
            return NULL
        copy_unit(self, number)


cdef int split(Job *self, list copies) except -1:
    """Fills `pieces` and `firsts`, which are large enough."""
    cdef uint64_t target, source, nbytes, part
    cdef int64_t count = 0
    cdef int widens
    for target, source, nbytes, widens in copies:
        while nbytes > 0:
            part = min(nbytes, UNIT_BYTES - target % UNIT_BYTES)
            if count == 0 or unit_of(self.pieces[count - 1].target) != target // UNIT_BYTES:
                self.firsts[self.units] = count
                self.units += 1
            self.pieces[count] = Piece(<char *>target, <const char *>source, part, widens)
            count += 1
            target += part
            nbytes -= part
            if source != 0:
                source += part // 2 if widens else part
    self.firsts[self.units] = count
    return 0


@cython.final
cdef class Copier:
    """Copies, and what it has learned of the cost of fresh pages. One thread at a time may use it."""

    cdef FirstTouch first_touch
    cdef int threads

    def __cinit__(self, int threads):
        """``threads``: how many work at the same time, the caller among them; at most 64 do."""
        self.threads = threads
        open_first_touch(&self.first_touch, AUTO)

    def __dealloc__(self):
        close_first_touch(&self.first_touch)

    def copy(self, copies, region=None):
        """Does copies, each a tuple (target, source, nbytes, widens), in any order.

        ``target`` and ``source`` are addresses, and ``nbytes`` is the length of the target. With
        ``widens`` the source has half of these bytes: bfloat16, which become float32; both are
        aligned to their elements. No two targets overlap. With a source of 0 the memory is only
        touched, and keeps its contents. ``region`` is the ``handle()`` of a region of fresh memory
        that targets may lie in. Returns the units of it that were touched as a huge page, and as small
        ones.
        """
        cdef Job job
        cdef uint64_t pieces = 1
        memset(&job, 0, sizeof(job))
        if region is not None:
            job.memory.region = <CRegion *>PyCapsule_GetPointer(region, b"gdsload.region")
            if job.memory.region.touched == NULL:
                job.memory.region = NULL
        ordered = sorted(copies)
        job.first_touch = &self.first_touch
        for target, source, nbytes, widens in ordered:
            if widens and (source % 2 or target % 4 or nbytes % 4):
                raise ValueError(f"{nbytes} bytes at {target:#x} are not aligned as float32")
            pieces += nbytes // UNIT_BYTES + 2
        job.pieces = <Piece *>malloc(pieces * sizeof(Piece))
        job.firsts = <int64_t *>malloc(pieces * sizeof(int64_t))
        try:
            if job.pieces == NULL or job.firsts == NULL:
                raise MemoryError(f"no memory for {pieces} pieces of copies")
            split(&job, ordered)
            with nogil:
                run_threads(copy_units, &job, min(<int64_t>self.threads, job.units))
        finally:
            free(job.pieces)
            free(job.firsts)
        return job.memory.huge_units, job.memory.small_units
