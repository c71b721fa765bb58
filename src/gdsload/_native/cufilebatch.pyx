"""The engine of ``gds``: cuFile's batch API, used the one way that holds in every release.

What is in flight is spread over a few batch handles. A handle takes one submission at a time and
is drained before the next, because completions of an earlier one have been seen to vanish; after
any error it is never used again. A completed entry may hold less than was asked for, and may be a
failure: both are looked at. An event that does not come is not waited for for ever.

    submit ─► a drained handle, 1 to n entries ─► events, each known by its cookie ─► drained
                └─ refused, strange or silent ─► retired, its slots lost, and a new handle
"""

from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free
from posix.time cimport timespec

from gdsload._native.cufile cimport (
    CUFILE_BATCH,
    CUFILE_CANCELED,
    CUFILE_COMPLETE,
    CUFILE_FAILED,
    CUFILE_INVALID,
    CUFILE_READ,
    CUFILE_TIMEOUT,
    CFiles,
    CUfileError,
    CUfileIOEvents,
    CUfileIOParams,
    file_handle,
    release_files,
    retain_files,
)
from gdsload._native.engine cimport Buffer, Completion, EngineOps, Read
from gdsload._native.pthreads cimport monotonic_ns
from gdsload._native.stage cimport LOST

cdef extern from "<time.h>" nogil:
    int nanosleep(const timespec *, timespec *)

cdef enum:
    EIO = 5
    EBADF = 9
    ENOMEM = 12
    EFAULT = 14
    EINVAL = 22
    ETIMEDOUT = 110
    ECANCELED = 125
    CU_FILE_INVALID_VALUE = 5022
    CU_FILE_BATCH_SUBMIT_FAILED = 5035
    CU_FILE_BATCH_GETSTATUS = 5041
    CU_FILE_IO_ERROR = 5044
    WAVES = 4              # handles: while one is drained, the others read
    LOOK_NS = 50000
    STATUS_NS = 1000000    # what a look at a handle may take at most

cdef struct Entry:
    uint64_t cookie        # the stage's; 0: nothing is awaited
    uint64_t size

cdef struct Wave:
    void *batch            # NULL: there is no handle, and no new one was to be had
    Entry *entries
    CUfileIOParams *params
    CUfileIOEvents *events
    int count
    int left               # entries whose event has not come
    int64_t heard_ns       # when it was submitted, or last told of something

cdef struct Batches:
    CFiles *files
    char *base
    uint64_t length
    Wave waves[WAVES]
    int room               # entries of a wave
    int depth
    int one_by_one         # a submission of several was refused: each goes alone from now on
    int last_code
    Completion *ready
    int ready_count


cdef void announce(Batches *self, uint64_t cookie, int64_t result) noexcept nogil:
    self.ready[self.ready_count].cookie = cookie
    self.ready[self.ready_count].result = result
    self.ready_count += 1


cdef int set_up(Batches *self, Wave *wave) noexcept nogil:
    """A fresh handle for a wave: 0, or a negative code."""
    cdef CUfileError answer
    wave.batch = NULL
    answer = self.files.api.batch_setup(&wave.batch, <unsigned int>self.room)
    if answer.err != 0:
        wave.batch = NULL
        self.last_code = answer.err
        return -answer.err
    return 0


cdef void retire(Batches *self, Wave *wave, int code) noexcept nogil:
    """A handle that went wrong. It is left alone: destroying it would wait for what is lost."""
    cdef int i
    self.last_code = code
    for i in range(wave.count):
        if wave.entries[i].cookie:
            announce(self, wave.entries[i].cookie, -LOST - code)
            wave.entries[i].cookie = 0
    wave.count = wave.left = 0
    set_up(self, wave)


