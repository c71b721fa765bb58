"""The pump: from the first read to the last byte in one native thread that needs no interpreter.

A `Pump` owns one engine and the thread that drives it. It keeps the engine's depth filled with the
reads of the requests that were posted to it (see request.pyx), oldest request first, each in its
order. What a completion means, a short read, a refusal, an error, stands in pumping.pxd.

    post ─► queue ─► engine (depth reads) ─► handle ─► done, failed, or once more
"""

cimport cython
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, malloc
from posix.time cimport timespec
from posix.unistd cimport getpid

import os

from gdsload._native.atomics cimport gds_store
from gdsload._native.engine cimport Buffer, Completion, EngineOps, Read
from gdsload._native.populator cimport populator_advance, populator_starved
from gdsload._native.pthreads cimport (
    deadline_in,
    monotonic_cond_init,
    monotonic_ns,
    pthread_cond_broadcast,
    pthread_cond_signal,
    pthread_cond_timedwait,
    pthread_detach,
    pthread_join,
    pthread_mutex_init,
    pthread_mutex_lock,
    pthread_mutex_unlock,
    start_quiet_thread,
)
from gdsload._native.pumping cimport (
    BATCH,
    BUSY_WAIT_NS,
    ECANCELED,
    IDLE_WAIT_NS,
    PENDING,
    CPump,
    CRequest,
    Op,
    any_cancelled,
    cancel_request,
    count_load,
    describe,
    free_request,
    handle,
    look_away,
    release_pump,
    settle,
)
from gdsload._native.region cimport UNIT_BYTES, region_ready
from gdsload._native.traffic cimport CTraffic, traffic_admits

cdef enum:
    PARKED_WAIT_NS = 10000000000   # with no request at all: a post wakes it
    # A read that waits this long for its memory goes ahead and faults the pages in itself.
    STARVED_NS = 20000000
    BACK_OFF_NS = 1000000      # after EAGAIN, so that a full device is not asked in a tight loop

cdef CTraffic TRAFFIC
pthread_mutex_init(&TRAFFIC.lock, NULL)


cdef Op *next_op(CPump *self, int staged, int64_t now) noexcept nogil:
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
                if request.in_flight > 0 or now - request.progress_ns < STARVED_NS:
                    if request.in_flight == 0 and request.populator != NULL:
                        populator_starved(request.populator)
                    break
            if not traffic_admits(
                self.traffic, request.ahead, self.in_flight + staged, op.length, now
            ):
                gds_store(&request.progress_ns, now)  # held back here: storage is not silent
                break
            request.next += 1
            request.in_flight += 1
            if request.populator != NULL:
                populator_advance(request.populator, op.length)
            return op
        request = request.next_posted
    return NULL


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
            count_load(self, request)
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
    """After the engine has gone: what it still had will never be heard of.

    It may still be written to: the memory of those reads is never given back.
    """
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
                    request.ops[i].region = NULL
                settle(self, &request.ops[i], error, now)
        request.in_flight = 0
        request = request.next_posted
    self.again_count = 0


cdef void *serve(void *arg) noexcept nogil:
    cdef CPump *self = <CPump *>arg
    cdef Read staged[BATCH]
    cdef Completion completions[BATCH]
    cdef Op *op
    cdef timespec until
    cdef int64_t now, wait
    cdef int staged_count = 0
    cdef int taken, seen, i, pause, wanted, cancel_sent = 0
    pthread_mutex_lock(&self.lock)
    self.broken = self.ops.open(
        &self.engine, self.depth, self.buffers, self.buffer_count, &self.fixed
    )
    pthread_cond_broadcast(&self.settled)  # whoever made the pump waits for its engine
    while not self.broken:
        now = monotonic_ns()
        staged_count = unstage(self, staged, staged_count, now)
        while staged_count < BATCH and self.in_flight + staged_count < self.depth:
            op = next_op(self, staged_count, now)
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
        if drop_quiet(self) or self.fulfilled:
            self.fulfilled = 0
            pthread_cond_broadcast(&self.settled)
        if self.in_flight == 0 and staged_count == 0:
            if self.closing and self.first == NULL:
                break
            # Nothing to do, or memory is not ready yet: then it is looked at again very soon.
            deadline_in(&until, PARKED_WAIT_NS if self.first == NULL else BUSY_WAIT_NS // 5)
            pthread_cond_timedwait(&self.news, &self.lock, &until)
            continue
        if any_cancelled(self):
            if not cancel_sent:
                self.ops.cancel(self.engine)
            cancel_sent = 1
        else:
            cancel_sent = 0
        wait = look_away(self, staged_count, &wanted)
        pthread_mutex_unlock(&self.lock)

        pause = 0
        taken = 0
        seen = 0
        if staged_count:
            taken = self.ops.submit(self.engine, staged, staged_count)
        if taken < staged_count:
            wanted = 1  # the next that comes makes room
        if self.in_flight + (taken if taken > 0 else 0) > 0:
            seen = self.ops.reap(self.engine, completions, BATCH, wanted, wait)

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
        if self.fulfilled:
            self.fulfilled = 0
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
        made.traffic = &TRAFFIC
        made.depth = depth
        made.ops = <EngineOps *>PyCapsule_GetPointer(engine, b"gdsload.engine")
        pthread_mutex_init(&made.lock, NULL)
        monotonic_cond_init(&made.news)
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

    def handle(self):
        """Its C struct, as a capsule for requests; valid while this object lives."""
        return PyCapsule_New(self.pump, b"gdsload.pump", NULL)

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
        if self.pid != getpid():  # the thread stayed behind in the parent
            return True
        with nogil:
            deadline_in(&until, wait_ns)
            pthread_mutex_lock(&pump.lock)
            pump.closing = 1
            request = pump.first
            while request != NULL:
                cancel_request(pump, request)
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


def limit_traffic(int64_t all, int64_t ahead):
    """Bytes per second that all pumps together may ask for, and that reads ahead may; 0: as many
    as they like. A read is never cut for it: the next one waits."""
    with nogil:
        pthread_mutex_lock(&TRAFFIC.lock)
        TRAFFIC.all.rate = all
        TRAFFIC.all.free_ns = 0
        TRAFFIC.ahead.rate = ahead
        TRAFFIC.ahead.free_ns = 0
        pthread_mutex_unlock(&TRAFFIC.lock)


def traffic():
    """What `limit_traffic` was told, and the loads under way."""
    return TRAFFIC.all.rate, TRAFFIC.ahead.rate, TRAFFIC.loads


def _after_fork():
    """In a child: the loads under way stayed in the parent, and so did whoever held the lock."""
    pthread_mutex_init(&TRAFFIC.lock, NULL)
    TRAFFIC.loads = 0


os.register_at_fork(after_in_child=_after_fork)
