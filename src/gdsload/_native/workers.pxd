# Engines of native threads that make one blocking call a read: a ring of reads that wait, workers,
# and a ring of completions. What the call is, the engine that cimports this says.

from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free
from posix.time cimport timespec

from gdsload._native.engine cimport Completion, Read
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
    MOST_WORKERS = 64
    ENOMEM = 12
    ECANCELED = 125

cdef struct Duty:
    void *owner                                                    # what both calls are given
    void (*begin)(void *owner) noexcept nogil                      # once in each thread, or NULL
    int64_t (*read)(void *owner, const Read *read) noexcept nogil  # bytes, or a negative code

cdef struct Workers:
    Duty duty
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
    int count
    pthread_t thread[MOST_WORKERS]


cdef inline Read take_waiting(Workers *self) noexcept nogil:
    cdef Read read = self.waiting[self.first_waiting]
    self.first_waiting = (self.first_waiting + 1) % self.depth
    self.waiting_count -= 1
    return read


cdef inline void put_done(Workers *self, const Read *read, int64_t result) noexcept nogil:
    cdef Completion *place = &self.done[(self.first_done + self.done_count) % self.depth]
    place.cookie = read.cookie
    place.result = result
    self.done_count += 1


cdef inline void *serve_reads(void *arg) noexcept nogil:
    cdef Workers *self = <Workers *>arg
    cdef Read read
    cdef int64_t result
    if self.duty.begin != NULL:
        self.duty.begin(self.duty.owner)
    pthread_mutex_lock(&self.lock)
    while True:
        while self.waiting_count == 0 and not self.closing:
            pthread_cond_wait(&self.work, &self.lock)
        if self.waiting_count == 0:
            break
        read = take_waiting(self)
        pthread_mutex_unlock(&self.lock)
        result = self.duty.read(self.duty.owner, &read)
        pthread_mutex_lock(&self.lock)
        put_done(self, &read, result)
        if self.done_count >= self.wanted:
            pthread_cond_signal(&self.finished)
    pthread_mutex_unlock(&self.lock)
    return NULL


cdef inline void close_workers(void *engine) noexcept nogil:
    cdef Workers *self = <Workers *>engine
    cdef int i
    pthread_mutex_lock(&self.lock)
    self.closing = 1
    pthread_cond_broadcast(&self.work)
    pthread_mutex_unlock(&self.lock)
    for i in range(self.count):
        pthread_join(self.thread[i], NULL)
    pthread_cond_destroy(&self.work)
    pthread_cond_destroy(&self.finished)
    pthread_mutex_destroy(&self.lock)
    free(self.waiting)
    free(self.done)
    free(self)


cdef inline int open_workers(void **engine, Duty duty, int depth, int threads) noexcept nogil:
    """Starts up to `threads` of them, MOST_WORKERS at most: 0, or -errno where there is none."""
    cdef Workers *self = <Workers *>calloc(1, sizeof(Workers))
    cdef int error = 0
    if self == NULL:
        return -ENOMEM
    self.duty = duty
    self.depth = depth
    pthread_mutex_init(&self.lock, NULL)
    monotonic_cond_init(&self.work)
    monotonic_cond_init(&self.finished)
    self.waiting = <Read *>calloc(depth, sizeof(Read))
    self.done = <Completion *>calloc(depth, sizeof(Completion))
    if self.waiting == NULL or self.done == NULL:
        close_workers(self)
        return -ENOMEM
    while self.count < threads and self.count < MOST_WORKERS:
        error = start_quiet_thread(&self.thread[self.count], serve_reads, self)
        if error != 0:
            break
        self.count += 1
    if self.count == 0:
        close_workers(self)
        return -error
    engine[0] = self
    return 0


cdef inline int submit_to_workers(void *engine, const Read *reads, int count) noexcept nogil:
    cdef Workers *self = <Workers *>engine
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


cdef inline int reap_from_workers(
    void *engine, Completion *out, int room, int wanted, int64_t wait_ns
) noexcept nogil:
    cdef Workers *self = <Workers *>engine
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


cdef inline void cancel_workers(void *engine) noexcept nogil:
    """What no worker has taken yet completes as cancelled; a call under way runs to its end."""
    cdef Workers *self = <Workers *>engine
    cdef Read read
    pthread_mutex_lock(&self.lock)
    while self.waiting_count > 0:
        read = take_waiting(self)
        put_done(self, &read, -ECANCELED)
    pthread_mutex_unlock(&self.lock)
