"""The engine for remote files: Python threads read ranges and copy the bytes to their memory.

    submit ─► waiting ─► worker: take, put each chunk, finish ─► done ─► reap

The workers are threads of `gdsload.backends.remote`, because the clients of object stores and peers
are Python packages. All other steps run on the pump's thread, which never needs the GIL. Cancelling
completes every read at once: what its worker receives later is dropped, and the worker is free again
when its call returns. Not responsible for retries, and not for starting threads.
"""

cimport cython
from libc.errno cimport EBUSY, ENOMEM
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy
from posix.time cimport timespec
from posix.unistd cimport getpid

from gdsload._native.atomics cimport gds_add
from gdsload._native.engine cimport (
    ECANCELED, Buffer, Completion, EngineOps, Read, Results, add_result, engine_capsule,
    take_results,
)
from gdsload._native.first_touch cimport (
    FirstTouch, close_first_touch, open_first_touch, touch_before,
)
from gdsload._native.pthreads cimport (
    deadline_in, monotonic_cond_init, pthread_cond_broadcast, pthread_cond_destroy,
    pthread_cond_signal, pthread_cond_t, pthread_cond_timedwait, pthread_cond_wait,
    pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t,
    pthread_mutex_unlock,
)

cdef extern from *:
    """
    #if defined(Py_LIMITED_API) && Py_LIMITED_API < 0x030B0000
    /* Part of the stable ABI since Python 3.11. Python 3.10 exports the same functions. */
    typedef struct {
        void *buf;
        PyObject *obj;
        Py_ssize_t len, itemsize;
        int readonly, ndim;
        char *format;
        Py_ssize_t *shape, *strides, *suboffsets;
        void *internal;
    } gds_chunk;
    PyAPI_FUNC(int) PyObject_GetBuffer(PyObject *, gds_chunk *, int);
    PyAPI_FUNC(void) PyBuffer_Release(gds_chunk *);
    #else
    typedef Py_buffer gds_chunk;
    #endif
    """
    ctypedef struct gds_chunk:
        void *buf
        Py_ssize_t len
    int PyObject_GetBuffer(object chunk, gds_chunk *view, int flags) except -1
    void PyBuffer_Release(gds_chunk *view)

cdef enum:
    CONTIGUOUS = 0           # PyBUF_SIMPLE
    # Copied at a time: a cancellation waits for the end of one such copy.
    COPY_BYTES = 1048576

cdef enum JobState:
    IDLE
    WAITING                  # for a worker
    RUNNING

cdef struct Job:
    pthread_mutex_t hold     # held while bytes are copied, and to change `turn`
    int64_t turn             # number of the read: the worker of an earlier one must not copy
    JobState state
    Read read

cdef struct CFetch:
    int64_t references       # the Python object, and the engine from its capsule on
    FirstTouch first_touch
    pthread_mutex_t lock     # taken before `hold`
    pthread_cond_t work      # a read waits for a worker, or the engine closes
    pthread_cond_t finished  # a completion waits for reap
    Job *jobs                # `depth` of them
    int depth
    int *waiting             # ring of the numbers of jobs
    int first_waiting
    int waiting_count
    Results done
    int wanted               # completions that reap waits for
    int in_flight            # accepted by submit, not yet returned by reap
    int workers              # threads that take jobs, or are about to
    int lost                 # of these, those in a call for a read that was cancelled
    int closing


cdef void release_fetch(CFetch *self) noexcept nogil:
    cdef int i
    if gds_add(&self.references, -1) > 0:
        return
    for i in range(self.depth):
        pthread_mutex_destroy(&self.jobs[i].hold)
    close_first_touch(&self.first_touch)
    pthread_cond_destroy(&self.work)
    pthread_cond_destroy(&self.finished)
    pthread_mutex_destroy(&self.lock)
    free(self.jobs)
    free(self.waiting)
    free(self.done.items)
    free(self)


cdef void end_job(CFetch *self, Job *job, int64_t result) noexcept nogil:
    """Called with the lock held. Nothing is copied for this read any more."""
    pthread_mutex_lock(&job.hold)
    job.turn += 1
    pthread_mutex_unlock(&job.hold)
    job.state = IDLE
    add_result(&self.done, job.read.cookie, result)


