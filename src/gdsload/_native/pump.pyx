"""The pump: submits reads to an engine and handles their completions in one native thread.

A `Pump` owns one engine and the thread that drives it. It keeps as many reads in flight as the engine
takes and the storage answers soon, of the requests posted to it (request.pyx), oldest request first,
each in its order. It decides what a completion means: short reads continue, refused direct reads become
buffered, errors get one retry. It also applies the bandwidth limits that all pumps share.

    post ─► fill ─► submit ─► engine (depth reads) ─► reap ─► handle ─► done, failed, or once more
"""

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cpython.pycapsule cimport PyCapsule_GetContext, PyCapsule_GetPointer, PyCapsule_New
from libc.errno cimport EAGAIN, EBUSY, EFAULT, EINTR, EINVAL, EOPNOTSUPP, ETIMEDOUT
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, malloc
from posix.time cimport timespec
from posix.unistd cimport getpid

import os

from gdsload._native.atomics cimport gds_store
from gdsload._native.engine cimport BUFFERED, DIRECT, ECANCELED, MAPPED
from gdsload._native.pthreads cimport (
    SIGNAL_WAIT_NS, deadline_in, monotonic_cond_init, monotonic_ns, pthread_cond_broadcast,
    pthread_cond_signal, pthread_cond_timedwait, pthread_detach, pthread_join, pthread_mutex_init,
    start_quiet_thread,
)

cdef enum:
    # One refusal may concern one read, or its memory. After this many in a row the rest of the file
    # is read through the page cache.
    MOST_REFUSED = 4
    MOST_ERRNO = 4095  # larger codes are those of cuFile, and of a device that refuses a copy
    # Longest waits of the pump. Completions end them, and so do posts if nothing is in flight; with
    # reads in flight, a post has to wait for the end of a poll.
    PARKED_WAIT_NS = 10000000000  # without any request
    IDLE_WAIT_NS = 20000000
    CLOSE_NS = 5000000000         # for an engine without reads to close
    ALONE_WAIT_NS = 5000000    # no waiter registered: a new one must soon learn of completions
    LAST_WAIT_NS = 2000000     # the engine has room for a new post
    BUSY_WAIT_NS = 500000
    RETRY_WAIT_NS = 100000     # throttled, at least
    BACK_OFF_NS = 1000000      # after EAGAIN, so that a full device is not polled in a tight loop
    # What an unused limit accumulates: one poll of a pump, not a burst.
    SAVED_NS = 1000000
    # Reads in flight share the rate of the storage: all of them together must take less time than the
    # silence that counts as a stall (60 s). A pump begins with FIRST_WINDOW, of FIRST_BYTES at most
    # (a read into the page cache ends early if it takes long). Each fast read adds
    # WINDOW_GROWTH, so after a round trip there are 16 times as many; slow reads halve their number.
    # Chosen by benchmarks/results/cold-fuse-100ms.json, and by links of 2 to 10 MB/s.
    FIRST_WINDOW = 32
    FIRST_BYTES = 67108864
    LEAST_WINDOW = 4
    WINDOW_GROWTH = 15
    FAST_READ_NS = 2000000000
    SLOW_READ_NS = 5000000000

cdef CThrottle THROTTLE
pthread_mutex_init(&THROTTLE.lock, NULL)


# --- which read may start ----------------------------------------------------------------------

cdef int64_t limit_wait(Limit *limit, int64_t now) noexcept nogil:
    """Nanoseconds until the next read may start."""
    return max(limit.free_ns - now, 0) if limit.rate > 0 else 0


cdef void limit_take(Limit *limit, uint64_t nbytes, int64_t now) noexcept nogil:
    if limit.rate > 0:
        limit.free_ns = max(limit.free_ns, now - SAVED_NS)
        limit.free_ns += <int64_t>(<double>nbytes * 1e9 / <double>limit.rate)


cdef int64_t throttle_wait(
    CThrottle *self, int ahead, int in_flight, uint64_t nbytes, int64_t now
) noexcept nogil:
    """Nanoseconds until a read may start in a pump with `in_flight` reads; if 0, it starts, and its
    bytes are counted."""
    cdef int64_t wait_ns
    pthread_mutex_lock(&self.lock)
    wait_ns = limit_wait(&self.all, now)
    if ahead:
        wait_ns = max(wait_ns, limit_wait(&self.ahead, now))
        if self.loads > 0 and in_flight > 0:  # until the one in flight has ended
            wait_ns = max(wait_ns, <int64_t>RETRY_WAIT_NS)
    if wait_ns == 0:
        limit_take(&self.all, nbytes, now)
        if ahead:
            limit_take(&self.ahead, nbytes, now)
    pthread_mutex_unlock(&self.lock)
    return wait_ns


