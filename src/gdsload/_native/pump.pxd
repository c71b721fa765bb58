# Structs that the pump's thread and its requests share. Fields are used with the lock
# of their struct held, and those of a request with the lock of its pump.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport free

from gdsload._native.atomics cimport gds_add
from gdsload._native.engine cimport BATCH, Buffer, Completion, EngineOps, FreshMemory, Read
from gdsload._native.memory cimport release_region
from gdsload._native.pthreads cimport (
    pthread_cond_destroy, pthread_cond_t, pthread_mutex_destroy, pthread_mutex_lock,
    pthread_mutex_t, pthread_mutex_unlock, pthread_t,
)

cdef enum:
    # State of a read.
    PENDING = 0
    DONE = 1
    FAILED = 2

cdef struct File:
    int buffered_fd
    int direct_fd              # -1: this file is read through the page cache
    int direct_number          # the engine's file numbers for the two
    int buffered_number
    uint64_t block             # direct reads start and end on multiples of it
    int refused                # errno of the last direct read that was refused; 0: none
    int refused_in_row         # direct reads refused since one succeeded

cdef struct Op:
    uint64_t offset
    uint64_t length            # bytes to read: `wanted`, rounded up to the block for direct I/O
    uint64_t wanted            # bytes that must arrive
    uint64_t arrived
    char *address
    FreshMemory memory         # its region is NULL if the memory is not the library's own
    CRequest *request
    int32_t file
    int32_t buffer             # index of the engine's registered buffer, or -1
    uint8_t state
    uint8_t io_mode            # what was asked for: DIRECT, BUFFERED or MAPPED
    uint8_t direct             # the next read of it is direct
    uint8_t retried
    int32_t error
    int64_t posted_ns
    int64_t done_ns

# A thread that waits for some ops of a request; lives on its stack.
cdef struct Waiter:
    int first
    int last
    int left                   # ops among them that have not settled
    Waiter *next

cdef struct CRequest:
    Op *ops
    int count
    File *files
    int file_count
    int next                   # first op that was never submitted
    int in_flight              # ops in the engine, in the next submission, or to be retried
    int settled                # ops done or failed
    int failed
    int *order                 # ops in the order in which they settled
    int reported               # of these, the ones that `take_settled` has returned
    int posted
    int cancelled
    int ahead                  # a prefetch without a waiter: it yields to loads
    int counted                # among the loads under way
    int orphaned               # its object is gone: the pump frees it when it is drained
    int64_t direct_bytes
    int64_t buffered_bytes
    int64_t short_reads
    int64_t retries
    int64_t progress_ns        # when a byte last arrived, or the first of its reads in flight began
    Waiter *waiters
    CRequest *next_posted

# Bandwidth limit of one class of reads.
cdef struct Limit:
    int64_t rate               # bytes per second; 0: no limit
    int64_t free_ns            # when the next read may start

# Shared by all pumps of the process. There are two classes of reads: loads and prefetches. While a
# load is under way, in whichever pump, a pump has at most one read of a prefetch in flight, so that
# the prefetch still ends. Prefetches may be limited to a rate, and both classes together.
cdef struct CThrottle:
    pthread_mutex_t lock
    int64_t loads              # requests of loads under way
    Limit all
    Limit ahead

cdef struct CPump:
    int64_t references         # the Python object and the thread
    EngineOps *ops
    void *engine
    void *context              # of the engine's capsule, for `open`
    int depth
    int window                 # reads that may be in flight now: up to `depth`
    int64_t shrunk_ns          # when the window last became smaller
    int in_flight
    pthread_mutex_t lock
    pthread_cond_t wakeup      # for the pump's thread
    pthread_cond_t settled     # for threads that wait for reads
    pthread_t thread
    int running                # the thread was started
    int closing
    int idle                   # no read is in flight, or was given up: the engine closes soon
    int finished               # the thread has left its loop
    int broken                 # -errno of an engine that failed for good
    Buffer *buffers
    int buffer_count
    CRequest *first            # posted and not yet drained, oldest first
    int fulfilled              # a waiter has everything it waits for
    Op **again                 # ops to be submitted once more
    int again_count
    int64_t progress_ns        # when a byte of any request last arrived
    int64_t cancelled          # requests, in all
    int64_t idle_wait_ns       # longest sleep while the next read may not start yet
    CThrottle *throttle
    Read submission[BATCH]     # the next one
    int submission_count
    Completion completions[BATCH]

cdef inline void count_load(CPump *self, CRequest *request) noexcept nogil:
    """Updates the number of loads under way. A cancelled request does not count: a read that is
    stuck in the kernel may keep it posted for any time."""
    cdef int is_load = request.posted and not request.ahead and not request.cancelled
    if is_load != request.counted:
        pthread_mutex_lock(&self.throttle.lock)
        self.throttle.loads += is_load - request.counted
        pthread_mutex_unlock(&self.throttle.lock)
        request.counted = is_load

cdef inline void cancel_request(CPump *self, CRequest *request) noexcept nogil:
    request.cancelled = 1
    self.cancelled += 1
    count_load(self, request)

cdef inline void free_request(CRequest *request) noexcept nogil:
    cdef int i
    for i in range(request.count):
        if request.ops[i].memory.region != NULL:
            release_region(request.ops[i].memory.region)
    free(request.ops)
    free(request.files)
    free(request.order)
    free(request)

cdef inline void release_pump(CPump *self) noexcept nogil:
    if gds_add(&self.references, -1) > 0:
        return
    pthread_cond_destroy(&self.wakeup)
    pthread_cond_destroy(&self.settled)
    pthread_mutex_destroy(&self.lock)
    free(self.buffers)
    free(self.again)
    free(self)
