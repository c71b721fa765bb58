"""The ``aio`` engine: POSIX AIO, as the C library has it.

glibc serves it with threads of its own and reads the requests of one descriptor one after the
other, so each file is read through several duplicates of its descriptor; without them this engine
has a depth of one.
"""

from cpython.pycapsule cimport PyCapsule_New
from libc.errno cimport errno
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset
from posix.time cimport timespec
from posix.unistd cimport close

from gdsload._native.engine cimport Buffer, Completion, EngineOps, Read

cdef extern from "<fcntl.h>" nogil:
    enum:
        F_DUPFD_CLOEXEC
    int fcntl(int fd, int command, ...)

cdef extern from "<aio.h>" nogil:
    cdef struct aiocb:
        int aio_fildes
        void *aio_buf
        size_t aio_nbytes
        int64_t aio_offset
    int aio_read(aiocb *)
    int aio_error(const aiocb *)
    ssize_t aio_return(aiocb *)
    int aio_suspend(const aiocb *const *, int count, const timespec *)
    int aio_cancel(int fd, aiocb *)

cdef enum:
    EAGAIN = 11
    EINPROGRESS = 115
    EINTR = 4
    ENOMEM = 12
    WAYS = 8       # duplicates of each descriptor: as many reads of one file run side by side
    FILES = 64     # files that have duplicates at a time; the oldest unused gives up its place

cdef struct Ways:
    int slot       # the caller's number for the file, or -1: descriptors are used again, slots not
    int way[WAYS]
    int next_way
    int in_flight

cdef struct Slot:
    aiocb block
    uint64_t cookie
    int ways       # index into `files`; -1: the read goes by the caller's own descriptor
    int busy

cdef struct PosixAio:
    int depth
    int in_flight
    Slot *slots
    const aiocb **waiting   # what aio_suspend is handed
    Ways files[FILES]


cdef int open_posix(
    void **engine, int depth, const Buffer *buffers, int count, int *fixed
) noexcept nogil:
    cdef PosixAio *self = <PosixAio *>calloc(1, sizeof(PosixAio))
    cdef int i
    fixed[0] = 0
    if self == NULL:
        return -ENOMEM
    self.depth = depth
    self.slots = <Slot *>calloc(depth, sizeof(Slot))
    self.waiting = <const aiocb **>calloc(depth, sizeof(void *))
    if self.slots == NULL or self.waiting == NULL:
        free(self.slots)
        free(self.waiting)
        free(self)
        return -ENOMEM
    for i in range(FILES):
        self.files[i].slot = -1
    engine[0] = self
    return 0


cdef void close_ways(Ways *ways) noexcept nogil:
    cdef int i
    if ways.slot < 0:
        return
    for i in range(WAYS):
        if ways.way[i] >= 0:
            close(ways.way[i])
    ways.slot = -1


cdef int find_ways(PosixAio *self, const Read *read) noexcept nogil:
    """The duplicates of the descriptor, made on first sight: their index, or -errno."""
    cdef int i, place = -1
    for i in range(FILES):
        if self.files[i].slot == read.slot:
            return i
        if self.files[i].in_flight == 0 and (place < 0 or self.files[i].slot < 0):
            place = i
    if place < 0:
        return -EAGAIN
    close_ways(&self.files[place])
    self.files[place].slot = read.slot
    self.files[place].next_way = 0
    for i in range(WAYS):
        self.files[place].way[i] = fcntl(read.fd, F_DUPFD_CLOEXEC, 0)
    return place


cdef int start(PosixAio *self, Slot *slot, const Read *read) noexcept nogil:
    cdef int place = -1
    cdef int fd = read.fd
    cdef Ways *ways
    if read.slot >= 0:  # without a slot nothing tells the file from the next with its descriptor
        place = find_ways(self, read)
        if place < 0:
            return place
        ways = &self.files[place]
        fd = ways.way[ways.next_way]
        ways.next_way = (ways.next_way + 1) % WAYS
        if fd < 0:  # no descriptor was left for this duplicate: share the first, or the file's
            fd = ways.way[0] if ways.way[0] >= 0 else read.fd
    memset(&slot.block, 0, sizeof(aiocb))
    slot.block.aio_fildes = fd
    slot.block.aio_buf = read.address
    slot.block.aio_nbytes = read.length
    slot.block.aio_offset = <int64_t>read.offset
    if aio_read(&slot.block) != 0:
        return -errno
    slot.cookie = read.cookie
    slot.ways = place
    slot.busy = 1
    if place >= 0:
        ways.in_flight += 1
    self.in_flight += 1
    return 0


cdef int submit_posix(void *engine, const Read *reads, int count) noexcept nogil:
    cdef PosixAio *self = <PosixAio *>engine
    cdef int taken = 0
    cdef int i, error
    for i in range(self.depth):
        if taken == count:
            break
        if self.slots[i].busy:
            continue
        error = start(self, &self.slots[i], &reads[taken])
        if error == -EAGAIN:
            break
        if error < 0:
            return taken if taken else error
        taken += 1
    return taken


cdef int reap_posix(
    void *engine, Completion *out, int room, int wanted, int64_t wait_ns
) noexcept nogil:
    cdef PosixAio *self = <PosixAio *>engine
    cdef Slot *slot
    cdef timespec wait
    cdef int i, error, count = 0, taken = 0
    for i in range(self.depth):
        if self.slots[i].busy:
            self.waiting[count] = &self.slots[i].block
            count += 1
    if count == 0:
        return 0
    wait.tv_sec = wait_ns // 1000000000
    wait.tv_nsec = wait_ns % 1000000000
    if aio_suspend(self.waiting, count, &wait) != 0:
        return 0 if errno == EAGAIN or errno == EINTR else -errno
    for i in range(self.depth):
        slot = &self.slots[i]
        if taken == room:
            break
        if not slot.busy:
            continue
        error = aio_error(&slot.block)
        if error == EINPROGRESS:
            continue
        out[taken].cookie = slot.cookie
        out[taken].result = aio_return(&slot.block)
        if error != 0:
            out[taken].result = -error
        slot.busy = 0
        if slot.ways >= 0:
            self.files[slot.ways].in_flight -= 1
        self.in_flight -= 1
        taken += 1
    return taken


cdef void cancel_posix(void *engine) noexcept nogil:
    cdef PosixAio *self = <PosixAio *>engine
    cdef int i
    for i in range(self.depth):
        if self.slots[i].busy:
            aio_cancel(self.slots[i].block.aio_fildes, &self.slots[i].block)


cdef void close_posix(void *engine) noexcept nogil:
    cdef PosixAio *self = <PosixAio *>engine
    cdef int i
    for i in range(FILES):
        close_ways(&self.files[i])
    free(self.slots)
    free(self.waiting)
    free(self)


cdef EngineOps OPS
OPS.name = b"aio"
OPS.open = open_posix
OPS.submit = submit_posix
OPS.reap = reap_posix
OPS.cancel = cancel_posix
OPS.close = close_posix


def engine():
    """The engine's functions, as a capsule for the pump."""
    return PyCapsule_New(&OPS, b"gdsload.engine", NULL)