cdef int copy(
    CFetch *self, Job *job, int64_t turn, uint64_t at, char *source, uint64_t length
) noexcept nogil:
    """Copies to byte ``at`` of a read. False if the read was cancelled."""
    cdef uint64_t done = 0, part
    cdef int same = 1
    while same and done < length:
        part = min(length - done, <uint64_t>COPY_BYTES)
        pthread_mutex_lock(&job.hold)
        same = job.turn == turn
        if same:
            touch_before(&self.first_touch, &job.read, at + done, part)
            memcpy(job.read.address + at + done, source + done, part)
        pthread_mutex_unlock(&job.hold)
        done += part
    return same


# --- the engine ----------------------------------------------------------------------------------

cdef int open_fetch(
    void **engine, void *context, int depth, const Buffer *buffers, int count
) noexcept nogil:
    """Takes over the reference of the capsule, also if it fails."""
    cdef CFetch *self = <CFetch *>context
    cdef int i
    if self.jobs != NULL:
        release_fetch(self)
        return -EBUSY
    self.jobs = <Job *>calloc(depth, sizeof(Job))
    self.waiting = <int *>calloc(depth, sizeof(int))
    self.done.items = <Completion *>calloc(depth, sizeof(Completion))
    if self.jobs == NULL or self.waiting == NULL or self.done.items == NULL:
        release_fetch(self)
        return -ENOMEM
    for i in range(depth):
        pthread_mutex_init(&self.jobs[i].hold, NULL)
    self.depth = depth
    engine[0] = self
    return 0


cdef int submit_fetch(void *engine, const Read *reads, int count) noexcept nogil:
    cdef CFetch *self = <CFetch *>engine
    cdef int taken = 0, i
    pthread_mutex_lock(&self.lock)
    for i in range(self.depth):
        if taken == count or self.in_flight == self.depth:
            break
        if self.jobs[i].state == IDLE:
            self.jobs[i].state = WAITING
            self.jobs[i].read = reads[taken]
            self.waiting[(self.first_waiting + self.waiting_count) % self.depth] = i
            self.waiting_count += 1
            self.in_flight += 1
            taken += 1
            pthread_cond_signal(&self.work)
    pthread_mutex_unlock(&self.lock)
    return taken


cdef int reap_fetch(
    void *engine, Completion *out, int room, int wanted, int64_t wait_ns
) noexcept nogil:
    cdef CFetch *self = <CFetch *>engine
    cdef timespec until
    cdef int taken
    deadline_in(&until, wait_ns)
    pthread_mutex_lock(&self.lock)
    self.wanted = wanted = min(wanted, self.in_flight)
    while self.done.count < wanted:
        if pthread_cond_timedwait(&self.finished, &self.lock, &until) != 0:
            break
    taken = take_results(&self.done, out, room)
    self.in_flight -= taken
    pthread_mutex_unlock(&self.lock)
    return taken


cdef void cancel_fetch(void *engine) noexcept nogil:
    cdef CFetch *self = <CFetch *>engine
    cdef int i
    pthread_mutex_lock(&self.lock)
    self.waiting_count = 0
    for i in range(self.depth):
        if self.jobs[i].state != IDLE:
            self.lost += self.jobs[i].state == RUNNING
            end_job(self, &self.jobs[i], -ECANCELED)
    pthread_mutex_unlock(&self.lock)


cdef void close_fetch(void *engine) noexcept nogil:
    """Ends the workers, those in a call after it."""
    cdef CFetch *self = <CFetch *>engine
    pthread_mutex_lock(&self.lock)
    self.closing = 1
    pthread_cond_broadcast(&self.work)
    pthread_mutex_unlock(&self.lock)
    release_fetch(self)


cdef EngineOps OPS = EngineOps(
    open_fetch, submit_fetch, reap_fetch, cancel_fetch, close_fetch, NULL
)


# --- the workers ---------------------------------------------------------------------------------