cdef int may_start(CPump *self, CRequest *request, Op *op, int64_t now) noexcept nogil:
    cdef int64_t wait_ns = throttle_wait(
        self.throttle, request.ahead, self.in_flight + self.submission_count, op.length, now
    )
    if wait_ns == 0:
        return 1
    self.idle_wait_ns = min(self.idle_wait_ns, max(wait_ns, <int64_t>RETRY_WAIT_NS))
    if request.in_flight == 0:  # it waits for the throttle alone, and not for storage
        gds_store(&request.progress_ns, now)
    return 0


cdef Op *next_op(CPump *self, int64_t now) noexcept nogil:
    """The op to submit next, or NULL if none may start."""
    cdef CRequest *request = self.first
    cdef Op *op
    self.idle_wait_ns = IDLE_WAIT_NS
    if self.again_count > 0:
        self.again_count -= 1
        return self.again[self.again_count]
    while request != NULL:
        if request.next < request.count and not request.cancelled:
            op = &request.ops[request.next]
            if may_start(self, request, op, now):
                if request.in_flight == 0:  # until now it waited for its turn, not for storage
                    gds_store(&request.progress_ns, now)
                request.next += 1
                request.in_flight += 1
                return op
        request = request.next_posted
    return NULL


# --- what a completion means -------------------------------------------------------------------

cdef void settle(CPump *self, Op *op, int error, int64_t now) noexcept nogil:
    cdef CRequest *request = op.request
    cdef Waiter *waiter = request.waiters
    cdef int index = <int>(op - request.ops)
    op.state = FAILED if error else DONE
    op.error = error
    op.done_ns = now
    request.order[request.settled] = index
    request.settled += 1
    request.in_flight -= 1
    request.failed += op.state == FAILED
    while waiter != NULL:
        if waiter.first <= index <= waiter.last:
            waiter.left -= 1
            self.fulfilled |= waiter.left == 0
        waiter = waiter.next


cdef void retry(CPump *self, Op *op) noexcept nogil:
    self.again[self.again_count] = op
    self.again_count += 1


