# The seam between the pump and its four engines: plain C structs and five functions, so that an
# engine knows nothing of requests and the pump nothing of io_uring. An engine is handed over as a
# capsule that holds an `EngineOps`; every call is made on the pump's own thread, without the GIL.

from libc.stdint cimport int32_t, int64_t, uint64_t

cdef enum:
    # How a read goes.
    DIRECT = 0
    CACHED = 1            # through the page cache: to be copied from there, if it is there
    APART = 2             # the same, and not by the thread that asks for it: many are copied at once

cdef struct Read:
    int fd                # open descriptor to read from
    int slot              # its place in the engine's table of registered files
    int buffer            # index of the registered buffer that holds `address`, or -1
    int way               # one of the above
    char *address
    uint64_t length       # bytes, at most 1 GiB
    uint64_t offset       # bytes from the start of the file
    uint64_t cookie       # handed back by reap

cdef struct Completion:
    uint64_t cookie
    int64_t result        # bytes read, or -errno

cdef struct Buffer:
    char *address
    uint64_t length

cdef struct EngineOps:
    const char *name
    # Opens an engine for `depth` reads in flight and registers `buffers` where it can.
    # Returns 0 or -errno. *fixed tells whether the buffers were registered.
    int (*open)(void **engine, int depth, const Buffer *buffers, int count, int *fixed) noexcept nogil
    # Takes over as many of the reads as there is room for: how many, or -errno of the first.
    int (*submit)(void *engine, const Read *reads, int count) noexcept nogil
    # Waits up to `wait_ns` for `wanted` completions, of those that are in flight, then hands out up
    # to `room`: how many, or -errno. With fewer nobody could do anything yet: an engine that can
    # sleeps through them. One that cannot may come back sooner.
    int (*reap)(
        void *engine, Completion *out, int room, int wanted, int64_t wait_ns
    ) noexcept nogil
    # Asks for everything in flight to be given up. The completions still come through reap.
    void (*cancel)(void *engine) noexcept nogil
    # Only with nothing in flight.
    void (*close)(void *engine) noexcept nogil
