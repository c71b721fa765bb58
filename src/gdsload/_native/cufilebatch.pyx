"""The engine of ``gds``: cuFile's batch API, used in the one way that works in every release.

Reads in flight are spread over a few batch handles. A handle takes one submission at a time and is
drained before the next, because completions of an earlier submission can get lost; after any error
it is replaced. A completed entry may be short, or a failure: both are checked. The wait for an event
is bounded.

    submit ─► a drained handle, 1 to n entries ─► events, matched by cookie ─► drained
                └─ refused, invalid or silent ─► retired, its slots lost, and a new handle
"""

from libc.errno cimport EBADF, EFAULT, EINVAL, EIO, ENOMEM, ETIMEDOUT
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free
from posix.time cimport timespec

from gdsload._native.cuda cimport relax
from gdsload._native.cufile cimport (
    CUFILE_BATCH, CUFILE_CANCELED, CUFILE_COMPLETE, CUFILE_FAILED, CUFILE_INVALID, CUFILE_READ,
    CUFILE_TIMEOUT, CFiles, CUfileError, CUfileIOEvents, CUfileIOParams, file_handle,
    leave_files, retain_files,
)
from gdsload._native.engine cimport (
    ECANCELED, LOST, Buffer, Completion, EngineOps, Read, Results, add_result, engine_capsule,
    take_results,
)
from gdsload._native.pthreads cimport (
    monotonic_ns, pthread_join, pthread_t, sleep_ns, start_quiet_thread,
)

cdef enum:
    CU_FILE_INVALID_VALUE = 5022
    CU_FILE_BATCH_SUBMIT_FAILED = 5035
    CU_FILE_BATCH_GETSTATUS = 5041
    CU_FILE_IO_ERROR = 5044
    WAVES = 4              # batch handles: while one is drained, the others read
    POLL_NS = 50000        # between two polls of the handles
    STATUS_NS = 1000000    # longest poll of one handle

cdef struct Entry:
    uint64_t cookie        # of the stage; 0: no event is expected
    uint64_t size

cdef struct Wave:
    CFiles *files
    void *batch            # NULL: setting up a new handle failed
    Entry *entries
    CUfileIOParams *params
    CUfileIOEvents *events
    int count
    int left               # entries without an event so far
    int64_t event_ns       # of the submission or the latest event

cdef struct Batches:
    CFiles *files
    char *base
    uint64_t length
    Wave waves[WAVES]
    int room               # entries of a wave
    int depth
    int one_by_one         # a submission of several was refused: from now on one read each
    int last_code
    Results ready


cdef int code_of(CUfileError answer) noexcept nogil:
    """The code of an answer, positive: cuFile's own codes are, but it answers errnos as negative
    codes, which would become counts of bytes."""
    return answer.err if answer.err >= 0 else -answer.err


cdef int set_up(Batches *self, Wave *wave) noexcept nogil:
    """A fresh handle for a wave: 0, or a negative code."""
    cdef int code
    wave.batch = NULL
    code = code_of(self.files.api.batch_setup(&wave.batch, <unsigned int>self.room))
    if code != 0:
        wave.batch = NULL
        self.last_code = code
    return -code


cdef void retire(Batches *self, Wave *wave, int code, int64_t result) noexcept nogil:
    """Replaces a handle that failed, and completes its entries with `result`. The old handle is not
    destroyed: that would wait for events that never come."""
    cdef int i
    self.last_code = code
    for i in range(wave.count):
        if wave.entries[i].cookie:
            add_result(&self.ready, wave.entries[i].cookie, result)
            wave.entries[i].cookie = 0
    wave.count = wave.left = 0
    set_up(self, wave)


cdef int64_t meaning(const CUfileIOEvents *event, uint64_t size) noexcept nogil:
    """Bytes, or a negative code. Complete is not full, and a count may be a hidden error."""
    cdef int64_t got = <int64_t>event.ret
    if event.status == CUFILE_TIMEOUT:
        return -LOST - ETIMEDOUT
    if got < 0:
        return got if got < -1 else -EIO
    if event.status == CUFILE_COMPLETE:
        return got if <uint64_t>got <= size else <int64_t>size
    if event.status == CUFILE_CANCELED:
        return -ECANCELED
    if event.status == CUFILE_INVALID:
        return -CU_FILE_INVALID_VALUE
    return -CU_FILE_IO_ERROR


