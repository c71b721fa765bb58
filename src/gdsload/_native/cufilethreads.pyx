"""The engine of ``gds_mt``: ``cuFileRead`` from several native threads.

Each worker makes the device's context current once, then takes one read after the other. cuFile is
told the base that was registered and the place in it, as it wants to be. What a call answered is
handed back as bytes or as a negative code: an errno, or above 5000 one of cuFile's own.
"""

from cpython.pycapsule cimport PyCapsule_New
from libc.errno cimport errno
from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free

from gdsload._native.cuda cimport relax
from gdsload._native.cufile cimport CFiles, file_handle, release_files, retain_files
from gdsload._native.engine cimport Buffer, EngineOps, Read
from gdsload._native.workers cimport (
    ENOMEM,
    Duty,
    Workers,
    cancel_workers,
    close_workers,
    open_workers,
    reap_from_workers,
    submit_to_workers,
)

cdef enum:
    EIO = 5
    EBADF = 9
    EINVAL = 22

cdef struct Slots:
    CFiles *files
    char *base                   # what was registered, and where cuFile counts from


cdef void enter_context(void *owner) noexcept nogil:
    cdef Slots *self = <Slots *>owner
    # Where this fails, every read will say so.
    self.files.cuda.set_current(self.files.context)
    relax(self.files.cuda)


cdef int64_t read_one(void *owner, const Read *read) noexcept nogil:
    cdef Slots *self = <Slots *>owner
    cdef void *handle = file_handle(self.files, read.slot)
    cdef int64_t got
    if handle == NULL:
        return -EBADF
    (&errno)[0] = 0
    got = self.files.api.read(
        handle, self.base, read.length, <int64_t>read.offset, read.address - self.base
    )
    if got == -1:
        # The errno may be one of cuFile's own codes, and is not always set.
        return -errno if errno > 0 else -EIO
    return got


cdef void release(Slots *self) noexcept nogil:
    release_files(self.files)
    free(self)


cdef int open_pool(
    void **engine, int depth, const Buffer *buffers, int count, int *fixed
) noexcept nogil:
    cdef Slots *self
    cdef Duty duty
    cdef int error
    if count != 2:  # the ring, and the table of files
        return -EINVAL
    self = <Slots *>calloc(1, sizeof(Slots))
    if self == NULL:
        return -ENOMEM
    fixed[0] = 1
    self.base = buffers[0].address
    self.files = <CFiles *>buffers[1].address
    retain_files(self.files)
    duty.owner, duty.begin, duty.read = self, enter_context, read_one
    # Two reads wait for each that is with cuFile, so that no worker does.
    error = open_workers(engine, duty, depth, (depth + 2) // 3)
    if error != 0:
        release(self)
    return error


cdef void close_pool(void *engine) noexcept nogil:
    cdef Slots *self = <Slots *>(<Workers *>engine).duty.owner
    close_workers(engine)
    release(self)


cdef EngineOps OPS
OPS.name = b"cufile threads"
OPS.open = open_pool
OPS.submit = submit_to_workers
OPS.reap = reap_from_workers
OPS.cancel = cancel_workers
OPS.close = close_pool


def engine():
    """The engine's functions, as a capsule for a stage."""
    return PyCapsule_New(&OPS, b"gdsload.engine", NULL)
