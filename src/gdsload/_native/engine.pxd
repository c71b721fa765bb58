# Interface between the pump and its engines: C structs and six functions. An engine knows nothing
# of requests, and the pump knows nothing of io_uring. An engine is passed on as a capsule that
# holds an `EngineOps`; every call is made on the pump's own thread, without the GIL.

from cpython.pycapsule cimport PyCapsule_New, PyCapsule_SetContext
from libc.stdint cimport int64_t, uint64_t

from gdsload._native.memory cimport CRegion

cdef extern from "<errno.h>" nogil:
    enum: ECANCELED       # missing in Cython's libc.errno

cdef enum:
    # I/O mode of a read.
    DIRECT = 0
    BUFFERED = 1          # through the page cache
    BUFFERED_ASYNC = 2    # the same, but never copied by the submitting thread: on the way to a device
    MAPPED = 3            # `address` is in a private mapping of the file: its pages are read there
                          # (only by `threads`)

cdef enum:
    BATCH = 64            # reads submitted, or completions reaped, in one call
    # A result of -LOST - errno: the read failed, and its memory may still be written to. Only from
    # engines whose reads go to a slot of a staging ring, which is then not used again.
    LOST = 1048576

# Destination in a region of the library, whose pages may be untouched, and how they were touched.
cdef struct FreshMemory:
    CRegion *region
    int64_t huge_units    # units of UNIT_BYTES touched as a huge page, and as small ones
    int64_t small_units
    int64_t bounced_bytes # bytes that were read to a bounce buffer and copied
    int64_t present_bytes # of a mapping: bytes that were in the page cache, and were not read
    int cold              # of a mapping: whatever is in the page cache now was read for this request

cdef struct Read:
    int fd                # open descriptor to read from
    int file_number       # its number among the handles of cuFile, or -1
    int buffer            # index of the buffer passed to `open` that holds `address`, or -1
    int io_mode           # one of the above
    char *address
    FreshMemory *memory   # that `address` lies in; NULL: nothing is to be touched, or counted
    uint64_t length       # bytes, at most 1 GiB
    uint64_t offset       # bytes from the start of the file
    uint64_t cookie       # returned by reap

cdef struct Completion:
    uint64_t cookie
    int64_t result        # bytes read, or -errno, or -LOST - errno

cdef struct Buffer:
    char *address
    uint64_t length

cdef struct EngineOps:
    # Opens an engine for `depth` reads in flight and registers `buffers` where it can. `context` is
    # the context of the engine's capsule, NULL for most engines; a reference of the capsule goes over
    # to the engine, or is released. Returns 0 or -errno.
    int (*open)(
        void **engine, void *context, int depth, const Buffer *buffers, int count
    ) noexcept nogil
    # Accepts as many of the reads as it has room for. Returns their number, or -errno of the first.
    # An engine that reads here, and not later, accepts one read at a time, so that the pump collects
    # its result before the next one.
    int (*submit)(void *engine, const Read *reads, int count) noexcept nogil
    # Waits up to `wait_ns` for `wanted` of the completions in flight, then returns up to `room` of
    # them, or -errno. An engine that cannot wait for several may return earlier.
    int (*reap)(
        void *engine, Completion *out, int room, int wanted, int64_t wait_ns
    ) noexcept nogil
    # Asks for everything in flight to be cancelled. The completions still come through reap.
    void (*cancel)(void *engine) noexcept nogil
    # Frees the engine. Nothing is in flight, or `reap` or `take_back` has failed: then nobody asks
    # for the completions of the reads that still are. It may wait for those that end by themselves.
    # Others may write to their memory afterwards, which the pump never frees; nothing else that
    # they use may be freed.
    void (*close)(void *engine) noexcept nogil
    # Reclaims the slots of cancelled reads that have really ended by now: for the pump they ended
    # when they were cancelled. Returns the number of those that have not ended, or -errno of an
    # engine that failed for good. NULL: no read ends for the pump before it has really ended.
    int (*take_back)(void *engine) noexcept nogil

# Completions that wait for the next reap.
cdef struct Results:
    Completion *items
    int count

cdef inline void add_result(Results *self, uint64_t cookie, int64_t result) noexcept nogil:
    self.items[self.count].cookie = cookie
    self.items[self.count].result = result
    self.count += 1

cdef inline int take_results(Results *self, Completion *out, int room) noexcept nogil:
    """Moves the oldest results to `out`: their number."""
    cdef int i, count = min(self.count, room)
    for i in range(count):
        out[i] = self.items[i]
    self.count -= count
    for i in range(self.count):
        self.items[i] = self.items[i + count]
    return count

cdef inline object engine_capsule(EngineOps *ops, void *context):
    capsule = PyCapsule_New(ops, b"gdsload.engine", NULL)
    PyCapsule_SetContext(capsule, context)
    return capsule
