"""The pump: from the first read to the last byte in one native thread that needs no interpreter.

A `Pump` owns one engine and the thread that drives it. A `Request` is a list of reads, prepared
once and posted as often as one likes. The pump keeps the engine's depth filled, in the request's
order; continues short reads, asks again after EINTR and EAGAIN, reads by the buffered descriptor
what the direct one refuses, and keeps for each read what became of it. Errors are numbers here;
`gdsload.backends.posix` turns them into exceptions.

    post ─► queue ─► engine (depth reads) ─► settle ─► done, failed, or once more
"""

cimport cython
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from posix.time cimport timespec

import os

from gdsload._native.atomics cimport gds_add, gds_load, gds_store
from gdsload._native.engine cimport Buffer, Completion, EngineOps, Read
from gdsload._native.populator cimport CPopulator, populator_advance, populator_starved
from gdsload._native.pthreads cimport (
    deadline_in,
    monotonic_cond_init,
    monotonic_ns,
    pthread_cond_broadcast,
    pthread_cond_destroy,
    pthread_cond_signal,
    pthread_cond_t,
    pthread_cond_timedwait,
    pthread_detach,
    pthread_join,
    pthread_mutex_destroy,
    pthread_mutex_init,
    pthread_mutex_lock,
    pthread_mutex_t,
    pthread_mutex_unlock,
    pthread_t,
    start_quiet_thread,
)
from gdsload._native.region cimport (
    UNIT_BYTES,
    CRegion,
    region_ready,
    release_region,
    retain_region,
)

cdef enum:
    EINTR = 4
    EAGAIN = 11
    EBUSY = 16
    EINVAL = 22
    EOPNOTSUPP = 95
    ECANCELED = 125
    BATCH = 64                 # reads handed to the engine, or taken from it, at a time

cdef enum:
    # What became of a read.
    PENDING = 0
    DONE = 1
    FAILED = 2

cdef enum:
    # How long the pump looks away, at most. Completions wake it; only a new post, a cancellation
    # or populated memory has to wait for the end of a look.
    IDLE_WAIT_NS = 20000000
    BUSY_WAIT_NS = 500000
    # A read that waits this long for its memory goes ahead and faults the pages in itself.
    STARVED_NS = 20000000
    BACK_OFF_NS = 1000000      # after EAGAIN, so that a full device is not asked in a tight loop

cdef struct File:
    int buffered_fd
    int direct_fd              # -1: this file is read through the page cache
    int direct_slot            # the engine's numbers for the two
    int buffered_slot
    uint64_t block             # direct reads start and end on multiples of it

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
    int orphaned               # nobody waits for it any more: the pump frees it when it is quiet
    int64_t direct_bytes
    int64_t buffered_bytes
    int64_t short_reads
    int64_t retries
    int64_t progress_ns        # when a byte last arrived
    CPopulator *populator
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
    Op **again                 # ops to be asked once more
    int again_count


cdef void free_request(CRequest *request) noexcept nogil:
    cdef int i
    for i in range(request.count):
        if request.ops[i].region != NULL:
            release_region(request.ops[i].region)
    free(request.ops)
    free(request.files)
    free(request.order)
    free(request)


cdef void release_pump(CPump *self) noexcept nogil:
    if gds_add(&self.references, -1) > 0:
        return
    pthread_cond_destroy(&self.news)
    pthread_cond_destroy(&self.settled)
    pthread_mutex_destroy(&self.lock)
    free(self.buffers)
    free(self.again)
    free(self)


cdef void settle(CPump *self, Op *op, int error, int64_t now) noexcept nogil:
    cdef CRequest *request = op.request
    op.state = FAILED if error else DONE
    op.error = error
    op.done_ns = now
    request.order[request.settled] = <int>(op - request.ops)
    request.settled += 1
    request.in_flight -= 1
    if error:
        request.failed += 1


cdef void ask_again(CPump *self, Op *op) noexcept nogil:
    self.again[self.again_count] = op
    self.again_count += 1


