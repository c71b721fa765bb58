"""Engines of native threads: each worker takes one read and makes one blocking call for it.

`engine` calls ``pread`` (the ``threads`` engine, which works everywhere), `cufile_engine` calls
``cuFileRead`` (the backend ``gds_mt``). The pump continues short reads, as for every engine.
`engine` also copies from memory of this process: with HOST_MEMORY in place of a descriptor, the
offset is an address.

    submit ─► waiting ─► worker: pread or cuFileRead ─► done ─► reap

Where the memory is a private mapping of the file, `engine` makes the kernel read the pages of the
mapping into the page cache, without a copy.
"""

from libc.errno cimport EBADF, EINVAL, EIO, ENOMEM, errno
from libc.stdint cimport int64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy
from posix.time cimport timespec

from gdsload._native.atomics cimport gds_add
from gdsload._native.cuda cimport relax
from gdsload._native.cufile cimport CFiles, file_handle, leave_files, retain_files
from gdsload._native.engine cimport (
    ECANCELED, MAPPED, Buffer, Completion, EngineOps, Read, Results, add_result, engine_capsule,
    take_results,
)
from gdsload._native.first_touch cimport (
    Bounce, FirstTouch, close_first_touch, free_bounce, open_first_touch, read_first_touch,
)
from gdsload._native.mapped cimport Folios, close_folios, open_folios, read_mapped
from gdsload._native.pthreads cimport (
    deadline_in, monotonic_cond_init, pthread_cond_broadcast, pthread_cond_destroy,
    pthread_cond_signal, pthread_cond_t, pthread_cond_timedwait, pthread_cond_wait, pthread_join,
    pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t,
    pthread_mutex_unlock, pthread_t, start_quiet_thread,
)

from gdsload._native.first_touch import MODES

cdef enum:
    # Half of the depth, so that a read waits for each worker that becomes free; but not fewer than
    # keep a fast disk busy. Network filesystems get a large depth
    # (benchmarks/results/cold-fuse-20ms.json).
    DISK_READERS = 8
    MOST_READERS = 512
    MOST_CUFILE_READERS = 64
    MEMORY = -2                  # no descriptor, and not the pump's "none"

HOST_MEMORY = MEMORY

cdef struct Workers:
    FirstTouch first_touch       # of fresh memory
    Folios folios                # of reads into the page cache
    CFiles *files                # of cuFile; NULL: pread
    char *base                   # of the memory registered with cuFile
    pthread_mutex_t lock
    pthread_cond_t work          # a read waits for a worker, or the engine closes
    pthread_cond_t finished      # a completion waits for reap
    Read *waiting                # ring of `depth` reads
    int first_waiting
    int waiting_count
    Results done
    int wanted                   # completions that reap waits for
    int in_flight                # accepted by submit, not yet returned by reap
    int depth
    int closing
    int count
    pthread_t thread[MOST_READERS]


cdef int64_t read_cufile(Workers *self, const Read *read) noexcept nogil:
    """Bytes, or a negative code: an errno, or one of cuFile's own above 5000."""
    cdef void *handle = file_handle(self.files, read.file_number)
    cdef int64_t got
    if handle == NULL:
        return -EBADF
    (&errno)[0] = 0
    # cuFile expects the registered base address and the offset in it.
    got = self.files.api.read(
        handle, self.base, read.length, <int64_t>read.offset, read.address - self.base
    )
    if got == -1:
        # The errno may be one of cuFile's own codes, and is not always set.
        return -errno if errno > 0 else -EIO
    return got


cdef Read take_waiting(Workers *self) noexcept nogil:
    cdef Read read = self.waiting[self.first_waiting]
    self.first_waiting = (self.first_waiting + 1) % self.depth
    self.waiting_count -= 1
    return read