cdef int64_t meaning(const CUfileIOEvents *event, uint64_t size) noexcept nogil:
    """Bytes, or a negative code. Complete is not full, and a count may be a hidden error."""
    cdef int64_t got = <int64_t>event.ret
    if got < 0:
        return got if got < -1 else -EIO
    if event.status == CUFILE_COMPLETE:
        return got if <uint64_t>got <= size else <int64_t>size
    if event.status == CUFILE_CANCELED:
        return -ECANCELED
    if event.status == CUFILE_INVALID:
        return -CU_FILE_INVALID_VALUE
    if event.status == CUFILE_TIMEOUT:
        return -LOST - ETIMEDOUT
    return -CU_FILE_IO_ERROR


cdef void look(Batches *self, Wave *wave) noexcept nogil:
    """Takes what a handle has to tell."""
    cdef timespec longest
    cdef CUfileError answer
    cdef CUfileIOEvents *event
    cdef Entry *entry
    cdef unsigned int told = <unsigned int>wave.left
    cdef unsigned int i
    cdef int64_t now
    longest.tv_sec = 0
    longest.tv_nsec = STATUS_NS
    answer = self.files.api.batch_status(wave.batch, 0, &told, wave.events, &longest)
    now = monotonic_ns()
    if answer.err != 0:
        retire(self, wave, answer.err)
        return
    if told > <unsigned int>wave.left:
        retire(self, wave, CU_FILE_BATCH_GETSTATUS)
        return
    for i in range(told):
        event = &wave.events[i]
        entry = <Entry *>event.cookie
        if not event.status & (
            CUFILE_COMPLETE | CUFILE_FAILED | CUFILE_CANCELED | CUFILE_INVALID | CUFILE_TIMEOUT
        ):
            continue  # still under way
        if entry < wave.entries or entry >= wave.entries + wave.count or not entry.cookie:
            # Told twice, or of something that is not ours: what else it tells is worth nothing.
            retire(self, wave, CU_FILE_BATCH_GETSTATUS)
            return
        announce(self, entry.cookie, meaning(event, entry.size))
        entry.cookie = 0
        wave.left -= 1
        wave.heard_ns = now
    if wave.left > 0 and now - wave.heard_ns > self.files.patience_ns:
        retire(self, wave, ETIMEDOUT)


cdef int open_batches(
    void **engine, int depth, const Buffer *buffers, int count, int *fixed
) noexcept nogil:
    cdef Batches *self
    cdef Wave *wave
    cdef int i, error = 0
    if count != 2:  # the ring, and the table of files
        return -EINVAL
    self = <Batches *>calloc(1, sizeof(Batches))
    if self == NULL:
        return -ENOMEM
    fixed[0] = 1
    self.base = buffers[0].address
    self.length = buffers[0].length
    self.files = <CFiles *>buffers[1].address
    retain_files(self.files)
    self.depth = depth
    self.room = (depth + WAVES - 1) // WAVES
    self.ready = <Completion *>calloc(2 * WAVES * self.room, sizeof(Completion))
    for i in range(WAVES):
        wave = &self.waves[i]
        wave.entries = <Entry *>calloc(self.room, sizeof(Entry))
        wave.params = <CUfileIOParams *>calloc(self.room, sizeof(CUfileIOParams))
        wave.events = <CUfileIOEvents *>calloc(self.room, sizeof(CUfileIOEvents))
        if wave.entries == NULL or wave.params == NULL or wave.events == NULL:
            error = -ENOMEM
    if self.ready == NULL:
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
    """Entries for reads, as far as there is room: how many reads were taken. One that cannot be
    is answered at once, and does not spoil the others."""
    cdef CUfileIOParams *params
    cdef void *handle
    cdef uint64_t place
    cdef int taken = 0
    wave.count = 0
    while taken < count and wave.count < (1 if self.one_by_one else self.room):
        handle = file_handle(self.files, reads[taken].slot)
        place = <uint64_t>(reads[taken].address - self.base)
        if handle == NULL or reads[taken].length == 0:
            # Neither would ever be heard of again.
            announce(self, reads[taken].cookie, -EBADF if handle == NULL else -EINVAL)
            taken += 1
            continue
        if place > self.length or reads[taken].length > self.length - place:
            announce(self, reads[taken].cookie, -EFAULT)
            taken += 1
            continue
        wave.entries[wave.count].cookie = reads[taken].cookie
        wave.entries[wave.count].size = reads[taken].length
        params = &wave.params[wave.count]
        params.mode = CUFILE_BATCH
        params.u.batch.devPtr_base = self.base
        params.u.batch.file_offset = <int64_t>reads[taken].offset
        params.u.batch.devPtr_offset = <int64_t>place
        params.u.batch.size = reads[taken].length
        params.fh = handle
        params.opcode = CUFILE_READ
        params.cookie = &wave.entries[wave.count]
        wave.count += 1
        taken += 1
    return taken


