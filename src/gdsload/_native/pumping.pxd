# What the pump's thread and the requests share: their structs, who frees them, and what one
# completion means. Everything here is used with the pump's lock held.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport free

from gdsload._native.atomics cimport gds_add, gds_store
from gdsload._native.engine cimport CACHED, DIRECT, Buffer, EngineOps, Read
from gdsload._native.populator cimport CPopulator
from gdsload._native.pthreads cimport (
    pthread_cond_destroy,
    pthread_cond_t,
    pthread_mutex_destroy,
    pthread_mutex_t,
    pthread_t,
)
from gdsload._native.region cimport CRegion, release_region
from gdsload._native.traffic cimport CTraffic, traffic_count

cdef enum:
    EINTR = 4
    EAGAIN = 11
    EFAULT = 14
    EBUSY = 16
    EINVAL = 22
    EOPNOTSUPP = 95
    ECANCELED = 125

cdef enum:
    # What became of a read.
    PENDING = 0
    DONE = 1
    FAILED = 2

cdef enum:
    # One refusal may be of one read, or of its memory: after so many in a row the file is read
    # through the page cache.
    MOST_REFUSED = 4
    BATCH = 64                 # reads handed to the engine, or taken from it, at a time
    # How long the pump looks away, at most. Completions wake it; only a new post, a cancellation
    # or populated memory has to wait for the end of a look.
    IDLE_WAIT_NS = 20000000
    ALONE_WAIT_NS = 5000000    # nobody waits: who comes shall not find what he wants there, untold
    LAST_WAIT_NS = 2000000     # the engine has room for a new post
    BUSY_WAIT_NS = 500000

cdef struct File:
    int buffered_fd
    int direct_fd              # -1: this file is read through the page cache
    int direct_slot            # the engine's numbers for the two
    int buffered_slot
    uint64_t block             # direct reads start and end on multiples of it
    int refused                # errno of the last direct read that was refused; 0: none was
    int refused_in_row         # direct reads refused since one brought bytes

cdef struct Op:
    uint64_t offset
    uint64_t length            # bytes to ask for: `wanted`, rounded up to the block for direct I/O
    uint64_t wanted            # bytes that must arrive
    uint64_t landed            # bytes that have
    char *address
    CRegion *region            # NULL where the memory is not the library's own
    CRequest *request
    int32_t file
    int32_t buffer             # index of the engine's registered buffer, or -1
    uint8_t state
    uint8_t direct
    uint8_t retried
    int32_t error
    int64_t posted_ns
    int64_t done_ns

# Somebody who waits for some ops of a request, on his own stack.
cdef struct Waiter:
    int first
    int last
    int left                   # of these, ops that have not settled
    Waiter *next

cdef struct CRequest:
    Op *ops
    int count
    File *files
    int file_count
    int next                   # first op that was never submitted
    int in_flight              # ops with the engine, staged, or waiting to be asked again
    int settled                # ops done or failed
    int failed
    int *order                 # ops in the order in which they settled
    int told                   # how many of them `check` has told of
    int posted
    int cancelled
    int ahead                  # nobody waits for it yet: it yields to loads
    int counted                # among the loads under way
    int orphaned               # nobody waits for it any more: the pump frees it when it is quiet
    int64_t direct_bytes
    int64_t buffered_bytes
    int64_t short_reads
    int64_t retries
    int64_t progress_ns        # when a byte last arrived
    CPopulator *populator
    Waiter *waiters
    CRequest *next_posted

cdef struct CPump:
    int64_t references         # the Python object and the thread
    EngineOps *ops
    void *engine
    int depth
    int in_flight
    pthread_mutex_t lock
    pthread_cond_t news        # for the pump's thread
    pthread_cond_t settled     # for whoever waits for reads
    pthread_t thread
    int running                # the thread was started
    int closing
    int finished               # the thread has left its loop
    int broken                 # -errno of an engine that cannot go on
    int fixed
    Buffer *buffers
    int buffer_count
    CRequest *first            # posted and not yet quiet, oldest first
    int fulfilled              # a waiter has all that it waits for
    Op **again                 # ops to be asked once more
    int again_count
    CTraffic *traffic          # of all pumps

cdef inline void count_load(CPump *self, CRequest *request) noexcept nogil:
    """Tells all pumps whether the request is a load under way. A read that is stuck in the kernel
    may keep a cancelled one posted for as long as it likes: nobody waits for that."""
    cdef int is_load = request.posted and not request.ahead and not request.cancelled
    if is_load != request.counted:
        traffic_count(self.traffic, is_load - request.counted)
        request.counted = is_load


cdef inline void cancel_request(CPump *self, CRequest *request) noexcept nogil:
    request.cancelled = 1
    count_load(self, request)


cdef inline void free_request(CRequest *request) noexcept nogil:
    cdef int i
    for i in range(request.count):
        if request.ops[i].region != NULL:
            release_region(request.ops[i].region)
    free(request.ops)
    free(request.files)
    free(request.order)
    free(request)


cdef inline void release_pump(CPump *self) noexcept nogil:
    if gds_add(&self.references, -1) > 0:
        return
    pthread_cond_destroy(&self.news)
    pthread_cond_destroy(&self.settled)
    pthread_mutex_destroy(&self.lock)
    free(self.buffers)
    free(self.again)
    free(self)


