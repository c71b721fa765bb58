"""Requests: reads that belong together, prepared once and posted to a pump any number of times.

Each read has its own result: the bytes that arrived and an error number; `gdsload.backends` makes
exceptions of them. If a request is deleted with reads in flight, the pump's thread frees it, and
releases the memory, when the last of them has completed.
"""

cimport cython
from cpython.pycapsule cimport PyCapsule_GetPointer
from cpython.tuple cimport PyTuple_Check
from libc.errno cimport EBADF
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free
from posix.time cimport timespec
from posix.unistd cimport getpid

from gdsload._native.atomics cimport gds_load
from gdsload._native.engine cimport BUFFERED, DIRECT, MAPPED
from gdsload._native.memory cimport CRegion, retain_region
from gdsload._native.pages cimport pages_in_cache
from gdsload._native.pthreads cimport (
    deadline_in, monotonic_ns, pthread_cond_signal, pthread_cond_timedwait, pthread_mutex_lock,
    pthread_mutex_unlock,
)
from gdsload._native.pump cimport (
    PENDING, CPump, CRequest, File, Op, Waiter, cancel_request, count_load, free_request,
)


# Memory that a request reads into.
cdef struct Target:
    uint64_t address
    uint64_t length
    CRegion *region             # NULL if the memory is not the library's own
    int32_t buffer


cdef int io_mode_of(object name) except -1:
    if name == "direct":
        return DIRECT
    if name == "buffered":
        return BUFFERED
    if name == "mapped":
        return MAPPED
    raise ValueError(f"{name!r} is no I/O mode")


cdef int add_read(CRequest *request, object transfer, Target *targets, Py_ssize_t count) except -1:
    """Adds a read to a request, which has room for it. Its region is retained only if it is valid."""
    cdef Op *op = &request.ops[request.count]
    cdef Target *target
    cdef Py_ssize_t number
    cdef int64_t shift
    cdef uint64_t start
    if not PyTuple_Check(transfer):
        raise TypeError(f"read {request.count} is {transfer!r}")
    row = <tuple>transfer    # of any type of tuple
    op.request = request
    op.file, op.offset, op.length, op.wanted = row[0], row[1], row[2], row[3]
    number, shift = row[4], row[5]
    op.io_mode = io_mode_of(row[6])
    if op.io_mode == MAPPED:
        op.length = op.wanted   # the mapping ends with the file
    if not 0 <= op.file < request.file_count:
        raise IndexError(
            f"read {request.count} refers to file {op.file} of {request.file_count}"
        )
    if not 0 <= number < count:
        raise IndexError(f"read {request.count} refers to target {number} of {count}")
    target = &targets[number]
    if op.wanted > op.length:
        raise ValueError(f"read {request.count} wants more bytes than it reads")
    if (
        shift < 0
        or <uint64_t>shift > target.length
        or op.wanted > target.length - <uint64_t>shift
    ):
        raise ValueError(f"read {request.count} exceeds its target")
    if op.io_mode == MAPPED and (target.region == NULL or target.region.anonymous):
        # Its pages would be touched, and nothing would be read: zeros.
        raise ValueError(f"read {request.count} is mapped, but its target maps no file")
    op.address = <char *><size_t>(target.address + <uint64_t>shift)
    op.buffer = target.buffer
    if target.region != NULL:
        start = <uint64_t>(op.address - target.region.base)
        if (
            op.address < target.region.base
            or start > target.region.length
            or op.length > target.region.length - start
        ):
            raise ValueError(f"read {request.count} exceeds its region")
        op.memory.region = target.region
        retain_region(target.region)
    request.count += 1
    return 0


cdef void find_cold(CRequest *request) noexcept nogil:
    """Notes of which mapped ranges nothing is in the page cache. To be called before anything is
    read: what the kernel reads ahead for one read may belong to the next one."""
    cdef Op *op
    cdef int i
    for i in range(request.count):
        op = &request.ops[i]
        if op.io_mode == MAPPED:
            op.memory.cold = pages_in_cache(
                request.files[op.file].buffered_fd, op.offset, op.length
            ) <= 0