cdef void *work(void *arg) noexcept nogil:
    cdef Workers *self = <Workers *>arg
    cdef Bounce bounce
    cdef Read read
    cdef int64_t result, cancels
    bounce.mapping = NULL
    if self.files != NULL:
        # If this fails, every read fails with an error of its own.
        self.files.cuda.set_current(self.files.context)
        relax(self.files.cuda)
    pthread_mutex_lock(&self.lock)
    while True:
        while self.waiting_count == 0 and not self.closing:
            pthread_cond_wait(&self.work, &self.lock)
        if self.waiting_count == 0:
            break
        read = take_waiting(self)
        cancels = self.first_touch.cancels
        pthread_mutex_unlock(&self.lock)
        if self.files == NULL and read.fd == MEMORY:
            memcpy(read.address, <const void *><uintptr_t>read.offset, read.length)
            result = <int64_t>read.length
        elif read.io_mode == MAPPED:
            result = read_mapped(&self.folios, &read, &self.first_touch.cancels, cancels)
        elif self.files == NULL:
            result = read_first_touch(&self.first_touch, &bounce, &read, cancels)
        else:
            result = read_cufile(self, &read)
        pthread_mutex_lock(&self.lock)
        add_result(&self.done, read.cookie, result)
        if self.done.count >= self.wanted:
            pthread_cond_signal(&self.finished)
    pthread_mutex_unlock(&self.lock)
    free_bounce(&bounce)
    return NULL


cdef void close_workers(void *engine) noexcept nogil:
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
    close_first_touch(&self.first_touch)
    close_folios(&self.folios)
    if self.files != NULL:
        leave_files(self.files)
    free(self.waiting)
    free(self.done.items)
    free(self)


cdef int open_workers(
    void **engine, int depth, int threads, int mode, CFiles *files, char *base
) noexcept nogil:
    """Starts up to `threads` workers: 0, or -errno if none starts."""
    cdef Workers *self = <Workers *>calloc(1, sizeof(Workers))
    cdef int error = ENOMEM
    if self == NULL:
        return -ENOMEM
    self.depth = depth
    self.base = base
    if files != NULL:
        retain_files(files)
        self.files = files
    open_first_touch(&self.first_touch, mode)
    open_folios(&self.folios, mode)
    pthread_mutex_init(&self.lock, NULL)
    monotonic_cond_init(&self.work)
    monotonic_cond_init(&self.finished)
    self.waiting = <Read *>calloc(depth, sizeof(Read))
    self.done.items = <Completion *>calloc(depth, sizeof(Completion))
    if self.waiting != NULL and self.done.items != NULL:
        while self.count < threads:
            error = start_quiet_thread(&self.thread[self.count], work, self)
            if error != 0:
                break
            self.count += 1
    if self.count == 0:
        close_workers(self)
        return -error
    engine[0] = self
    return 0


cdef int open_readers(
    void **engine, void *context, int depth, const Buffer *buffers, int count
) noexcept nogil:
    cdef int threads = min(max(depth // 2, <int>DISK_READERS), <int>MOST_READERS)
    return open_workers(
        engine, depth, min(depth, threads), <int><size_t>context, NULL, NULL
    )


cdef int open_cufile_readers(
    void **engine, void *context, int depth, const Buffer *buffers, int count
) noexcept nogil:
    cdef int threads = min(2 * depth // 3, <int>MOST_CUFILE_READERS)
    if context == NULL or count != 1:  # the table of files, and the staging ring
        return -EINVAL
    # Two thirds of the depth: the other reads wait, so that no worker idles.
    return open_workers(engine, depth, max(threads, 1), 0, <CFiles *>context, buffers[0].address)


cdef int submit_to_workers(void *engine, const Read *reads, int count) noexcept nogil:
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


cdef int reap_from_workers(
    void *engine, Completion *out, int room, int wanted, int64_t wait_ns
) noexcept nogil:
    cdef Workers *self = <Workers *>engine
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


cdef void cancel_workers(void *engine) noexcept nogil:
    """Reads that no worker has taken complete as cancelled; a call under way runs to its end."""
    cdef Workers *self = <Workers *>engine
    pthread_mutex_lock(&self.lock)
    gds_add(&self.first_touch.cancels, 1)
    while self.waiting_count > 0:
        add_result(&self.done, take_waiting(self).cookie, -ECANCELED)
    pthread_mutex_unlock(&self.lock)


cdef EngineOps OPS = EngineOps(
    open_readers, submit_to_workers, reap_from_workers, cancel_workers, close_workers, NULL
)
cdef EngineOps CUFILE_OPS = EngineOps(
    open_cufile_readers, submit_to_workers, reap_from_workers, cancel_workers, close_workers, NULL
)


def engine(str pages="auto"):
    """The ``threads`` engine, as a capsule for the pump. ``pages``: how fresh memory is touched, one
    of the names in `first_touch.MODES`."""
    return engine_capsule(&OPS, <void *><size_t>MODES[pages])


def cufile_engine():
    """The engine of ``gds_mt``, as a capsule for a `Stage` with a table of files."""
    return engine_capsule(&CUFILE_OPS, NULL)
