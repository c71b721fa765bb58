"""The ``linuxaio`` engine: the kernel's own AIO, by system call.

Docker's default seccomp profile allows it, but blocks io_uring. libaio is not used: its
``io_event.res`` is unsigned, so a failed read can look successful; the kernel's own struct is
signed.
"""

from libc.errno cimport EAGAIN, EINTR, ENOMEM, errno
from libc.stdint cimport int16_t, int64_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from posix.time cimport timespec

from gdsload._native.engine cimport (
    BATCH, DIRECT, Buffer, Completion, EngineOps, Read, engine_capsule,
)

cdef extern from "<sys/syscall.h>" nogil:
    enum:
        SYS_io_setup
        SYS_io_submit
        SYS_io_getevents
        SYS_io_cancel
        SYS_io_destroy

cdef extern from "<unistd.h>" nogil:
    long syscall(long number, ...)

cdef extern from "<linux/aio_abi.h>" nogil:
    enum:
        IOCB_CMD_PREAD
    cdef struct iocb:
        uint64_t aio_data
        uint16_t aio_lio_opcode
        int16_t aio_reqprio
        uint32_t aio_fildes
        uint64_t aio_buf
        uint64_t aio_nbytes
        int64_t aio_offset
    cdef struct io_event:
        uint64_t data
        uint64_t obj
        int64_t res
        int64_t res2

cdef struct LinuxAio:
    unsigned long context
    iocb *blocks         # one for each read in flight
    int *unused          # stack of blocks that are free
    int unused_count
    iocb **batch         # argument of the next io_submit


cdef int open_aio(
    void **engine, void *context, int depth, const Buffer *buffers, int count
) noexcept nogil:
    cdef LinuxAio *self = <LinuxAio *>calloc(1, sizeof(LinuxAio))
    cdef int i
    if self == NULL:
        return -ENOMEM
    self.blocks = <iocb *>calloc(depth, sizeof(iocb))
    self.unused = <int *>malloc(depth * sizeof(int))
    self.batch = <iocb **>malloc(depth * sizeof(void *))
    if self.blocks == NULL or self.unused == NULL or self.batch == NULL:
        free_aio(self)
        return -ENOMEM
    for i in range(depth):
        self.unused[i] = i
    self.unused_count = depth
    # EAGAIN here: fs.aio-max-nr is used up.
    if syscall(SYS_io_setup, <long>depth, &self.context) < 0:
        i = -errno
        free_aio(self)
        return i
    engine[0] = self
    return 0


cdef int submit_aio(void *engine, const Read *reads, int count) noexcept nogil:
    cdef LinuxAio *self = <LinuxAio *>engine
    cdef iocb *block
    cdef long accepted
    cdef int i
    count = min(count, self.unused_count)
    if count == 0:
        return 0
    # The kernel makes a buffered read inside the submission. It is submitted alone: the next one may
    # be cancelled meanwhile, and its descriptor closed.
    for i in range(count):
        if reads[i].io_mode != DIRECT:
            count = max(i, 1)
            break
    for i in range(count):
        block = &self.blocks[self.unused[self.unused_count - 1 - i]]
        block.aio_data = reads[i].cookie
        block.aio_lio_opcode = IOCB_CMD_PREAD
        block.aio_fildes = <uint32_t>reads[i].fd
        block.aio_buf = <uint64_t><uintptr_t>reads[i].address
        block.aio_nbytes = reads[i].length
        block.aio_offset = <int64_t>reads[i].offset
        self.batch[i] = block
    accepted = syscall(SYS_io_submit, self.context, <long>count, self.batch)
    if accepted < 0:
        return 0 if errno == EAGAIN or errno == EINTR else -errno
    self.unused_count -= <int>accepted
    return <int>accepted


cdef int reap_aio(
    void *engine, Completion *out, int room, int wanted, int64_t wait_ns
) noexcept nogil:
    cdef LinuxAio *self = <LinuxAio *>engine
    cdef io_event events[BATCH]
    cdef timespec wait
    cdef long seen
    cdef int i
    wait.tv_sec = wait_ns // 1000000000
    wait.tv_nsec = wait_ns % 1000000000
    room = min(room, <int>BATCH)
    wanted = min(wanted, room)
    seen = syscall(
        SYS_io_getevents, self.context, <long>(wanted if wait_ns else 0), <long>room, events, &wait
    )
    if seen < 0:
        return 0 if errno == EINTR else -errno
    for i in range(<int>seen):
        out[i].cookie = events[i].data
        out[i].result = events[i].res
        self.unused[self.unused_count] = <int>(<iocb *><uintptr_t>events[i].obj - self.blocks)
        self.unused_count += 1
    return <int>seen


cdef void cancel_aio(void *engine) noexcept nogil:
    """Does nothing: the kernel cannot cancel reads of files, so they are drained."""


cdef void free_aio(LinuxAio *self) noexcept nogil:
    free(self.blocks)
    free(self.unused)
    free(self.batch)
    free(self)


cdef void close_aio(void *engine) noexcept nogil:
    cdef LinuxAio *self = <LinuxAio *>engine
    syscall(SYS_io_destroy, self.context)
    free_aio(self)


cdef EngineOps OPS = EngineOps(open_aio, submit_aio, reap_aio, cancel_aio, close_aio, NULL)


def engine():
    """The engine, as a capsule for the pump."""
    return engine_capsule(&OPS, NULL)