# No collector: it would clear `pump` before __dealloc__, which needs it to find out whether reads are
# in flight. It cannot be part of a cycle.
@cython.no_gc
@cython.final
cdef class Request:
    """Reads that belong together, prepared once: each op keeps its own result."""

    cdef CRequest *request
    cdef CPump *to
    cdef readonly object pump
    cdef int pid

    def __cinit__(self, object pump, list files, object transfers, list targets):
        """``files``: (buffered fd, direct fd or -1, block, and the file numbers of the two, direct
        first). A file number stands for one descriptor during the life of the pump, and is never
        reused.

        ``transfers``: (file, offset, length, wanted, target, offset in it, I/O mode, ...), such as
        those of a read plan. The target of a "mapped" one is a private mapping of the file, and ends
        with it. ``targets``: (address, bytes, region's handle or None, buffer or -1).

        Raises IndexError for a transfer of no file or target, ValueError for one that exceeds its
        target, has no such I/O mode, or is "mapped" into memory that is not.
        """
        cdef CRequest *made = <CRequest *>calloc(1, sizeof(CRequest))
        cdef File *file
        cdef Target *table
        cdef Py_ssize_t number
        cdef tuple reads = tuple(transfers)
        if made == NULL:
            raise MemoryError("no memory for a request")
        self.request = made
        self.pid = pump.pid
        self.to = <CPump *>PyCapsule_GetPointer(pump.handle(), b"gdsload.pump")
        self.pump = pump
        made.files = <File *>calloc(len(files) + 1, sizeof(File))
        made.ops = <Op *>calloc(len(reads) + 1, sizeof(Op))
        made.order = <int *>calloc(len(reads) + 1, sizeof(int))
        table = <Target *>calloc(len(targets) + 1, sizeof(Target))
        try:
            if made.files == NULL or made.ops == NULL or made.order == NULL or table == NULL:
                raise MemoryError(f"no memory for a request of {len(reads)} reads")
            for entry in files:
                file = &made.files[made.file_count]
                file.buffered_fd, file.direct_fd, file.block = entry[0], entry[1], entry[2]
                file.direct_number, file.buffered_number = entry[3], entry[4]
                made.file_count += 1
            for number, entry in enumerate(targets):
                table[number].address, table[number].length = entry[0], entry[1]
                if entry[2] is not None:
                    table[number].region = <CRegion *>PyCapsule_GetPointer(
                        entry[2], b"gdsload.region"
                    )
                table[number].buffer = entry[3]
            for transfer in reads:
                add_read(made, transfer, table, len(targets))
        finally:
            free(table)
        self.reset()

    cdef void reset(self) noexcept nogil:
        cdef CRequest *request = self.request
        cdef Op *op
        cdef File *file
        cdef int i
        request.next = 0
        request.settled = request.failed = request.reported = request.cancelled = 0
        request.direct_bytes = request.buffered_bytes = 0
        request.short_reads = request.retries = 0
        for i in range(request.count):
            op = &request.ops[i]
            file = &request.files[op.file]
            op.state = PENDING
            op.arrived = 0
            op.error = op.retried = 0
            op.posted_ns = op.done_ns = 0
            op.memory.huge_units = op.memory.small_units = 0
            op.memory.bounced_bytes = op.memory.present_bytes = 0
            op.direct = (
                op.io_mode == DIRECT
                and file.direct_fd >= 0
                and op.length > 0
                and op.offset % file.block == 0
                and op.length % file.block == 0
            )

    cdef void lock(self) noexcept nogil:
        """Keeps the pump's thread from writing."""
        if self.pid == getpid():  # after a fork, a thread that stayed in the parent may hold it
            pthread_mutex_lock(&self.to.lock)

    cdef void unlock(self) noexcept nogil:
        if self.pid == getpid():
            pthread_mutex_unlock(&self.to.lock)

    cdef int read_counter(self, int *word) noexcept:
        """A number that the pump's thread writes."""
        cdef int value
        with nogil:
            self.lock()
            value = word[0]
            self.unlock()
        return value

    cdef require_own_process(self):
        # After a fork, the lock may never be unlocked: its thread stayed in the parent.
        if self.pid != getpid():
            raise OSError(EBADF, "the pump stayed in the process that forked this one")

    def post(self):
        """Starts the reads and returns.

        Raises RuntimeError if it is under way already, OSError if the pump has ended.
        """
        cdef CPump *pump = self.to
        cdef CRequest **link
        cdef int error = 0
        if pump.broken or not pump.running or self.pid != getpid():
            raise OSError(-pump.broken or EBADF, "the pump has ended")
        with nogil:
            if not self.request.posted:
                find_cold(self.request)
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
                pthread_cond_signal(&pump.wakeup)
            pthread_mutex_unlock(&pump.lock)
        if error == 2:
            raise RuntimeError("this request is under way already")
        if error:
            raise OSError(-pump.broken or EBADF, "the pump has ended")

    @property
    def ahead(self):
        """Whether this is a prefetch, which yields to loads. May be set at any time."""
        return bool(self.request.ahead)

    @ahead.setter
    def ahead(self, bint ahead):
        cdef CPump *pump = self.to
        self.require_own_process()
        with nogil:
            pthread_mutex_lock(&pump.lock)
            self.request.ahead = ahead
            count_load(pump, self.request)
            pthread_cond_signal(&pump.wakeup)
            pthread_mutex_unlock(&pump.lock)

    def wait(self, double timeout, int first=0, int last=-1):
        """Waits up to ``timeout`` seconds until these ops (default: all) have settled, or cannot any
        more: the request is cancelled and drained, or the pump has ended. True if all settled.
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
            # The pump counts `left` down and signals once, not for every op.
            waiter.first, waiter.last = first, last
            waiter.next = request.waiters
            request.waiters = &waiter
            while True:
                waiter.left = 0  # counted again: it may have been posted again meanwhile
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

    def take_settled(self):
        """The ops that have settled since the last call, in that order."""
        cdef CRequest *request = self.request
        cdef int settled, reported
        self.require_own_process()
        with nogil:
            pthread_mutex_lock(&self.to.lock)
            settled, reported = request.settled, request.reported
            request.reported = settled
            pthread_mutex_unlock(&self.to.lock)
        return [request.order[i] for i in range(reported, settled)]

    def cancel(self):
        """Submits no further op, and cancels those in flight if the engine can."""
        cdef CPump *pump = self.to
        if self.pid != getpid():
            return
        with nogil:
            pthread_mutex_lock(&pump.lock)
            if self.request.posted:
                cancel_request(pump, self.request)
            pthread_cond_signal(&pump.wakeup)
            pthread_mutex_unlock(&pump.lock)

    def wait_until_idle(self, double timeout):
        """Waits up to ``timeout`` seconds until no read of it is in flight. True if none is."""
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
        return self.read_counter(&self.request.settled)

    @property
    def failed(self):
        return self.read_counter(&self.request.failed)

    @property
    def posted(self):
        return bool(self.read_counter(&self.request.posted))

    @property
    def idle_seconds(self):
        """Seconds since a byte last arrived. Of any request, while it waits behind others."""
        cdef int64_t last
        with nogil:
            self.lock()
            last = gds_load(&self.request.progress_ns)
            if self.request.in_flight == 0:
                last = max(last, self.to.progress_ns)
            self.unlock()
        return (monotonic_ns() - last) * 1e-9

    def result(self, int op):
        """(settled, bytes arrived, error): error is an errno, or -1 for a file that ended early."""
        cdef Op *found
        cdef int settled, error
        cdef uint64_t arrived
        if not 0 <= op < self.request.count:
            raise IndexError(f"op {op} of {self.request.count}")
        found = &self.request.ops[op]
        with nogil:
            self.lock()
            settled, arrived, error = found.state != PENDING, found.arrived, found.error
            self.unlock()
        return bool(settled), arrived, error

    def counts(self):
        """(bytes by direct reads, bytes by buffered ones, short reads continued, retries)."""
        cdef CRequest *request = self.request
        cdef int64_t direct, buffered, short_reads, retries
        with nogil:
            self.lock()
            direct, buffered = request.direct_bytes, request.buffered_bytes
            short_reads, retries = request.short_reads, request.retries
            self.unlock()
        return direct, buffered, short_reads, retries

    def touched(self):
        """(units touched as huge pages, as small pages, bytes that went through bounce buffers, and
        those of mappings that were in the page cache before, and were not read)."""
        cdef int64_t huge = 0, small = 0, bounced = 0, present = 0
        cdef Op *op
        cdef int i
        for i in range(self.request.count):
            op = &self.request.ops[i]
            huge += gds_load(&op.memory.huge_units)
            small += gds_load(&op.memory.small_units)
            bounced += gds_load(&op.memory.bounced_bytes)
            present += gds_load(&op.memory.present_bytes)
        return huge, small, bounced, present

    def refused_direct(self):
        """Files whose direct reads were refused: (index, errno, whether the rest of the file was
        read through the page cache, too)."""
        cdef File *files = self.request.files
        return [
            (i, files[i].refused, files[i].direct_fd < 0)
            for i in range(self.request.file_count)
            if files[i].refused
        ]

    def trace(self):
        """(posted, done) of each op: monotonic ns, 0 if it did not get there."""
        cdef CRequest *request = self.request
        return [(request.ops[i].posted_ns, request.ops[i].done_ns) for i in range(request.count)]

    def __dealloc__(self):
        cdef CPump *pump
        cdef int drained = 1
        if self.request == NULL:
            return
        if self.pump is not None and self.pid == getpid():
            # Reads may be in flight into memory that this request holds. Then the pump, which will
            # see them complete, frees it.
            pump = self.to
            with nogil:
                pthread_mutex_lock(&pump.lock)
                if self.request.posted and not pump.finished:
                    cancel_request(pump, self.request)
                    self.request.orphaned = 1
                    drained = 0
                    pthread_cond_signal(&pump.wakeup)
                pthread_mutex_unlock(&pump.lock)
        if drained:
            free_request(self.request)
