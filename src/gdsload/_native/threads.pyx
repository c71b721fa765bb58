"""The ``threads`` engine: plain ``pread`` from a few native threads.

The road that works everywhere. Each worker takes one read, makes one ``pread`` and hands the
result back; continuing a short read is the pump's business, as for every engine.
"""

from cpython.pycapsule cimport PyCapsule_New
from libc.errno cimport errno
from libc.stdint cimport int64_t
from posix.unistd cimport pread

from gdsload._native.engine cimport Buffer, EngineOps, Read
from gdsload._native.workers cimport (
    Duty,
    cancel_workers,
    close_workers,
    open_workers,
    reap_from_workers,
    submit_to_workers,
)

cdef enum:
    # More threads than a fast disk needs to be busy, fewer than the kernel minds. depth bounds it.
    MOST_THREADS = 16


cdef int64_t read_one(void *owner, const Read *read) noexcept nogil:
    cdef int64_t got = pread(read.fd, read.address, read.length, <int64_t>read.offset)
    return got if got >= 0 else -errno


cdef int open_threads(
    void **engine, int depth, const Buffer *buffers, int count, int *fixed
) noexcept nogil:
    cdef Duty duty
    duty.owner, duty.begin, duty.read = NULL, NULL, read_one
    fixed[0] = 0
    return open_workers(engine, duty, depth, min(depth, <int>MOST_THREADS))


cdef EngineOps OPS
OPS.name = b"threads"
OPS.open = open_threads
OPS.submit = submit_to_workers
OPS.reap = reap_from_workers
OPS.cancel = cancel_workers
OPS.close = close_workers


def engine():
    """The engine's functions, as a capsule for the pump."""
    return PyCapsule_New(&OPS, b"gdsload.engine", NULL)