cdef int submit_batches(void *engine, const Read *reads, int count) noexcept nogil:
    cdef Batches *self = <Batches *>engine
    cdef CUfileError answer
    cdef Wave *wave
    cdef int i, taken = 0, usable = 0
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
        wave.heard_ns = monotonic_ns()
        answer = self.files.api.batch_submit(
            wave.batch, <unsigned int>wave.count, wave.params, 0
        )
        if answer.err == 0:
            continue
        if wave.count == 1:
            # It is this read that cannot be: nothing was started.
            announce(self, wave.entries[0].cookie, -answer.err)
            wave.entries[0].cookie = 0
            retire(self, wave, answer.err)
        else:
            # Some may have been started. All are asked again, one by one, and the one that was
            # wrong fails alone.
            self.one_by_one = 1
            retire_for_retry(self, wave, answer.err)
    if not usable:
        return -self.last_code if self.last_code else -CU_FILE_BATCH_SUBMIT_FAILED
    return taken


cdef void retire_for_retry(Batches *self, Wave *wave, int code) noexcept nogil:
    cdef int i
    self.last_code = code
    for i in range(wave.count):
        announce(self, wave.entries[i].cookie, -LOST - ECANCELED)
        wave.entries[i].cookie = 0
    wave.count = wave.left = 0
    set_up(self, wave)


cdef int reap_batches(
    void *engine, Completion *out, int room, int wanted, int64_t wait_ns
) noexcept nogil:
    cdef Batches *self = <Batches *>engine
    cdef int64_t until = monotonic_ns() + wait_ns
    cdef timespec pause
    cdef int i, given, waiting
    while True:
        waiting = 0
        for i in range(WAVES):
            if self.waves[i].left > 0:
                look(self, &self.waves[i])
                waiting += self.waves[i].left
        if self.ready_count >= wanted or waiting == 0 or monotonic_ns() >= until:
            break
        pause.tv_sec = 0
        pause.tv_nsec = LOOK_NS
        nanosleep(&pause, NULL)
    given = self.ready_count if self.ready_count < room else room
    for i in range(given):
        out[i] = self.ready[i]
    self.ready_count -= given
    for i in range(self.ready_count):
        self.ready[i] = self.ready[i + given]
    return given


cdef void cancel_batches(void *engine) noexcept nogil:
    """Nothing: after cuFileBatchIOCancel no event comes any more, and nobody could tell when a
    slot is free again. The stage gives the reads up, and they end where they may."""


cdef void close_batches(void *engine) noexcept nogil:
    cdef Batches *self = <Batches *>engine
    cdef int i
    for i in range(WAVES):
        if self.waves[i].batch != NULL and self.waves[i].left == 0:
            self.files.api.batch_destroy(self.waves[i].batch)
        free(self.waves[i].entries)
        free(self.waves[i].params)
        free(self.waves[i].events)
    release_files(self.files)
    free(self.ready)
    free(self)


cdef EngineOps OPS
OPS.name = b"cufile batch"
OPS.open = open_batches
OPS.submit = submit_batches
OPS.reap = reap_batches
OPS.cancel = cancel_batches
OPS.close = close_batches


def engine():
    """The engine's functions, as a capsule for a stage."""
    return PyCapsule_New(&OPS, b"gdsload.engine", NULL)