cdef void poll(Batches *self, Wave *wave) noexcept nogil:
    """Takes the events of a handle."""
    cdef timespec longest
    cdef int code
    cdef CUfileIOEvents *event
    cdef Entry *entry
    cdef unsigned int count = <unsigned int>wave.left
    cdef unsigned int i
    cdef int64_t now
    longest.tv_sec = 0
    longest.tv_nsec = STATUS_NS
    code = code_of(self.files.api.batch_status(wave.batch, 0, &count, wave.events, &longest))
    now = monotonic_ns()
    if code != 0:
        retire(self, wave, code, -LOST - code)
        return
    if count > <unsigned int>wave.left:
        retire(self, wave, CU_FILE_BATCH_GETSTATUS, -LOST - CU_FILE_BATCH_GETSTATUS)
        return
    for i in range(count):
        event = &wave.events[i]
        entry = <Entry *>event.cookie
        if not event.status & (
            CUFILE_COMPLETE | CUFILE_FAILED | CUFILE_CANCELED | CUFILE_INVALID | CUFILE_TIMEOUT
        ):
            continue  # still under way
        if entry < wave.entries or entry >= wave.entries + wave.count or not entry.cookie:
            # A second event for one entry, or an unknown entry: do not trust the rest.
            retire(self, wave, CU_FILE_BATCH_GETSTATUS, -LOST - CU_FILE_BATCH_GETSTATUS)
            return
        add_result(&self.ready, entry.cookie, meaning(event, entry.size))
        entry.cookie = 0
        wave.left -= 1
        wave.event_ns = now
    if wave.left > 0 and now - wave.event_ns > self.files.patience_ns:
        retire(self, wave, ETIMEDOUT, -LOST - ETIMEDOUT)


cdef int open_batches(
    void **engine, void *context, int depth, const Buffer *buffers, int count
) noexcept nogil:
    cdef Batches *self
    cdef Wave *wave
    cdef int i, error = 0
    if context == NULL or count != 1:  # the table of files, and the staging ring
        return -EINVAL
    self = <Batches *>calloc(1, sizeof(Batches))
    if self == NULL:
        return -ENOMEM
    self.base = buffers[0].address
    self.length = buffers[0].length
    self.files = <CFiles *>context
    retain_files(self.files)
    self.depth = depth
    self.room = (depth + WAVES - 1) // WAVES
    self.ready.items = <Completion *>calloc(2 * WAVES * self.room, sizeof(Completion))
    for i in range(WAVES):
        wave = &self.waves[i]
        wave.files = self.files
        wave.entries = <Entry *>calloc(self.room, sizeof(Entry))
        wave.params = <CUfileIOParams *>calloc(self.room, sizeof(CUfileIOParams))
        wave.events = <CUfileIOEvents *>calloc(self.room, sizeof(CUfileIOEvents))
        if wave.entries == NULL or wave.params == NULL or wave.events == NULL:
            error = -ENOMEM
    if self.ready.items == NULL:
        error = -ENOMEM
    if self.files.cuda.set_current(self.files.context) != 0:
        error = -EIO
    for i in range(WAVES):
        if error == 0:
            error = set_up(self, &self.waves[i])
    if error != 0:
        close_batches(self)
        return error
    engine[0] = self
    return 0