cdef int handle(CPump *self, Op *op, int64_t result, int64_t now) noexcept nogil:
    """What one completion means. Returns 1 where the pump had better wait a little."""
    cdef CRequest *request = op.request
    cdef File *file = &request.files[op.file]
    cdef uint64_t start = op.landed
    if op.direct:
        start &= ~(file.block - 1)
    if result > 0:
        gds_store(&request.progress_ns, now)
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
    if result < 0 and op.direct and (result == -EINVAL or result == -EOPNOTSUPP):
        # This filesystem, or this file, does not do direct I/O after all.
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


cdef Op *next_op(CPump *self, int64_t now) noexcept nogil:
    """The op to submit next, or NULL where there is none that may go."""
    cdef CRequest *request = self.first
    cdef Op *op
    if self.again_count > 0:
        self.again_count -= 1
        return self.again[self.again_count]
    while request != NULL:
        while request.next < request.count and not request.cancelled:
            op = &request.ops[request.next]
            if op.region != NULL and op.length > 0 and not region_ready(
                op.region,
                <uint64_t>(op.address - op.region.base) // UNIT_BYTES,
                <uint64_t>(op.address + op.length - 1 - op.region.base) // UNIT_BYTES,
            ):
                if self.in_flight > 0 or now - request.progress_ns < STARVED_NS:
                    if self.in_flight == 0 and request.populator != NULL:
                        populator_starved(request.populator)
                    break
            request.next += 1
            request.in_flight += 1
            if request.populator != NULL:
                populator_advance(request.populator, op.length)
            return op
        request = request.next_posted
    return NULL


cdef void describe(Op *op, Read *read) noexcept nogil:
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
    else:
        read.fd = file.buffered_fd
        read.slot = file.buffered_slot
        read.length = op.wanted - start
    read.address = op.address + start
    read.offset = op.offset + start
    read.buffer = op.buffer
    read.cookie = <uint64_t>op


cdef int drop_quiet(CPump *self) noexcept nogil:
    """Takes requests off the queue that have nothing left to do: how many."""
    cdef CRequest **link = &self.first
    cdef CRequest *request
    cdef int dropped = 0
    while link[0] != NULL:
        request = link[0]
        if request.in_flight == 0 and (request.settled == request.count or request.cancelled):
            link[0] = request.next_posted
            request.next_posted = NULL
            request.posted = 0
            dropped += 1
            if request.orphaned:
                free_request(request)
        else:
            link = &request.next_posted
    return dropped


cdef int unstage(CPump *self, Read *staged, int count, int64_t now) noexcept nogil:
    """Gives up reads of cancelled requests that the engine has not taken; how many are left.

    An engine that takes nothing any more would otherwise keep such a request alive for good.
    """
    cdef int i, kept = 0
    for i in range(count):
        if (<Op *>staged[i].cookie).request.cancelled:
            settle(self, <Op *>staged[i].cookie, ECANCELED, now)
        else:
            staged[kept] = staged[i]
            kept += 1
    return kept


cdef void fail_everything(CPump *self, int error) noexcept nogil:
    """After the engine has gone: what it still had will never be heard of."""
    cdef CRequest *request = self.first
    cdef int64_t now = monotonic_ns()
    cdef int i
    while request != NULL:
        request.cancelled = 1
        for i in range(request.count):
            if request.ops[i].state == PENDING:
                if request.ops[i].posted_ns == 0:
                    request.in_flight += 1
                settle(self, &request.ops[i], error, now)
        request.in_flight = 0
        request = request.next_posted
    self.again_count = 0


cdef int any_cancelled(CPump *self) noexcept nogil:
    cdef CRequest *request = self.first
    while request != NULL:
        if request.cancelled and request.in_flight > 0:
            return 1
        request = request.next_posted
    return 0


