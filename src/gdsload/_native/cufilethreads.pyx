"""The engine of ``gds_mt``: ``cuFileRead`` from several native threads.

Each worker makes the device's context current once, then takes one read after the other. cuFile is
told the base that was registered and the place in it, as it wants to be. What a call answered is
handed back as bytes or as a negative code: an errno, or above 5000 one of cuFile's own.
"""

from cpython.pycapsule cimport PyCapsule_New
from libc.errno cimport errno
from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free
from posix.time cimport timespec

from gdsload._native cimport pthreads
from gdsload._native.cufile cimport CFiles, file_handle, release_files, retain_files
from gdsload._native.engine cimport Buffer, Completion, EngineOps, Read

cdef enum:
    EIO = 5
    EBADF = 9
    ENOMEM = 12
    EINVAL = 22
    ECANCELED = 125
    MOST_THREADS = 64

cdef struct Pool:
    CFiles *files
    char *base                       # what was registered, and where cuFile counts from
    pthreads.pthread_mutex_t lock
    pthreads.pthread_cond_t work     # a read waits for a worker, or it is time to go
    pthreads.pthread_cond_t finished
    Read *waiting                    # ring of `depth` reads
    int first_waiting
    int waiting_count
    Completion *done                 # ring of `depth` completions
    int first_done
    int done_count
    int wanted                       # completions that reap waits for
    int in_flight                    # taken by submit, not yet handed out by reap
    int depth
    int closing
    int workers
    pthreads.pthread_t worker[MOST_THREADS]


cdef int64_t read_one(Pool *self, const Read *read) noexcept nogil:
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


cdef void put_done(Pool *self, Read *read, int64_t result) noexcept nogil:
    cdef Completion *place = &self.done[(self.first_done + self.done_count) % self.depth]
    place.cookie = read.cookie
    place.result = result
    self.done_count += 1


cdef Read take_waiting(Pool *self) noexcept nogil:
    cdef Read read = self.waiting[self.first_waiting]
    self.first_waiting = (self.first_waiting + 1) % self.depth
    self.waiting_count -= 1
    return read


cdef void *serve(void *arg) noexcept nogil:
    cdef Pool *self = <Pool *>arg
    cdef Read read
    cdef int64_t result
    # Where this fails, every read will say so.
    self.files.cuda.set_current(self.files.context)
    pthreads.pthread_mutex_lock(&self.lock)
    while True:
        while self.waiting_count == 0 and not self.closing:
            pthreads.pthread_cond_wait(&self.work, &self.lock)
        if self.waiting_count == 0:
            break
        read = take_waiting(self)
        pthreads.pthread_mutex_unlock(&self.lock)
        result = read_one(self, &read)
        pthreads.pthread_mutex_lock(&self.lock)
        put_done(self, &read, result)
        if self.done_count >= self.wanted:
            pthreads.pthread_cond_signal(&self.finished)
    pthreads.pthread_mutex_unlock(&self.lock)
    return NULL


cdef int open_pool(
    void **engine, int depth, const Buffer *buffers, int count, int *fixed
) noexcept nogil:
    cdef Pool *self
    cdef int error = 0
    if count != 2:  # the ring, and the table of files
        return -EINVAL
    self = <Pool *>calloc(1, sizeof(Pool))
    if self == NULL:
        return -ENOMEM
    fixed[0] = 1
    self.base = buffers[0].address
    self.files = <CFiles *>buffers[1].address
    retain_files(self.files)
    self.depth = depth
    pthreads.pthread_mutex_init(&self.lock, NULL)
    pthreads.monotonic_cond_init(&self.work)
    pthreads.monotonic_cond_init(&self.finished)
    self.waiting = <Read *>calloc(depth, sizeof(Read))
    self.done = <Completion *>calloc(depth, sizeof(Completion))
    if self.waiting == NULL or self.done == NULL:
        close_pool(self)
        return -ENOMEM
    # Two reads wait for each that is with cuFile, so that no worker does.
    while self.workers < (depth + 2) // 3 and self.workers < MOST_THREADS:
        error = pthreads.start_quiet_thread(&self.worker[self.workers], serve, self)
        if error != 0:
            break
        self.workers += 1
    if self.workers == 0:
        close_pool(self)
        return -error
    engine[0] = self
    return 0


cdef int submit_pool(void *engine, const Read *reads, int count) noexcept nogil:
    cdef Pool *self = <Pool *>engine
    cdef int taken = 0
    pthreads.pthread_mutex_lock(&self.lock)
    while taken < count and self.in_flight < self.depth:
        self.waiting[(self.first_waiting + self.waiting_count) % self.depth] = reads[taken]
        self.waiting_count += 1
        self.in_flight += 1
        taken += 1
        pthreads.pthread_cond_signal(&self.work)
    pthreads.pthread_mutex_unlock(&self.lock)
    return taken


cdef int reap_pool(
    void *engine, Completion *out, int room, int wanted, int64_t wait_ns
) noexcept nogil:
    cdef Pool *self = <Pool *>engine
    cdef timespec until
    cdef int taken = 0
    pthreads.deadline_in(&until, wait_ns)
    pthreads.pthread_mutex_lock(&self.lock)
    if wanted > self.in_flight:
        wanted = self.in_flight
    self.wanted = wanted
    while self.done_count < wanted:
        if pthreads.pthread_cond_timedwait(&self.finished, &self.lock, &until) != 0:
            break
    while taken < room and self.done_count > 0:
        out[taken] = self.done[self.first_done]
        self.first_done = (self.first_done + 1) % self.depth
        self.done_count -= 1
        self.in_flight -= 1
        taken += 1
    pthreads.pthread_mutex_unlock(&self.lock)
    return taken


cdef void cancel_pool(void *engine) noexcept nogil:
    """What no worker has taken yet ends as cancelled; a cuFileRead cannot be called back."""
    cdef Pool *self = <Pool *>engine
    cdef Read read
    pthreads.pthread_mutex_lock(&self.lock)
    while self.waiting_count > 0:
        read = take_waiting(self)
        put_done(self, &read, -ECANCELED)
    pthreads.pthread_mutex_unlock(&self.lock)


cdef void close_pool(void *engine) noexcept nogil:
    cdef Pool *self = <Pool *>engine
    cdef int i
    pthreads.pthread_mutex_lock(&self.lock)
    self.closing = 1
    pthreads.pthread_cond_broadcast(&self.work)
    pthreads.pthread_mutex_unlock(&self.lock)
    for i in range(self.workers):
        pthreads.pthread_join(self.worker[i], NULL)
    pthreads.pthread_cond_destroy(&self.work)
    pthreads.pthread_cond_destroy(&self.finished)
    pthreads.pthread_mutex_destroy(&self.lock)
    release_files(self.files)
    free(self.waiting)
    free(self.done)
    free(self)


cdef EngineOps OPS
OPS.name = b"cufile threads"
OPS.open = open_pool
OPS.submit = submit_pool
OPS.reap = reap_pool
OPS.cancel = cancel_pool
OPS.close = close_pool


def engine():
    """The engine's functions, as a capsule for a stage."""
    return PyCapsule_New(&OPS, b"gdsload.engine", NULL)