@cython.final
cdef class Fetch:
    """One engine, for one pump, and what its workers call."""

    cdef CFetch *fetch
    cdef int pid

    def __cinit__(self):
        cdef CFetch *made = <CFetch *>calloc(1, sizeof(CFetch))
        if made == NULL:
            raise MemoryError("no memory for an engine")
        made.references = 1
        open_first_touch(&made.first_touch, 0)
        pthread_mutex_init(&made.lock, NULL)
        monotonic_cond_init(&made.work)
        monotonic_cond_init(&made.finished)
        self.fetch = made
        self.pid = getpid()

    def capsule(self):
        """The engine, as a capsule for one pump. The pump keeps what it needs of this object.

        It has a reference of its own: if the driver of a device hangs, the engine is opened when this
        object may be gone. If the pump never opens it, the struct stays.
        """
        gds_add(&self.fetch.references, 1)
        return engine_capsule(&OPS, self.fetch)

    def reserve(self, int wanted):
        """The number of workers to start, so that ``wanted`` reads, and those in flight, have one
        each: at most as many as the depth. They count from now on."""
        cdef CFetch *fetch = self.fetch
        cdef int missing
        if self.pid != getpid():
            return 0
        with nogil:
            pthread_mutex_lock(&fetch.lock)
            missing = min(max(wanted, fetch.in_flight), fetch.depth)
            missing = max(missing - (fetch.workers - fetch.lost), 0)
            if fetch.closing:
                missing = 0
            fetch.workers += missing
            pthread_mutex_unlock(&fetch.lock)
        return missing

    def unreserve(self, int count):
        """For workers that were counted and did not start. Returns the number of the others."""
        cdef int left
        with nogil:
            pthread_mutex_lock(&self.fetch.lock)
            self.fetch.workers -= count
            left = self.fetch.workers
            pthread_mutex_unlock(&self.fetch.lock)
        return left

    def take(self):
        """For a worker: waits for a read. Returns (job, turn, file, offset, length), or None if the
        engine is closed and the worker must end."""
        cdef CFetch *fetch = self.fetch
        cdef Job *job
        cdef Read read
        cdef int number = -1
        cdef int64_t turn = 0
        with nogil:
            pthread_mutex_lock(&fetch.lock)
            while fetch.waiting_count == 0 and not fetch.closing:
                pthread_cond_wait(&fetch.work, &fetch.lock)
            if fetch.waiting_count == 0:
                fetch.workers -= 1
            else:
                number = fetch.waiting[fetch.first_waiting]
                fetch.first_waiting = (fetch.first_waiting + 1) % fetch.depth
                fetch.waiting_count -= 1
                job = &fetch.jobs[number]
                job.state = RUNNING
                turn, read = job.turn, job.read
            pthread_mutex_unlock(&fetch.lock)
        if number < 0:
            return None
        return number, turn, read.fd, read.offset, read.length

    def put(self, int number, int64_t turn, uint64_t at, object chunk):
        """For a worker: copies a chunk to byte ``at`` of its read. False if the read was cancelled.

        Raises TypeError or BufferError if the chunk is no contiguous buffer, ValueError if it leaves
        the read.
        """
        cdef Job *job = &self.fetch.jobs[number]
        cdef gds_chunk view
        cdef uint64_t length, end = 0
        cdef int same
        PyObject_GetBuffer(chunk, &view, CONTIGUOUS)
        length = <uint64_t>view.len
        with nogil:
            pthread_mutex_lock(&job.hold)
            same = job.turn == turn
            if same:
                end = job.read.length
            pthread_mutex_unlock(&job.hold)
            if same and at <= end and length <= end - at:
                same = copy(self.fetch, job, turn, at, <char *>view.buf, length)
        PyBuffer_Release(&view)
        if same and (at > end or length > end - at):
            raise ValueError(f"{length} bytes at {at} leave a read of {end} bytes")
        return bool(same)

    def finish(self, int number, int64_t turn, int64_t result):
        """For a worker: ends its read with the bytes that were copied, or -errno."""
        cdef CFetch *fetch = self.fetch
        cdef Job *job = &fetch.jobs[number]
        with nogil:
            pthread_mutex_lock(&fetch.lock)
            if job.turn == turn:
                end_job(fetch, job, result)
                if fetch.done.count >= fetch.wanted:
                    pthread_cond_signal(&fetch.finished)
            else:
                fetch.lost -= 1
            pthread_mutex_unlock(&fetch.lock)

    def __dealloc__(self):
        if self.fetch != NULL:
            release_fetch(self.fetch)