cdef void *serve(void *arg) noexcept nogil:
    cdef CPump *self = <CPump *>arg
    cdef Read staged[BATCH]
    cdef Completion completions[BATCH]
    cdef Op *op
    cdef timespec until
    cdef int64_t now, wait
    cdef int staged_count = 0
    cdef int taken, seen, i, pause, cancel_sent = 0
    pthread_mutex_lock(&self.lock)
    self.broken = self.ops.open(
        &self.engine, self.depth, self.buffers, self.buffer_count, &self.fixed
    )
    while not self.broken:
        now = monotonic_ns()
        staged_count = unstage(self, staged, staged_count, now)
        while staged_count < BATCH and self.in_flight + staged_count < self.depth:
            op = next_op(self, now)
            if op == NULL:
                break
            if op.posted_ns == 0:
                op.posted_ns = now
            if op.request.cancelled or op.landed >= op.wanted:
                settle(self, op, 0 if op.landed >= op.wanted else ECANCELED, now)
                continue
            describe(op, &staged[staged_count])
            staged_count += 1
        # Also a request that ends without a completion (cancelled while it was to be asked again)
        # has somebody who waits for it.
        if drop_quiet(self) or (self.in_flight == 0 and staged_count == 0):
            pthread_cond_broadcast(&self.settled)
        if self.in_flight == 0 and staged_count == 0:
            if self.closing and self.first == NULL:
                break
            # Nothing to do, or memory is not ready yet: then it is looked at again very soon.
            deadline_in(&until, IDLE_WAIT_NS if self.first == NULL else BUSY_WAIT_NS // 5)
            pthread_cond_timedwait(&self.news, &self.lock, &until)
            continue
        if any_cancelled(self):
            if not cancel_sent:
                self.ops.cancel(self.engine)
            cancel_sent = 1
        else:
            cancel_sent = 0
        wait = IDLE_WAIT_NS if self.in_flight + staged_count >= self.depth else BUSY_WAIT_NS
        pthread_mutex_unlock(&self.lock)

        pause = 0
        taken = 0
        seen = 0
        if staged_count:
            taken = self.ops.submit(self.engine, staged, staged_count)
        if self.in_flight + (taken if taken > 0 else 0) > 0:
            seen = self.ops.reap(self.engine, completions, BATCH, wait)

        pthread_mutex_lock(&self.lock)
        now = monotonic_ns()
        if taken < 0:
            # Refused at the door: that is the answer to the first of them.
            pause |= handle(self, <Op *>staged[0].cookie, taken, now)
            taken = 1
        else:
            self.in_flight += taken
            if taken == 0 and staged_count:
                pause = self.in_flight == 0
        staged_count -= taken
        for i in range(staged_count):
            staged[i] = staged[i + taken]
        if seen < 0:
            self.broken = seen
            break
        self.in_flight -= seen
        for i in range(seen):
            pause |= handle(self, <Op *>completions[i].cookie, completions[i].result, now)
        if seen or taken == 1:  # one that was refused at the door has settled too
            pthread_cond_broadcast(&self.settled)
        if pause:
            deadline_in(&until, BACK_OFF_NS)
            pthread_cond_timedwait(&self.news, &self.lock, &until)
    pthread_mutex_unlock(&self.lock)
    if self.engine != NULL:
        self.ops.close(self.engine)
    pthread_mutex_lock(&self.lock)
    if self.broken:
        fail_everything(self, -self.broken)
    drop_quiet(self)
    self.finished = 1
    pthread_cond_broadcast(&self.settled)
    pthread_mutex_unlock(&self.lock)
    release_pump(self)
    return NULL


@cython.final
cdef class Pump:
    """One engine and the native thread that drives it. Close it, or let it be collected."""

    cdef CPump *pump
    cdef readonly int pid

    def __cinit__(self, object engine, int depth, list buffers=None):
        """``engine``: its capsule. ``buffers``: (address, bytes) to register with the engine.

        Raises OSError with the engine's errno where it cannot be opened.
        """
        cdef CPump *made
        cdef int i
        if depth < 1:
            raise ValueError(f"a pump of depth {depth} reads nothing")
        made = <CPump *>calloc(1, sizeof(CPump))
        if made == NULL:
            raise MemoryError("no memory for a pump")
        made.references = 1
        made.depth = depth
        made.ops = <EngineOps *>PyCapsule_GetPointer(engine, b"gdsload.engine")
        pthread_mutex_init(&made.lock, NULL)
        monotonic_cond_init(&made.news)
        monotonic_cond_init(&made.settled)
        self.pump = made
        self.pid = os.getpid()
        made.again = <Op **>malloc((depth + BATCH) * sizeof(void *))
        made.buffer_count = len(buffers) if buffers else 0
        made.buffers = <Buffer *>calloc(made.buffer_count + 1, sizeof(Buffer))
        if made.again == NULL or made.buffers == NULL:
            raise MemoryError("no memory for a pump")
        for i in range(made.buffer_count):
            made.buffers[i].address = <char *><size_t>buffers[i][0]
            made.buffers[i].length = <uint64_t>buffers[i][1]
        self.start()

    cdef start(self):
        cdef CPump *pump = self.pump
        cdef timespec until
        cdef int error
        pump.references = 2
        error = start_quiet_thread(&pump.thread, serve, pump)
        if error != 0:
            pump.references = 1
            raise OSError(error, f"no thread for the pump: {os.strerror(error)}")
        pump.running = 1
        with nogil:
            pthread_mutex_lock(&pump.lock)
            while pump.engine == NULL and pump.broken == 0:
                deadline_in(&until, IDLE_WAIT_NS)
                pthread_cond_timedwait(&pump.settled, &pump.lock, &until)
            error = pump.broken
            pthread_mutex_unlock(&pump.lock)
        if error:
            self.close(1.0)
            raise OSError(-error, os.strerror(-error))

    @property
    def name(self):
        """The engine's name."""
        return self.pump.ops.name.decode()

    @property
    def fixed_buffers(self):
        """Whether the engine could register the buffers that it was handed."""
        return bool(self.pump.fixed)

    def close(self, double timeout):
        """Cancels what is left, waits for what cannot be cancelled, and ends the thread.

        Returns False where reads were still stuck after ``timeout`` seconds: the thread and the
        memory they point into are then left alive until those reads come back.
        """
        cdef CPump *pump = self.pump
        cdef CRequest *request
        cdef timespec until
        cdef int finished
        cdef int64_t wait_ns = <int64_t>(timeout * 1e9)
        if not pump.running:
            return True
        pump.running = 0  # whoever closes it at the same time must not join the thread again
        if self.pid != os.getpid():  # the thread stayed behind in the parent
            return True
        with nogil:
            deadline_in(&until, wait_ns)
            pthread_mutex_lock(&pump.lock)
            pump.closing = 1
            request = pump.first
            while request != NULL:
                request.cancelled = 1
                request = request.next_posted
            pthread_cond_signal(&pump.news)
            while not pump.finished:
                if pthread_cond_timedwait(&pump.settled, &pump.lock, &until) != 0:
                    break
            finished = pump.finished
            pthread_mutex_unlock(&pump.lock)
            if finished:
                pthread_join(pump.thread, NULL)
            else:
                pthread_detach(pump.thread)
        return bool(finished)

    def __dealloc__(self):
        if self.pump == NULL:
            return
        if self.pump.running:
            self.close(0.0)
        release_pump(self.pump)


# No collector: it would clear `pump` and `populator` before __dealloc__ runs, which needs both to
# tell whether reads are still in flight. Neither can be part of a cycle.
@cython.no_gc
@cython.final
cdef class Request:
    """Reads that belong together, prepared once: each op keeps its own result."""

    cdef CRequest *request
    cdef readonly Pump pump
    cdef object populator     # kept alive while its struct is pointed at

    def __cinit__(self, Pump pump, list files, list ops, object populator=None):
        """``files``: (buffered fd, direct fd or -1, block, direct slot, buffered slot). A slot is a
        number that stands for one descriptor as long as the pump lives, and is not used twice.

        ``ops``: (file, offset, length, wanted, address, region's handle or None, buffer or -1).
        """
        cdef CRequest *made = <CRequest *>calloc(1, sizeof(CRequest))
        cdef File *file
        cdef Op *op
        if made == NULL:
            raise MemoryError("no memory for a request")
        self.request = made
        self.pump = pump
        self.populator = populator
        if populator is not None:
            made.populator = <CPopulator *>PyCapsule_GetPointer(
                populator.handle(), b"gdsload.populator"
            )
        made.files = <File *>calloc(len(files) + 1, sizeof(File))
        made.ops = <Op *>calloc(len(ops) + 1, sizeof(Op))
        made.order = <int *>calloc(len(ops) + 1, sizeof(int))
        if made.files == NULL or made.ops == NULL or made.order == NULL:
            raise MemoryError(f"no memory for a request of {len(ops)} reads")
        for entry in files:
            file = &made.files[made.file_count]
            file.buffered_fd, file.direct_fd, file.block = entry[0], entry[1], entry[2]
            file.direct_slot, file.buffered_slot = entry[3], entry[4]
            made.file_count += 1
        for entry in ops:
            op = &made.ops[made.count]
            op.request = made
            op.file, op.offset, op.length, op.wanted = entry[0], entry[1], entry[2], entry[3]
            op.address = <char *><size_t>entry[4]
            op.buffer = entry[6]
            if not 0 <= op.file < made.file_count:
                raise IndexError(f"read {made.count} is of file {op.file} of {made.file_count}")
            if op.wanted > op.length:
                raise ValueError(f"read {made.count} wants more bytes than it asks for")
            if entry[5] is not None:
                op.region = <CRegion *>PyCapsule_GetPointer(entry[5], b"gdsload.region")
                if (
                    op.address < op.region.base
                    or <uint64_t>(op.address - op.region.base) > op.region.length
                    or op.length > op.region.length - <uint64_t>(op.address - op.region.base)
                ):
                    op.region = NULL
                    raise ValueError(f"read {made.count} leaves its region")
                retain_region(op.region)
            made.count += 1
        self.reset()

    cdef void reset(self) noexcept nogil:
        cdef CRequest *request = self.request
        cdef Op *op
        cdef File *file
        cdef int i
        request.next = 0
        request.settled = request.failed = request.told = request.cancelled = 0
        request.direct_bytes = request.buffered_bytes = 0
        request.short_reads = request.retries = 0
        for i in range(request.count):
            op = &request.ops[i]
            file = &request.files[op.file]
            op.state = PENDING
            op.landed = 0
            op.error = op.retried = 0
            op.posted_ns = op.done_ns = 0
            op.direct = (
                file.direct_fd >= 0
                and op.length > 0
                and op.offset % file.block == 0
                and op.length % file.block == 0
            )

    cdef int look(self, int *word) noexcept:
        """A number that the pump's thread writes."""
        cdef int value
        if self.pump.pid != os.getpid():
            return word[0]
        with nogil:
            pthread_mutex_lock(&self.pump.pump.lock)
            value = word[0]
            pthread_mutex_unlock(&self.pump.pump.lock)
        return value

    cdef require_own_process(self):
        # After a fork the lock may be held for good, by a thread that stayed in the parent.
        if self.pump.pid != os.getpid():
            raise OSError(9, "the pump stayed behind in the process that forked this one")

    def post(self):
        """Hands the reads to the pump and returns.

        Raises RuntimeError while it is under way already, OSError where the pump has ended.
        """
        cdef CPump *pump = self.pump.pump
        cdef CRequest **link
        cdef int error = 0
        if pump.broken or not pump.running or self.pump.pid != os.getpid():
            raise OSError(-pump.broken or 9, "the pump has ended")
        with nogil:
            pthread_mutex_lock(&pump.lock)
            if self.request.posted:
                error = 2
            elif pump.finished or pump.closing:
                error = 1
            else:
                self.reset()
                self.request.posted = 1
                self.request.progress_ns = monotonic_ns()
                self.request.next_posted = NULL
                link = &pump.first
                while link[0] != NULL:
                    link = &link[0].next_posted
                link[0] = self.request
                pthread_cond_signal(&pump.news)
            pthread_mutex_unlock(&pump.lock)
        if error == 2:
            raise RuntimeError("this request is under way already")
        if error:
            raise OSError(-pump.broken or 9, "the pump has ended")

    def wait(self, double timeout, int first=0, int last=-1):
        """Waits until these ops (default: all) have settled, or never will: the request was
        cancelled, or the pump has ended. True where they all settled.
        """
        cdef CPump *pump = self.pump.pump
        cdef CRequest *request = self.request
        cdef timespec until
        cdef int i = first
        if last < 0:
            last = request.count - 1
        if last >= request.count or first < 0:
            raise IndexError(f"ops {first} to {last} of {request.count}")
        self.require_own_process()
        with nogil:
            deadline_in(&until, <int64_t>(timeout * 1e9))
            pthread_mutex_lock(&pump.lock)
            while True:
                while i <= last and request.ops[i].state != PENDING:
                    i += 1
                if i > last or not request.posted or pump.finished:
                    break
                if pthread_cond_timedwait(&pump.settled, &pump.lock, &until) != 0:
                    break
            pthread_mutex_unlock(&pump.lock)
        return i > last

    def news(self):
        """The ops that have settled since it was last asked, in the order in which they did."""
        cdef CRequest *request = self.request
        cdef int settled, told
        self.require_own_process()
        with nogil:
            pthread_mutex_lock(&self.pump.pump.lock)
            settled, told = request.settled, request.told
            request.told = settled
            pthread_mutex_unlock(&self.pump.pump.lock)
        return [request.order[i] for i in range(told, settled)]

    def cancel(self):
        """No further op is submitted; those in flight are called back where that can be done."""
        cdef CPump *pump = self.pump.pump
        if self.pump.pid != os.getpid():
            return
        with nogil:
            pthread_mutex_lock(&pump.lock)
            if self.request.posted:
                self.request.cancelled = 1
            pthread_cond_signal(&pump.news)
            pthread_mutex_unlock(&pump.lock)

    def quiet(self, double timeout):
        """Waits until no read of it is in flight; False at the end of the time."""
        cdef CPump *pump = self.pump.pump
        cdef timespec until
        cdef int posted
        if self.pump.pid != os.getpid():
            return True
        with nogil:
            deadline_in(&until, <int64_t>(timeout * 1e9))
            pthread_mutex_lock(&pump.lock)
            while self.request.posted and not pump.finished:
                if pthread_cond_timedwait(&pump.settled, &pump.lock, &until) != 0:
                    break
            posted = self.request.posted and not pump.finished
            pthread_mutex_unlock(&pump.lock)
        return not posted

    @property
    def count(self):
        return self.request.count

    @property
    def settled(self):
        return self.look(&self.request.settled)

    @property
    def failed(self):
        return self.look(&self.request.failed)

    @property
    def posted(self):
        return bool(self.look(&self.request.posted))

    @property
    def idle_seconds(self):
        """Seconds since a byte last arrived."""
        return (monotonic_ns() - gds_load(&self.request.progress_ns)) * 1e-9

    def result(self, int op):
        """(settled, bytes landed, error): error is an errno, -1 for a file that ended early."""
        if not 0 <= op < self.request.count:
            raise IndexError(f"op {op} of {self.request.count}")
        return (
            self.request.ops[op].state != PENDING,
            self.request.ops[op].landed,
            self.request.ops[op].error,
        )

    def failures(self):
        """(op, bytes landed, error) of the ops that failed, in their order."""
        cdef CRequest *request = self.request
        return [
            (i, request.ops[i].landed, request.ops[i].error)
            for i in range(request.count)
            if request.ops[i].state == FAILED
        ]

    def counts(self):
        """(bytes by direct reads, bytes by buffered ones, short reads continued, retries)."""
        return (
            self.request.direct_bytes,
            self.request.buffered_bytes,
            self.request.short_reads,
            self.request.retries,
        )

    def trace(self):
        """(posted, done, direct) of each op: monotonic ns, 0 where it was not reached."""
        cdef CRequest *request = self.request
        return [
            (request.ops[i].posted_ns, request.ops[i].done_ns, bool(request.ops[i].direct))
            for i in range(request.count)
        ]

    def __dealloc__(self):
        cdef CPump *pump
        cdef int gone = 1
        if self.request == NULL:
            return
        if self.pump is not None and self.pump.pid == os.getpid():
            # Reads may still be in flight into memory that this request keeps alive: then the
            # pump, which will hear of them, frees it instead.
            pump = self.pump.pump
            with nogil:
                pthread_mutex_lock(&pump.lock)
                if self.request.posted and not pump.finished:
                    self.request.cancelled = 1
                    self.request.orphaned = 1
                    self.request.populator = NULL
                    gone = 0
                    pthread_cond_signal(&pump.news)
                pthread_mutex_unlock(&pump.lock)
        if gone:
            free_request(self.request)
