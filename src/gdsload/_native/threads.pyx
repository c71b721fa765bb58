"""The ``threads`` engine: plain ``pread`` from a few native threads.

The road that works everywhere. Each worker takes one read, makes one ``pread`` and hands the
result back; continuing a short read is the pump's business, as for every engine.
"""

from cpython.pycapsule cimport PyCapsule_New
from libc.errno cimport errno
from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free, malloc
from posix.time cimport timespec
from posix.unistd cimport pread

from gdsload._native.engine cimport Buffer, Completion, EngineOps, Read
from gdsload._native.pthreads cimport (
    deadline_in,
    monotonic_cond_init,
    pthread_cond_broadcast,
    pthread_cond_destroy,
    pthread_cond_signal,
    pthread_cond_t,
    pthread_cond_timedwait,
    pthread_cond_wait,
    pthread_join,
    pthread_mutex_destroy,
    pthread_mutex_init,
    pthread_mutex_lock,
    pthread_mutex_t,
    pthread_mutex_unlock,
    pthread_t,
    start_quiet_thread,
)

cdef enum:
    # More threads than a fast disk needs to be busy, fewer than the kernel minds. depth bounds it.
    MOST_THREADS = 16

cdef struct Threads:
    pthread_mutex_t lock
    pthread_cond_t work          # a read waits for a worker, or it is time to go
    pthread_cond_t finished      # a completion waits for reap
    Read *waiting                # ring of `depth` reads
    int first_waiting
    int waiting_count
    Completion *done             # ring of `depth` completions
    int first_done
    int done_count
    int wanted                   # completions that reap waits for
    int in_flight                # taken by submit, not yet handed out by reap
    int depth
    int closing
    int workers
    pthread_t worker[MOST_THREADS]


cdef void *serve(void *arg) noexcept nogil:
    cdef Threads *self = <Threads *>arg
    cdef Read read
    cdef int64_t result
    pthread_mutex_lock(&self.lock)
    while True:
        while self.waiting_count == 0 and not self.closing:
            pthread_cond_wait(&self.work, &self.lock)
        if self.waiting_count == 0:
            break
        read = self.waiting[self.first_waiting]
        self.first_waiting = (self.first_waiting + 1) % self.depth
        self.waiting_count -= 1
        pthread_mutex_unlock(&self.lock)
        result = pread(read.fd, read.address, read.length, <int64_t>read.offset)
        if result < 0:
            result = -errno
        pthread_mutex_lock(&self.lock)
        self.done[(self.first_done + self.done_count) % self.depth].cookie = read.cookie
        self.done[(self.first_done + self.done_count) % self.depth].result = result
        self.done_count += 1
        if self.done_count >= self.wanted:
            pthread_cond_signal(&self.finished)
    pthread_mutex_unlock(&self.lock)
    return NULL


cdef int open_threads(
    void **engine, int depth, const Buffer *buffers, int count, int *fixed
) noexcept nogil:
    cdef Threads *self = <Threads *>calloc(1, sizeof(Threads))
    cdef int error
    fixed[0] = 0
    if self == NULL:
        return -12  # ENOMEM
    self.depth = depth
    self.waiting = <Read *>malloc(depth * sizeof(Read))
    self.done = <Completion *>malloc(depth * sizeof(Completion))
    if self.waiting == NULL or self.done == NULL:
        free(self.waiting)
        free(self.done)
        free(self)
        return -12  # ENOMEM
    pthread_mutex_init(&self.lock, NULL)
    monotonic_cond_init(&self.work)
    monotonic_cond_init(&self.finished)
    while self.workers < depth and self.workers < MOST_THREADS:
        error = start_quiet_thread(&self.worker[self.workers], serve, self)
        if error != 0:
            break
        self.workers += 1
    if self.workers == 0:
        close_threads(self)
        return -error
    engine[0] = self
    return 0


cdef int submit_threads(void *engine, const Read *reads, int count) noexcept nogil:
    cdef Threads *self = <Threads *>engine
    cdef int taken = 0
    pthread_mutex_lock(&self.lock)
    while taken < count and self.in_flight < self.depth:
        self.waiting[(self.first_waiting + self.waiting_count) % self.depth] = reads[taken]
        self.waiting_count += 1
        self.in_flight += 1
        taken += 1
        pthread_cond_signal(&self.work)
    pthread_mutex_unlock(&self.lock)
    return taken


cdef int reap_threads(
    void *engine, Completion *out, int room, int wanted, int64_t wait_ns
) noexcept nogil:
    cdef Threads *self = <Threads *>engine
    cdef timespec until
    cdef int taken = 0
    deadline_in(&until, wait_ns)
    pthread_mutex_lock(&self.lock)
    if wanted > self.in_flight:
        wanted = self.in_flight
    self.wanted = wanted
    while self.done_count < wanted:
        if pthread_cond_timedwait(&self.finished, &self.lock, &until) != 0:
            break
    while taken < room and self.done_count > 0:
        out[taken] = self.done[self.first_done]
        self.first_done = (self.first_done + 1) % self.depth
        self.done_count -= 1
        self.in_flight -= 1
        taken += 1
    pthread_mutex_unlock(&self.lock)
    return taken


cdef void cancel_threads(void *engine) noexcept nogil:
    """What no worker has taken yet completes as cancelled; a pread under way runs to its end."""
    cdef Threads *self = <Threads *>engine
    pthread_mutex_lock(&self.lock)
    while self.waiting_count > 0:
        self.done[(self.first_done + self.done_count) % self.depth].cookie = (
            self.waiting[self.first_waiting].cookie
        )
        self.done[(self.first_done + self.done_count) % self.depth].result = -125  # ECANCELED
        self.first_waiting = (self.first_waiting + 1) % self.depth
        self.waiting_count -= 1
        self.done_count += 1
    pthread_mutex_unlock(&self.lock)


cdef void close_threads(void *engine) noexcept nogil:
    cdef Threads *self = <Threads *>engine
    cdef int i
    pthread_mutex_lock(&self.lock)
    self.closing = 1
    pthread_cond_broadcast(&self.work)
    pthread_mutex_unlock(&self.lock)
    for i in range(self.workers):
        pthread_join(self.worker[i], NULL)
    pthread_cond_destroy(&self.work)
    pthread_cond_destroy(&self.finished)
    pthread_mutex_destroy(&self.lock)
    free(self.waiting)
    free(self.done)
    free(self)


cdef EngineOps OPS
OPS.name = b"threads"
OPS.open = open_threads
OPS.submit = submit_threads
OPS.reap = reap_threads
OPS.cancel = cancel_threads
OPS.close = close_threads


def engine():
    """The engine's functions, as a capsule for the pump."""
    return PyCapsule_New(&OPS, b"gdsload.engine", NULL)
