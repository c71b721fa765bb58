"""Requests: reads that belong together, prepared once and posted to a pump as often as one likes.

Each read keeps its own result: bytes landed and an error number, which `gdsload.backends.posix`
turns into exceptions. A request that dies with reads in flight is freed by the pump's thread when
the last of them has come back, and the memory they write to lives until then.
"""

cimport cython
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc
from posix.time cimport timespec
from posix.unistd cimport getpid

from gdsload._native.atomics cimport gds_load, gds_store
from gdsload._native.populator cimport CPopulator
from gdsload._native.pthreads cimport (
    deadline_in,
    monotonic_ns,
    pthread_cond_signal,
    pthread_cond_timedwait,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from gdsload._native.pumping cimport (
    FAILED,
    PENDING,
    CPump,
    CRequest,
    File,
    Op,
    Waiter,
    cancel_request,
    count_load,
    free_request,
)
from gdsload._native.region cimport CRegion, retain_region


# No collector: it would clear `pump` and `populator` before __dealloc__ runs, which needs both to
# tell whether reads are still in flight. Neither can be part of a cycle.
@cython.no_gc
@cython.final
cdef class Request:
    """Reads that belong together, prepared once: each op keeps its own result."""

    cdef CRequest *request
    cdef CPump *to
    cdef readonly object pump
    cdef object populator     # kept alive while its struct is pointed at
    cdef int pid

    def __cinit__(self, object pump, list files, list ops, object populator=None):
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
        self.pid = pump.pid
        self.to = <CPump *>PyCapsule_GetPointer(pump.handle(), b"gdsload.pump")
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
        if self.pid != getpid():
            return word[0]
        with nogil:
            pthread_mutex_lock(&self.to.lock)
            value = word[0]
            pthread_mutex_unlock(&self.to.lock)
        return value

    cdef require_own_process(self):
        # After a fork the lock may be held for good, by a thread that stayed in the parent.
        if self.pid != getpid():
            raise OSError(9, "the pump stayed behind in the process that forked this one")

    def post(self):
        """Hands the reads to the pump and returns.

        Raises RuntimeError while it is under way already, OSError where the pump has ended.
        """
        cdef CPump *pump = self.to
        cdef CRequest **link
        cdef int error = 0
        if pump.broken or not pump.running or self.pid != getpid():
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
                count_load(pump, self.request)
                pthread_cond_signal(&pump.news)
            pthread_mutex_unlock(&pump.lock)
        if error == 2:
            raise RuntimeError("this request is under way already")
        if error:
            raise OSError(-pump.broken or 9, "the pump has ended")

    @property
    def ahead(self):
        """Whether it yields to loads: nobody waits for it yet. May be set at any time."""
        return bool(self.request.ahead)

    @ahead.setter
    def ahead(self, bint ahead):
        cdef CPump *pump = self.to
        self.require_own_process()
        with nogil:
            pthread_mutex_lock(&pump.lock)
            self.request.ahead = ahead
            count_load(pump, self.request)
            pthread_cond_signal(&pump.news)
            pthread_mutex_unlock(&pump.lock)

    def wait(self, double timeout, int first=0, int last=-1):
        """Waits until these ops (default: all) have settled, or never will: the request was
        cancelled, or the pump has ended. True where they all settled.
        """
        cdef CPump *pump = self.to
        cdef CRequest *request = self.request
        cdef timespec until
        cdef Waiter waiter
        cdef Waiter **link
        cdef int i, late = 0
        if last < 0:
            last = request.count - 1
        if last >= request.count or first < 0:
            raise IndexError(f"ops {first} to {last} of {request.count}")
        self.require_own_process()
        with nogil:
            deadline_in(&until, <int64_t>(timeout * 1e9))
            pthread_mutex_lock(&pump.lock)
            # The pump counts down what is left of it, and tells of it once, not of every op.
            waiter.first, waiter.last = first, last
            waiter.next = request.waiters
            request.waiters = &waiter
            while True:
                waiter.left = 0  # counted anew: meanwhile it may have been posted again
                for i in range(first, last + 1):
                    waiter.left += request.ops[i].state == PENDING
                if waiter.left == 0 or not request.posted or pump.finished or late:
                    break
                late = pthread_cond_timedwait(&pump.settled, &pump.lock, &until)
            link = &request.waiters
            while link[0] != &waiter:
                link = &link[0].next
            link[0] = waiter.next
            pthread_mutex_unlock(&pump.lock)
        return waiter.left == 0

    def news(self):
        """The ops that have settled since it was last asked, in the order in which they did."""
        cdef CRequest *request = self.request
        cdef int settled, told
        self.require_own_process()
        with nogil:
            pthread_mutex_lock(&self.to.lock)
            settled, told = request.settled, request.told
            request.told = settled
            pthread_mutex_unlock(&self.to.lock)
        return [request.order[i] for i in range(told, settled)]

    def cancel(self):
        """No further op is submitted; those in flight are called back where that can be done."""
        cdef CPump *pump = self.to
        if self.pid != getpid():
            return
        with nogil:
            pthread_mutex_lock(&pump.lock)
            if self.request.posted:
                cancel_request(pump, self.request)
            pthread_cond_signal(&pump.news)
            pthread_mutex_unlock(&pump.lock)

    def quiet(self, double timeout):
        """Waits until no read of it is in flight; False at the end of the time."""
        cdef CPump *pump = self.to
        cdef timespec until
        cdef int posted
        if self.pid != getpid():
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

    def refused_direct(self):
        """Files of which direct reads were refused, when they were tried: (place, errno, whether
        the rest of the file was read through the page cache, too)."""
        cdef File *files = self.request.files
        return [
            (i, files[i].refused, files[i].direct_fd < 0)
            for i in range(self.request.file_count)
            if files[i].refused
        ]

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
        if self.pump is not None and self.pid == getpid():
            # Reads may still be in flight into memory that this request keeps alive: then the
            # pump, which will hear of them, frees it instead.
            pump = self.to
            with nogil:
                pthread_mutex_lock(&pump.lock)
                if self.request.posted and not pump.finished:
                    cancel_request(pump, self.request)
                    self.request.orphaned = 1
                    self.request.populator = NULL
                    gone = 0
                    pthread_cond_signal(&pump.news)
                pthread_mutex_unlock(&pump.lock)
        if gone:
            free_request(self.request)