cdef void adapt_window(CPump *self, Op *op, int64_t now) noexcept nogil:
    """Adapts the number of reads in flight to the time that a read has taken."""
    cdef int64_t took = now - op.posted_ns
    if took < FAST_READ_NS:
        self.window = min(self.window + WINDOW_GROWTH, self.depth)
    elif took > SLOW_READ_NS and op.posted_ns > self.shrunk_ns:  # once for those of one time
        self.window = max(self.window // 2, min(LEAST_WINDOW, self.depth))
        self.shrunk_ns = now


cdef int complete(CPump *self, Op *op, int64_t result, int64_t now) noexcept nogil:
    """Handles one completion. Returns 1 if the pump should pause before its next submission."""
    cdef CRequest *request = op.request
    cdef File *file = &request.files[op.file]
    cdef uint64_t end, start = op.arrived
    if op.direct:
        start &= ~(file.block - 1)
    if result > 0:
        gds_store(&request.progress_ns, now)
        self.progress_ns = now
        adapt_window(self, op, now)
        end = start + <uint64_t>result
        if op.direct:
            file.refused_in_row = 0
        if end > op.arrived:
            if op.direct:
                request.direct_bytes += <int64_t>(end - op.arrived)
            else:
                request.buffered_bytes += <int64_t>(end - op.arrived)
            op.arrived = end
        elif op.direct:
            op.direct = 0  # less than a block of progress: direct I/O cannot read the rest
        if op.arrived >= op.wanted:
            settle(self, op, 0, now)
        elif request.cancelled:
            settle(self, op, ECANCELED, now)
        else:
            # A short read is no end of file, and may hide an error that the next one reports.
            request.short_reads += 1
            retry(self, op)
        return 0
    if request.cancelled:
        settle(self, op, ECANCELED, now)
        return 0
    if result == -EINTR or result == -ECANCELED or result == -EAGAIN or result == -EBUSY:
        # Temporary, but perhaps for long: without a pause, retries would keep a core busy.
        request.retries += 1
        retry(self, op)
        return 1
    if op.direct and (result == -EINVAL or result == -EOPNOTSUPP or result == -EFAULT):
        # The filesystem or this file refuses direct I/O after all; or at this offset, or into this
        # memory (EFAULT), which may belong to a device driver.
        file.refused = <int>-result
        file.refused_in_row += 1
        if result == -EOPNOTSUPP or file.refused_in_row >= MOST_REFUSED:
            file.direct_fd = -1
        op.direct = 0
        retry(self, op)
    elif op.direct or (result < 0 and not op.retried):
        # One more try through the page cache, also after a direct read that met an early end of
        # the file: the page cache's answer decides.
        if op.direct and -MOST_ERRNO <= result < 0:
            file.refused = <int>-result
        op.retried = 1
        op.direct = 0
        request.retries += 1
        retry(self, op)
    else:
        # 0 with bytes missing: the file is shorter than its header says.
        settle(self, op, <int>-result if result < 0 else -1, now)
    return 0


cdef void describe(Op *op, Read *read) noexcept nogil:
    """Writes the read of an op's missing bytes."""
    cdef File *file = &op.request.files[op.file]
    cdef uint64_t start = op.arrived
    if op.direct and file.direct_fd < 0:
        op.direct = 0
    if op.direct:
        start &= ~(file.block - 1)
        read.fd, read.file_number, read.io_mode = file.direct_fd, file.direct_number, DIRECT
        read.length = op.length - start
    else:
        read.fd, read.file_number = file.buffered_fd, file.buffered_number
        read.io_mode = MAPPED if op.io_mode == MAPPED else BUFFERED
        read.length = op.wanted - start
    read.address = op.address + start
    read.memory = &op.memory
    if op.memory.region == NULL or (op.memory.region.touched == NULL and read.io_mode != MAPPED):
        read.memory = NULL
    read.offset = op.offset + start
    read.buffer = op.buffer
    read.cookie = <uint64_t>op


# --- the pump's thread -------------------------------------------------------------------------

cdef void fill_submission(CPump *self) noexcept nogil:
    """Fills the next submission, and drops from it reads of cancelled requests: with an engine that
    takes nothing any more, such a request would never end."""
    cdef int64_t now = monotonic_ns()
    cdef int i, count = 0
    cdef Op *op
    for i in range(self.submission_count):
        op = <Op *>self.submission[i].cookie
        if op.request.cancelled:
            settle(self, op, ECANCELED, now)
        else:
            self.submission[count] = self.submission[i]
            count += 1
    self.submission_count = count
    if self.progress_ns == 0 and self.first != NULL:  # nothing is known of the storage yet
        op = &self.first.ops[self.first.count // 2]
        if op.io_mode != MAPPED and op.length > 0:
            count = <int>(<uint64_t>FIRST_BYTES // op.length)
            self.window = min(self.window, max(count, min(LEAST_WINDOW, self.depth)))
    while self.submission_count < BATCH and self.in_flight + self.submission_count < self.window:
        op = next_op(self, now)
        if op == NULL:
            break
        if op.posted_ns == 0:
            op.posted_ns = now
        if op.request.cancelled or op.arrived >= op.wanted:
            settle(self, op, 0 if op.arrived >= op.wanted else ECANCELED, now)
            continue
        describe(op, &self.submission[self.submission_count])
        self.submission_count += 1


cdef int submit(CPump *self) noexcept nogil:
    """Without the lock: the number of reads that the engine took, or -errno of the first."""
    if self.submission_count == 0:
        return 0
    return self.ops.submit(self.engine, self.submission, self.submission_count)


cdef int reap(CPump *self, int taken, int wanted, int64_t wait_ns) noexcept nogil:
    """Without the lock: the number of completions, or -errno of an engine that failed for good."""
    if taken < self.submission_count:
        wanted = 1  # the next completion makes room
    if self.in_flight + max(taken, 0) == 0:
        return 0
    return self.ops.reap(self.engine, self.completions, BATCH, wanted, wait_ns)


cdef int handle(CPump *self, int taken, int seen) noexcept nogil:
    """Handles the results of `submit` and `reap`. Returns 1 if the pump should pause."""
    cdef int64_t now = monotonic_ns()
    cdef int i, pause
    if taken < 0:
        # The submission was refused: that is the result of its first read.
        pause = complete(self, <Op *>self.submission[0].cookie, taken, now)
        taken = 1
    else:
        self.in_flight += taken
        pause = taken == 0 and self.submission_count > 0 and self.in_flight == 0
    self.submission_count -= taken
    for i in range(self.submission_count):
        self.submission[i] = self.submission[i + taken]
    if seen < 0:
        self.broken = seen
        return 0
    self.in_flight -= seen
    for i in range(seen):
        pause |= complete(self, <Op *>self.completions[i].cookie, self.completions[i].result, now)
    return pause


cdef int drop_drained(CPump *self) noexcept nogil:
    """Removes requests that have nothing left to do: their number."""
    cdef CRequest **link = &self.first
    cdef CRequest *request
    cdef int dropped = 0
    while link[0] != NULL:
        request = link[0]
        if request.in_flight == 0 and (request.settled == request.count or request.cancelled):
            link[0] = request.next_posted
            request.next_posted = NULL
            request.posted = 0
            count_load(self, request)
            dropped += 1
            if request.orphaned:
                free_request(request)
        else:
            link = &request.next_posted
    return dropped


cdef int64_t poll_timeout(CPump *self, int *wanted, int *cancelled) noexcept nogil:
    """Chooses the timeout of the next reap and the number of completions to wait for: one wake-up
    costs more than handling one completion. `cancelled`: whether a request is being cancelled.

    There is nothing to do before a quarter of the window is free, or a waiter has its last op.
    """
    cdef CRequest *request = self.first
    cdef Waiter *waiter
    cdef int under_way = self.in_flight + self.submission_count
    cdef int left = 0, unsubmitted = 0, awaited = 0
    cancelled[0] = 0
    while request != NULL:
        awaited |= not request.cancelled
        unsubmitted |= request.next < request.count and not request.cancelled
        cancelled[0] |= request.cancelled
        waiter = request.waiters
        while waiter != NULL:
            if left == 0 or waiter.left < left:
                left = waiter.left
            waiter = waiter.next
        request = request.next_posted
    wanted[0] = 1
    if not awaited and self.submission_count == 0:
        return IDLE_WAIT_NS  # a cancelled read may never end
    if under_way < self.window and (unsubmitted or left == 0 or cancelled[0]):
        return BUSY_WAIT_NS
    if cancelled[0]:
        return IDLE_WAIT_NS
    # With nothing left to submit, only the waiters count.
    wanted[0] = self.window // 4 if under_way >= self.window else under_way
    if left > 0:
        wanted[0] = min(wanted[0], left)
    wanted[0] = min(max(wanted[0], 1), <int>BATCH)
    if under_way < self.window:
        return LAST_WAIT_NS
    return IDLE_WAIT_NS if left else ALONE_WAIT_NS


cdef void wait_for_wakeup(CPump *self, int64_t wait_ns) noexcept nogil:
    cdef timespec until
    deadline_in(&until, wait_ns)
    pthread_cond_timedwait(&self.wakeup, &self.lock, &until)


cdef void fail_everything(CPump *self, int error) noexcept nogil:
    """After the engine failed for good: its reads never complete, and may still write to their
    memory, which is therefore never freed."""
    cdef CRequest *request = self.first
    cdef int64_t now = monotonic_ns()
    cdef int i
    while request != NULL:
        cancel_request(self, request)
        for i in range(request.count):
            if request.ops[i].state == PENDING:
                if request.ops[i].posted_ns == 0:
                    request.in_flight += 1
                else:
                    request.ops[i].memory.region = NULL
                settle(self, &request.ops[i], error, now)
        request.in_flight = 0
        request = request.next_posted
    self.again_count = 0


cdef void *serve(void *arg) noexcept nogil:
    cdef CPump *self = <CPump *>arg
    cdef int64_t wait_ns
    cdef int64_t cancels_sent = 0, cancels
    cdef int taken, seen, wanted, cancelled, given_up, pause = 0
    cdef CRequest *first
    cdef void *engine = NULL
    cdef int broken
    pthread_mutex_lock(&self.lock)
    # If the constructor has given up, what the engine needs may be freed already.
    broken = -ECANCELED if self.closing else 0
    pthread_mutex_unlock(&self.lock)
    if not broken:
        # Without the lock: a driver may hang here, and the constructor gives up then.
        broken = self.ops.open(
            &engine, self.context, self.depth, self.buffers, self.buffer_count
        )
    pthread_mutex_lock(&self.lock)
    self.engine, self.broken = engine, broken
    pthread_cond_broadcast(&self.settled)  # the constructor waits for the engine
    while not self.broken:
        self.idle = given_up = 0
        fill_submission(self)
        # A request may also end without a completion: cancelled while it waited for a retry.
        if drop_drained(self) or self.fulfilled:
            self.fulfilled = 0
            pthread_cond_broadcast(&self.settled)
        if self.in_flight == 0 and self.submission_count == 0:
            if self.ops.take_back != NULL:
                # Without the lock: a driver may hang here, too. A post behind a throttled request,
                # which is not noticed here, waits for the end of the pump's sleep.
                first, cancels = self.first, self.cancelled
                pthread_mutex_unlock(&self.lock)
                given_up = self.ops.take_back(self.engine)
                pthread_mutex_lock(&self.lock)
                if given_up < 0:
                    self.broken = given_up
                if self.broken or self.first != first or self.cancelled != cancels:
                    continue
            self.idle = given_up == 0
            if self.closing and self.first == NULL:
                break
            wait_ns = PARKED_WAIT_NS if self.first == NULL else self.idle_wait_ns
            wait_for_wakeup(self, min(wait_ns, <int64_t>IDLE_WAIT_NS) if given_up else wait_ns)
            continue
        wait_ns = poll_timeout(self, &wanted, &cancelled)
        if cancelled and cancels_sent != self.cancelled:
            self.ops.cancel(self.engine)
        cancels_sent = self.cancelled
        pthread_mutex_unlock(&self.lock)

        taken = submit(self)
        seen = reap(self, taken, wanted, wait_ns)

        pthread_mutex_lock(&self.lock)
        pause = handle(self, taken, seen)
        if self.fulfilled:
            self.fulfilled = 0
            pthread_cond_broadcast(&self.settled)
        if pause:
            wait_for_wakeup(self, BACK_OFF_NS)
    pthread_mutex_unlock(&self.lock)
    if self.engine != NULL:
        self.ops.close(self.engine)
    pthread_mutex_lock(&self.lock)
    if self.broken:
        fail_everything(self, -self.broken)
    drop_drained(self)
    self.finished = 1
    pthread_cond_broadcast(&self.settled)
    pthread_mutex_unlock(&self.lock)
    release_pump(self)
    return NULL


OPEN_SECONDS = 30.0  # of the drivers that an engine opens


@cython.final
cdef class Pump:
    """One engine and the native thread that drives it. Close it, or let it be collected."""

    cdef CPump *pump
    cdef readonly int pid

    def __cinit__(
        self, object engine, int depth, list buffers=None, double open_seconds=OPEN_SECONDS
    ):
        """``engine``: its capsule. ``buffers``: (address, bytes) to register with the engine.

        Raises OSError with the engine's errno if it cannot be opened; ETIMEDOUT if opening takes
        more than ``open_seconds``: its thread then ends when the call returns.
        """
        cdef CPump *made
        cdef int i
        if depth < 1:
            raise ValueError(f"a pump of depth {depth} reads nothing")
        made = <CPump *>calloc(1, sizeof(CPump))
        if made == NULL:
            raise MemoryError("no memory for a pump")
        made.references = 1
        made.throttle = &THROTTLE
        made.depth = depth
        made.window = min(depth, FIRST_WINDOW)
        made.ops = <EngineOps *>PyCapsule_GetPointer(engine, b"gdsload.engine")
        made.context = PyCapsule_GetContext(engine)
        pthread_mutex_init(&made.lock, NULL)
        monotonic_cond_init(&made.wakeup)
        monotonic_cond_init(&made.settled)
        self.pump = made
        self.pid = getpid()
        made.again = <Op **>malloc((depth + BATCH) * sizeof(void *))
        made.buffer_count = len(buffers) if buffers else 0
        made.buffers = <Buffer *>calloc(made.buffer_count + 1, sizeof(Buffer))
        if made.again == NULL or made.buffers == NULL:
            raise MemoryError("no memory for a pump")
        for i in range(made.buffer_count):
            made.buffers[i].address = <char *><size_t>buffers[i][0]
            made.buffers[i].length = <uint64_t>buffers[i][1]
        self.start(<int64_t>(open_seconds * 1e9))

    cdef start(self, int64_t open_ns):
        cdef CPump *pump = self.pump
        cdef timespec until
        cdef int64_t end = monotonic_ns() + open_ns
        cdef int error, opened = 0
        pump.references = 2
        error = start_quiet_thread(&pump.thread, serve, pump)
        if error != 0:
            pump.references = 1
            raise OSError(error, f"no thread for the pump: {os.strerror(error)}")
        pump.running = 1
        while not opened and not error and monotonic_ns() < end:
            with nogil:
                deadline_in(&until, min(end - monotonic_ns(), <int64_t>SIGNAL_WAIT_NS))
                pthread_mutex_lock(&pump.lock)
                if pump.engine == NULL and pump.broken == 0:
                    pthread_cond_timedwait(&pump.settled, &pump.lock, &until)
                error = pump.broken
                opened = pump.engine != NULL
                pthread_mutex_unlock(&pump.lock)
            try:
                PyErr_CheckSignals()
            except BaseException:
                self.close(1.0)  # a thread that has not begun yet opens nothing then
                raise
        if error:
            self.close(1.0)
            raise OSError(-error, os.strerror(-error))
        if not opened:
            self.close(0.0)
            raise OSError(ETIMEDOUT, f"it did not open within {open_ns / 1e9:g} s")

    @property
    def finished(self):
        """Whether the thread has ended its reads: nothing of it touches memory any more. In a
        forked child, where the thread is not, it has."""
        cdef int finished
        if self.pid != getpid():
            return True
        with nogil:
            pthread_mutex_lock(&self.pump.lock)
            finished = self.pump.finished
            pthread_mutex_unlock(&self.pump.lock)
        return bool(finished)

    def handle(self):
        """Its C struct, as a capsule for requests; valid while this object lives."""
        return PyCapsule_New(self.pump, b"gdsload.pump", NULL)

    def close(self, double timeout):
        """Cancels all requests, waits for reads that cannot be cancelled, and ends the thread.

        Returns False if reads are still in flight after ``timeout`` seconds: the thread and their
        memory then live until those reads complete. An engine without reads gets longer to close: on
        a busy machine its threads wait for a processor.
        """
        cdef CPump *pump = self.pump
        cdef CRequest *request
        cdef timespec until
        cdef int finished, late = 0
        if not pump.running:
            return self.finished
        pump.running = 0  # a concurrent call must not join the thread again
        if self.pid != getpid():  # the thread stayed in the parent
            return True
        with nogil:
            deadline_in(&until, <int64_t>(timeout * 1e9))
            pthread_mutex_lock(&pump.lock)
            pump.closing = 1
            request = pump.first
            while request != NULL:
                cancel_request(pump, request)
                request = request.next_posted
            pthread_cond_signal(&pump.wakeup)
            while not pump.finished:
                if pthread_cond_timedwait(&pump.settled, &pump.lock, &until) != 0:
                    if not pump.idle or late or timeout <= 0:
                        break
                    late = 1
                    deadline_in(&until, CLOSE_NS)
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


def set_throttle(int64_t all_rate, int64_t prefetch_rate):
    """Limits all reads of the process, and those of prefetches, to bytes per second; 0: no limit. A
    read is never split for it: the next one waits."""
    with nogil:
        pthread_mutex_lock(&THROTTLE.lock)
        THROTTLE.all.rate = all_rate
        THROTTLE.all.free_ns = 0
        THROTTLE.ahead.rate = prefetch_rate
        THROTTLE.ahead.free_ns = 0
        pthread_mutex_unlock(&THROTTLE.lock)


def throttle():
    """The limits of all reads and of those of prefetches, in bytes per second; 0: no limit."""
    return THROTTLE.all.rate, THROTTLE.ahead.rate


def loads_under_way():
    """The number of requests in flight that prefetches yield to."""
    return THROTTLE.loads


def _after_fork():
    """In a child: loads under way, and a thread that may hold the lock, stayed in the parent."""
    pthread_mutex_init(&THROTTLE.lock, NULL)
    THROTTLE.loads = 0


os.register_at_fork(after_in_child=_after_fork)
