"""The ``uring`` engine: io_uring through liburing, linked statically.

One thread owns the ring, as ``SINGLE_ISSUER`` and ``DEFER_TASKRUN`` require; older kernels get the
best flags that they know. Buffers are registered if the limit on locked memory allows it.
"""

from libc.errno cimport EAGAIN, EBUSY, EINTR, EINVAL, ENOMEM, ETIME
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset
from posix.uio cimport iovec

from gdsload._native.engine cimport (
    BATCH, BUFFERED_ASYNC, Buffer, Completion, EngineOps, Read, engine_capsule,
)
from gdsload._native.pthreads cimport sleep_ns

cdef extern from "<liburing.h>" nogil:
    enum:
        IORING_SETUP_SINGLE_ISSUER
        IORING_SETUP_DEFER_TASKRUN
        IORING_SETUP_COOP_TASKRUN
        IORING_ASYNC_CANCEL_ANY
        IORING_ASYNC_CANCEL_ALL
        IOSQE_ASYNC
    cdef struct io_uring:
        pass
    cdef struct io_uring_params:
        unsigned flags
    cdef struct io_uring_sqe:
        unsigned char flags
    cdef struct io_uring_cqe:
        uint64_t user_data
        int res
    cdef struct __kernel_timespec:
        int64_t tv_sec
        long long tv_nsec
    int io_uring_queue_init_params(unsigned entries, io_uring *, io_uring_params *)
    void io_uring_queue_exit(io_uring *)
    int io_uring_register_iowq_max_workers(io_uring *, unsigned *values)
    int io_uring_register_buffers(io_uring *, const iovec *, unsigned count)
    int io_uring_unregister_buffers(io_uring *)
    io_uring_sqe *io_uring_get_sqe(io_uring *)
    void io_uring_prep_read(io_uring_sqe *, int fd, void *, unsigned length, uint64_t offset)
    void io_uring_prep_read_fixed(
        io_uring_sqe *, int fd, void *, unsigned length, uint64_t offset, int buffer
    )
    void io_uring_prep_cancel64(io_uring_sqe *, uint64_t user_data, int flags)
    void io_uring_sqe_set_data64(io_uring_sqe *, uint64_t)
    int io_uring_submit(io_uring *)
    int io_uring_submit_and_wait_timeout(
        io_uring *, io_uring_cqe **, unsigned wait_nr, __kernel_timespec *, void *sigmask
    )
    unsigned io_uring_peek_batch_cqe(io_uring *, io_uring_cqe **, unsigned count)
    void io_uring_cq_advance(io_uring *, unsigned count)

cdef enum:
    BACK_OFF_NS = 1000000
    # Kernel threads for buffered reads: half of the depth, within these bounds.
    DISK_WORKERS = 16
    MOST_WORKERS = 128

cdef uint64_t CANCEL_COOKIE = 0xFFFFFFFFFFFFFFFF

cdef struct Uring:
    io_uring ring
    int depth
    int in_flight
    int fixed_buffers


cdef int open_ring(io_uring *ring, int depth) noexcept nogil:
    """Opens the ring with the best flags that this kernel knows: 0, or -errno."""
    cdef io_uring_params params
    cdef unsigned[3] wanted
    cdef int error = 0
    cdef int i
    wanted[0] = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN
    wanted[1] = IORING_SETUP_COOP_TASKRUN
    wanted[2] = 0
    for i in range(3):
        memset(&params, 0, sizeof(params))
        params.flags = wanted[i]
        error = io_uring_queue_init_params(depth, ring, &params)
        if error != -EINVAL:  # a flag this kernel does not know
            break
    return error