cdef int fill(Batches *self, Wave *wave, const Read *reads, int count) noexcept nogil:
    """Makes entries for as many reads as there is room for: their number. An invalid read completes
    at once and does not spoil the others."""
    cdef const Read *read
    cdef CUfileIOParams *params
    cdef void *handle
    cdef uint64_t offset
    cdef int taken = 0
    wave.count = 0
    while taken < count and wave.count < (1 if self.one_by_one else self.room):
        read = &reads[taken]
        taken += 1
        handle = file_handle(self.files, read.file_number)
        offset = <uint64_t>(read.address - self.base)
        if handle == NULL or read.length == 0:
            # cuFile would never send an event for either.
            add_result(&self.ready, read.cookie, -EBADF if handle == NULL else -EINVAL)
            continue
        if offset > self.length or read.length > self.length - offset:
            add_result(&self.ready, read.cookie, -EFAULT)
            continue
        wave.entries[wave.count].cookie = read.cookie
        wave.entries[wave.count].size = read.length
        params = &wave.params[wave.count]
        params.mode = CUFILE_BATCH
        params.u.batch.devPtr_base = self.base
        params.u.batch.file_offset = <int64_t>read.offset
        params.u.batch.devPtr_offset = <int64_t>offset
        params.u.batch.size = read.length
        params.fh = handle
        params.opcode = CUFILE_READ
        params.cookie = &wave.entries[wave.count]
        wave.count += 1
    return taken


cdef int submit_batches(void *engine, const Read *reads, int count) noexcept nogil:
    cdef Batches *self = <Batches *>engine
    cdef Wave *wave
    cdef int code, i, taken = 0, usable = 0
    for i in range(WAVES):
        wave = &self.waves[i]
        if wave.batch == NULL and set_up(self, wave) != 0:
            continue
        usable += 1
        if wave.left > 0 or taken == count:
            continue
        taken += fill(self, wave, reads + taken, count - taken)
        if wave.count == 0:
            continue
        wave.left = wave.count
        wave.event_ns = monotonic_ns()
        code = code_of(
            self.files.api.batch_submit(wave.batch, <unsigned int>wave.count, wave.params, 0)
        )
        if code == 0:
            continue
        if wave.count == 1:
            # This read was refused, and nothing was started.
            retire(self, wave, code, -code)
        else:
            # Some may have been started. The pump submits all of them again, and this engine one by
            # one, so that only the wrong one fails.
            self.one_by_one = 1
            retire(self, wave, code, -LOST - ECANCELED)
    if not usable:
        return -self.last_code if self.last_code else -CU_FILE_BATCH_SUBMIT_FAILED
    return taken


cdef int reap_batches(
    void *engine, Completion *out, int room, int wanted, int64_t wait_ns
) noexcept nogil:
    cdef Batches *self = <Batches *>engine
    cdef int64_t until = monotonic_ns() + wait_ns
    cdef int i, waiting
    while True:
        waiting = 0
        for i in range(WAVES):
            if self.waves[i].left > 0:
                poll(self, &self.waves[i])
                waiting += self.waves[i].left
        if self.ready.count >= wanted or waiting == 0 or monotonic_ns() >= until:
            return take_results(&self.ready, out, room)
        sleep_ns(POLL_NS)


cdef void cancel_batches(void *engine) noexcept nogil:
    """Does nothing: after cuFileBatchIOCancel there are no events, so it would be unknown when a
    slot is free again. The stage gives the reads up, and they end in their slots."""


cdef void *destroy(void *arg) noexcept nogil:
    """Destroys the handle of a wave, if nothing is in flight."""
    cdef Wave *wave = <Wave *>arg
    if wave.batch != NULL and wave.left == 0:
        wave.files.cuda.set_current(wave.files.context)
        relax(wave.files.cuda)
        wave.files.api.batch_destroy(wave.batch)
    return NULL


cdef void close_batches(void *engine) noexcept nogil:
    cdef Batches *self = <Batches *>engine
    cdef pthread_t threads[WAVES]
    cdef int i, started = 0
    # In threads: cuFile takes 0.1 s for a handle.
    while started < WAVES:
        if start_quiet_thread(&threads[started], destroy, &self.waves[started]) != 0:
            break
        started += 1
    for i in range(started, WAVES):
        destroy(&self.waves[i])
    for i in range(WAVES):
        if i < started:
            pthread_join(threads[i], NULL)
        free(self.waves[i].entries)
        free(self.waves[i].params)
        free(self.waves[i].events)
    leave_files(self.files)
    free(self.ready.items)
    free(self)


cdef EngineOps OPS = EngineOps(
    open_batches, submit_batches, reap_batches, cancel_batches, close_batches, NULL
)


def engine():
    """The engine's functions, as a capsule for a stage."""
    return engine_capsule(&OPS, NULL)