cdef inline void settle(CPump *self, Op *op, int error, int64_t now) noexcept nogil:
    cdef CRequest *request = op.request
    cdef Waiter *waiter = request.waiters
    cdef int place = <int>(op - request.ops)
    op.state = FAILED if error else DONE
    op.error = error
    op.done_ns = now
    request.order[request.settled] = place
    request.settled += 1
    request.in_flight -= 1
    if error:
        request.failed += 1
    while waiter != NULL:
        if waiter.first <= place <= waiter.last:
            waiter.left -= 1
            self.fulfilled |= waiter.left == 0
        waiter = waiter.next


cdef inline void ask_again(CPump *self, Op *op) noexcept nogil:
    self.again[self.again_count] = op
    self.again_count += 1


cdef inline int handle(CPump *self, Op *op, int64_t result, int64_t now) noexcept nogil:
    """What one completion means. Returns 1 where the pump had better wait a little."""
    cdef CRequest *request = op.request
    cdef File *file = &request.files[op.file]
    cdef uint64_t start = op.landed
    if op.direct:
        start &= ~(file.block - 1)
    if result > 0:
        gds_store(&request.progress_ns, now)
        if op.direct:
            file.refused_in_row = 0
        if start + <uint64_t>result > op.landed:
            if op.direct:
                request.direct_bytes += <int64_t>(start + <uint64_t>result - op.landed)
            else:
                request.buffered_bytes += <int64_t>(start + <uint64_t>result - op.landed)
            op.landed = start + <uint64_t>result
        elif op.direct:
            # Less than a block of progress: the rest has no place on this road.
            op.direct = 0
        if op.landed >= op.wanted:
            settle(self, op, 0, now)
        elif request.cancelled:
            settle(self, op, ECANCELED, now)
        else:
            # A short read is no end of file, and may hide an error that the next one shows.
            request.short_reads += 1
            ask_again(self, op)
        return 0
    if request.cancelled:
        settle(self, op, ECANCELED, now)
        return 0
    if result == -EINTR or result == -ECANCELED or result == -EAGAIN or result == -EBUSY:
        # Not an answer yet. It may be the same for ever: asked without a pause, it would burn a
        # processor until somebody calls it a stall.
        request.retries += 1
        ask_again(self, op)
        return 1
    if result < 0 and op.direct and (
        result == -EINVAL or result == -EOPNOTSUPP or result == -EFAULT
    ):
        # This filesystem, or this file, does not do direct I/O after all; or not at this place, or
        # not to this memory (EFAULT), which may be a device driver's.
        file.refused = <int>-result
        file.refused_in_row += 1
        if result == -EOPNOTSUPP or file.refused_in_row >= MOST_REFUSED:
            file.direct_fd = -1
        op.direct = 0
        ask_again(self, op)
        return 0
    if op.direct or (result < 0 and not op.retried):
        # One more try by the other road; a direct read that met the end of the file early is
        # judged by what the page cache has to say.
        op.retried = 1
        op.direct = 0
        request.retries += 1
        ask_again(self, op)
        return 0
    # Error 0 with bytes missing: the file ended before its header said.
    settle(self, op, <int>-result if result < 0 else -1, now)
    return 0


cdef inline void describe(Op *op, Read *read) noexcept nogil:
    """The read that brings what is still missing of an op."""
    cdef File *file = &op.request.files[op.file]
    cdef uint64_t start = op.landed
    if op.direct and file.direct_fd < 0:
        op.direct = 0
    if op.direct:
        start &= ~(file.block - 1)
        read.fd = file.direct_fd
        read.slot = file.direct_slot
        read.length = op.length - start
        read.way = DIRECT
    else:
        read.fd = file.buffered_fd
        read.slot = file.buffered_slot
        read.length = op.wanted - start
        read.way = CACHED
    read.address = op.address + start
    read.offset = op.offset + start
    read.buffer = op.buffer
    read.cookie = <uint64_t>op


cdef inline int64_t look_away(CPump *self, int staged, int *wanted) noexcept nogil:
    """How long to look away, and how many completions to sleep through: waking up for one costs
    several times as much as what is to be done about it.

    There is nothing to do before the engine has a quarter of its depth to spare, or somebody has
    the last op that he waits for.
    """
    cdef CRequest *request = self.first
    cdef Waiter *waiter
    cdef int under_way = self.in_flight + staged
    cdef int left = 0, held = 0, cancelled = 0
    while request != NULL:
        held |= request.next < request.count and not request.cancelled
        cancelled |= request.cancelled
        waiter = request.waiters
        while waiter != NULL:
            if left == 0 or waiter.left < left:
                left = waiter.left
            waiter = waiter.next
        request = request.next_posted
    wanted[0] = 1
    if under_way < self.depth and (held or left == 0 or cancelled):
        return BUSY_WAIT_NS
    if cancelled:
        return IDLE_WAIT_NS
    # With nothing left to hand over, only who waits counts.
    wanted[0] = self.depth // 4 if under_way >= self.depth else under_way
    if left > 0 and left < wanted[0]:
        wanted[0] = left
    wanted[0] = min(max(wanted[0], 1), <int>BATCH)
    if under_way < self.depth:
        return LAST_WAIT_NS
    return IDLE_WAIT_NS if left else ALONE_WAIT_NS


cdef inline int any_cancelled(CPump *self) noexcept nogil:
    cdef CRequest *request = self.first
    while request != NULL:
        if request.cancelled and request.in_flight > 0:
            return 1
        request = request.next_posted
    return 0
