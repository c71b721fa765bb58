"""Tells whether two ranges of memory hold the same floats: the same bits, and no NaN, which equals
nothing.

    ranges ──► pieces, from the first on ──► each thread that works takes piece after piece

A comparison that one thread has begun is ended by all who wait for it. Not responsible for the
memory, which has to live until the last of them has ended.
"""

cimport cython
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint16_t, uint64_t, uintptr_t

from gdsload._native.atomics cimport gds_add, gds_load, gds_load_flag, gds_store_flag
from gdsload._native.pthreads cimport run_threads

cdef enum:
    # Of the first range. A thread takes 0.1 ms for it: longer than to take a piece, and nobody waits
    # much longer than others for the last one.
    PIECE_BYTES = 1048576

# The bytes of one float, and the bits of infinity: larger ones, but for the sign, are NaN.
FORMATS = {
    "BF16": (2, 0x7F80),
    "F16": (2, 0x7C00),
    "F32": (4, 0x7F800000),
    "F64": (8, 0x7FF0000000000000),
}

# Signed, because processors compare signed integers faster.
ctypedef fused bits:
    int16_t
    int32_t
    int64_t

cdef struct Job:
    const char *one
    const char *other            # has half of the bytes if it is widened
    uint64_t nbytes              # of the first range
    int itemsize
    int64_t infinity
    int widens
    int64_t taken                # pieces that threads have taken
    int64_t compared             # pieces that were compared
    uint8_t differs


cdef int differ(const bits *one, const bits *other, uint64_t count, bits infinity) noexcept nogil:
    """Whether a bit differs, or one of the floats is a NaN."""
    # All bits but the sign. Shifted by hand, for Cython's integers have no suffix.
    cdef bits found = 0, unsigned = <bits>((<uint64_t>1 << (8 * sizeof(bits) - 1)) - 1)
    cdef uint64_t i
    for i in range(count):
        found |= one[i] ^ other[i]
        found |= <bits>((one[i] & unsigned) > infinity)
    return found != 0


cdef int widened_differ(const int32_t *one, const uint16_t *other, uint64_t count) noexcept nogil:
    """As `differ`, of float32 and bfloat16."""
    cdef uint64_t i
    cdef int32_t found = 0
    for i in range(count):
        found |= one[i] ^ <int32_t>(<unsigned int>other[i] << 16)
        found |= (other[i] & 0x7FFF) > 0x7F80
    return found != 0


cdef int piece_differs(const Job *self, uint64_t at, uint64_t nbytes) noexcept nogil:
    cdef const char *one = self.one + at
    cdef const char *other = self.other + (at // 2 if self.widens else at)
    if self.widens:
        return widened_differ(<const int32_t *>one, <const uint16_t *>other, nbytes // 4)
    if self.itemsize == 2:
        return differ[int16_t](
            <const int16_t *>one, <const int16_t *>other, nbytes // 2, <int16_t>self.infinity
        )
    if self.itemsize == 4:
        return differ[int32_t](
            <const int32_t *>one, <const int32_t *>other, nbytes // 4, <int32_t>self.infinity
        )
    return differ[int64_t](<const int64_t *>one, <const int64_t *>other, nbytes // 8, self.infinity)


cdef int64_t pieces_of(const Job *self) noexcept nogil:
    return <int64_t>((self.nbytes + PIECE_BYTES - 1) // PIECE_BYTES)


cdef void *compare_pieces(void *arg) noexcept nogil:
    """What each thread does: takes pieces until there are no more, or one differs."""
    cdef Job *self = <Job *>arg
    cdef uint64_t at
    while not gds_load_flag(&self.differs):
        at = <uint64_t>(gds_add(&self.taken, 1) - 1) * PIECE_BYTES
        if at >= self.nbytes:
            return NULL
        if piece_differs(self, at, min(self.nbytes - at, <uint64_t>PIECE_BYTES)):
            gds_store_flag(&self.differs, 1)
        gds_add(&self.compared, 1)
    return NULL


@cython.final
cdef class Comparison:
    """One comparison. Any threads may work at it, at the same time."""

    cdef Job job

    def __cinit__(self, one, other, nbytes, dtype, widens=False):
        """``one`` and ``other``: the addresses of ``nbytes`` each, of floats of ``dtype``, a key of
        ``FORMATS``. With ``widens`` the dtype is F32, and ``other`` has half of these bytes: bfloat16.
        Raises ValueError if the addresses are not aligned to the floats."""
        self.job.itemsize, self.job.infinity = FORMATS[dtype]
        self.job.widens = widens
        if (
            one % self.job.itemsize
            or other % (2 if widens else self.job.itemsize)
            or nbytes % self.job.itemsize
            or (widens and dtype != "F32")
        ):
            raise ValueError(f"{nbytes} bytes at {one:#x} and {other:#x} are no floats of {dtype}")
        self.job.one = <const char *><uintptr_t>one
        self.job.other = <const char *><uintptr_t>other
        self.job.nbytes = nbytes

    def work(self, int threads=1):
        """Compares pieces with up to so many threads, this one among them, until none is left to be
        taken. Needs no GIL."""
        with nogil:
            run_threads(compare_pieces, &self.job, min(<int64_t>threads, pieces_of(&self.job)))

    @property
    def equal(self):
        """Whether all pieces were compared, and found equal."""
        cdef Job *job = &self.job
        return not gds_load_flag(&job.differs) and gds_load(&job.compared) == pieces_of(job)