cdef int open_uring(
    void **engine, void *context, int depth, const Buffer *buffers, int count
) noexcept nogil:
    cdef Uring *self = <Uring *>calloc(1, sizeof(Uring))
    cdef iovec *vectors
    cdef unsigned[2] workers
    cdef int error, i
    if self == NULL:
        return -ENOMEM
    # One more than depth: room for a cancellation.
    error = open_ring(&self.ring, depth + 1)
    if error < 0:
        free(self)
        return error
    self.depth = depth
    workers[0] = min(max(depth // 2, <int>DISK_WORKERS), <int>MOST_WORKERS)
    workers[1] = 0  # unchanged
    io_uring_register_iowq_max_workers(&self.ring, workers)
    if count > 0:
        vectors = <iovec *>calloc(count, sizeof(iovec))
        if vectors != NULL:
            for i in range(count):
                vectors[i].iov_base = buffers[i].address
                vectors[i].iov_len = buffers[i].length
            # Refused if RLIMIT_MEMLOCK is small (8 MiB for an ordinary user): plain reads then.
            self.fixed_buffers = io_uring_register_buffers(&self.ring, vectors, count) == 0
            free(vectors)
    engine[0] = self
    return 0


cdef int submit_uring(void *engine, const Read *reads, int count) noexcept nogil:
    cdef Uring *self = <Uring *>engine
    cdef io_uring_sqe *sqe
    cdef const Read *read
    cdef int taken = 0
    while taken < count and self.in_flight < self.depth:
        sqe = io_uring_get_sqe(&self.ring)
        if sqe == NULL:
            break
        read = &reads[taken]
        if self.fixed_buffers and read.buffer >= 0:
            io_uring_prep_read_fixed(
                sqe, read.fd, read.address, <unsigned>read.length, read.offset, read.buffer
            )
        else:
            io_uring_prep_read(sqe, read.fd, read.address, <unsigned>read.length, read.offset)
        if read.io_mode == BUFFERED_ASYNC:
            # By the kernel's workers: cached bytes would be copied inside the submission.
            sqe.flags |= IOSQE_ASYNC
        io_uring_sqe_set_data64(sqe, read.cookie)
        self.in_flight += 1
        taken += 1
    # Entries of a partial or refused submission stay in the queue; reap submits them again.
    io_uring_submit(&self.ring)
    return taken


cdef int reap_uring(
    void *engine, Completion *out, int room, int wanted, int64_t wait_ns
) noexcept nogil:
    cdef Uring *self = <Uring *>engine
    cdef io_uring_cqe *cqes[BATCH]
    cdef __kernel_timespec wait
    cdef int error, taken = 0
    cdef unsigned seen, i
    wait.tv_sec = wait_ns // 1000000000
    wait.tv_nsec = wait_ns % 1000000000
    error = io_uring_submit_and_wait_timeout(&self.ring, cqes, <unsigned>wanted, &wait, NULL)
    if error == -EAGAIN or error == -EBUSY or error == -ENOMEM:
        # The kernel is out of room and returns at once: without a pause this would busy-loop. It is
        # no failure of the engine: reads in flight continue, and their memory must be freed.
        sleep_ns(BACK_OFF_NS)
    elif error < 0 and error != -ETIME and error != -EINTR:
        return error
    seen = io_uring_peek_batch_cqe(&self.ring, cqes, min(room, <int>BATCH))
    for i in range(seen):
        if cqes[i].user_data == CANCEL_COOKIE:
            continue
        out[taken].cookie = cqes[i].user_data
        out[taken].result = cqes[i].res
        taken += 1
    io_uring_cq_advance(&self.ring, seen)
    self.in_flight -= taken
    return taken


cdef void cancel_uring(void *engine) noexcept nogil:
    cdef Uring *self = <Uring *>engine
    cdef io_uring_sqe *sqe = io_uring_get_sqe(&self.ring)
    if sqe == NULL:
        return
    io_uring_prep_cancel64(sqe, 0, IORING_ASYNC_CANCEL_ANY | IORING_ASYNC_CANCEL_ALL)
    io_uring_sqe_set_data64(sqe, CANCEL_COOKIE)
    io_uring_submit(&self.ring)


cdef void close_uring(void *engine) noexcept nogil:
    cdef Uring *self = <Uring *>engine
    if self.fixed_buffers and self.in_flight == 0:
        # A forked child may hold the descriptor of the ring: the memory would stay pinned with it.
        io_uring_unregister_buffers(&self.ring)
    io_uring_queue_exit(&self.ring)
    free(self)


cdef EngineOps OPS = EngineOps(
    open_uring, submit_uring, reap_uring, cancel_uring, close_uring, NULL
)


def engine():
    """The engine, as a capsule for the pump."""
    return engine_capsule(&OPS, NULL)
