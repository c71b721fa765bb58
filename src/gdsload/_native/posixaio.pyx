"""The ``aio`` engine: POSIX AIO of the C library.

glibc implements it with threads and serves the reads of one descriptor one after the other. So each
file is read through several duplicates of its descriptor; without them the depth would be one.
"""

from libc.errno cimport EAGAIN, EINPROGRESS, EINTR, ENOMEM, errno
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset
from posix.time cimport timespec
from posix.unistd cimport close

from gdsload._native.engine cimport Buffer, Completion, EngineOps, Read, engine_capsule

cdef extern from "<fcntl.h>" nogil:
    enum: F_DUPFD_CLOEXEC
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
    DUPLICATES = 8   # of each descriptor: the number of reads of one file that run in parallel
    FILES = 64       # files that have duplicates at a time; one without reads is replaced

cdef struct Duplicates:
    int slot       # the pump's number for the file, or -1: descriptors are reused, slots are not
    int fd[DUPLICATES]
    int next
    int in_flight

cdef struct Slot:
    aiocb block
    uint64_t cookie
    int file       # index into `files`; -1: the read uses the caller's own descriptor
    int busy

cdef struct PosixAio:
    int depth
    Slot *slots
    const aiocb **waiting   # argument of aio_suspend
    Duplicates files[FILES]


cdef int open_posix(
    void **engine, void *context, int depth, const Buffer *buffers, int count, int *fixed
) noexcept nogil:
    cdef PosixAio *self = <PosixAio *>calloc(1, sizeof(PosixAio))
    cdef int i
    fixed[0] = 0
    if self == NULL:
        return -ENOMEM
    self.depth = depth
    self.slots = <Slot *>calloc(depth, sizeof(Slot))
    self.waiting = <const aiocb **>calloc(depth, sizeof(void *))
    for i in range(FILES):
        self.files[i].slot = -1
    if self.slots == NULL or self.waiting == NULL:
        close_posix(self)
        return -ENOMEM
    engine[0] = self
    return 0


cdef void close_duplicates(Duplicates *one) noexcept nogil:
    cdef int i
    if one.slot < 0:
        return
    for i in range(DUPLICATES):
        if one.fd[i] >= 0:
            close(one.fd[i])
    one.slot = -1


cdef int find_duplicates(PosixAio *self, const Read *read) noexcept nogil:
    """Index of the descriptor's duplicates, which the first read makes; or -errno."""
    cdef int i, place = -1
    for i in range(FILES):
        if self.files[i].slot == read.slot:
            return i
        if self.files[i].in_flight == 0 and (place < 0 or self.files[i].slot < 0):
            place = i
    if place < 0:
        return -EAGAIN
    close_duplicates(&self.files[place])
    self.files[place].slot = read.slot
    self.files[place].next = 0
    for i in range(DUPLICATES):
        self.files[place].fd[i] = fcntl(read.fd, F_DUPFD_CLOEXEC, 0)
    return place


cdef int start(PosixAio *self, Slot *slot, const Read *read) noexcept nogil:
    cdef int place = -1
    cdef int fd = read.fd
    cdef Duplicates *one
    if read.slot >= 0:  # without a slot, a reused descriptor could mean another file
        place = find_duplicates(self, read)
        if place < 0:
            return place
        one = &self.files[place]
        fd = one.fd[one.next]
        one.next = (one.next + 1) % DUPLICATES
        if fd < 0:  # out of descriptors: share the first duplicate, or the file's own
            fd = one.fd[0] if one.fd[0] >= 0 else read.fd
    memset(&slot.block, 0, sizeof(aiocb))
    slot.block.aio_fildes = fd
    slot.block.aio_buf = read.address
    slot.block.aio_nbytes = read.length
    slot.block.aio_offset = <int64_t>read.offset
    if aio_read(&slot.block) != 0:
        return -errno
    slot.cookie = read.cookie
    slot.file = place
    slot.busy = 1
    if place >= 0:
        one.in_flight += 1
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
        if slot.file >= 0:
            self.files[slot.file].in_flight -= 1
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
        close_duplicates(&self.files[i])
    free(self.slots)
    free(self.waiting)
    free(self)


cdef EngineOps OPS = EngineOps(open_posix, submit_posix, reap_posix, cancel_posix, close_posix)


def engine():
    """The engine, as a capsule for the pump."""
    return engine_capsule(&OPS, NULL)
