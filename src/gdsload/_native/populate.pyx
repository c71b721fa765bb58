"""Populates memory ahead of the reads.

The first access to a new page costs a page fault, and a reader that takes the faults itself waits
longer for the kernel than for the disk. A `Populator` walks regions in the order of the reads with a
few threads, one unit of 2 MiB at a time and a limited distance ahead. It measures whether a unit is
cheaper as one huge page or as 512 small ones: huge pages cost a tenth if the machine has backed
memory ready, and several times as much if a hypervisor must find it first.

`madvise` populates fastest, but blocks every other mmap and munmap of the process: an import that
runs at the same time takes a fifth longer. While no load waits for the reads, a populator is
*gentle*: fewer threads touch page by page, and these faults lock one mapping only (Linux 6.4; before
it, one fault at a time).
"""

cimport cython
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from libc.errno cimport EINVAL, errno
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free
from posix.mman cimport MADV_HUGEPAGE, madvise
from posix.unistd cimport getpid, pid_t

from gdsload._native.atomics cimport gds_load_flag, gds_store_flag, gds_touch
from gdsload._native.memory cimport UNIT_BYTES, CRegion, release_region, retain_region
from gdsload._native.pages cimport page_bytes, page_ceil, page_floor
from gdsload._native.pthreads cimport (
    monotonic_cond_init, monotonic_ns, pthread_cond_broadcast, pthread_cond_destroy,
    pthread_cond_signal, pthread_cond_wait, pthread_join, pthread_mutex_destroy,
    pthread_mutex_init, pthread_mutex_lock, pthread_mutex_unlock, start_quiet_thread,
)
from gdsload._native.pump cimport CPopulator, CPump, Range, release_pump

cdef extern from "<sys/mman.h>" nogil:
    """
    #ifndef MADV_POPULATE_WRITE
    #define MADV_POPULATE_WRITE 23
    #endif
    """
    enum: MADV_POPULATE_WRITE

cdef enum:
    MOST_THREADS = 8
    STEP_BYTES = 131072  # 40 us
    # A unit that takes longer (4 GB/s) is a reason to measure the other page size. Backed huge pages
    # take 70 us, small ones 350 to 700, unbacked huge ones 3,000.
    SLOW_UNIT_NS = 500000
    # Units between two tries of the slower page size; doubled each time it is still slower.
    FIRST_RETRY_UNITS = 16
    LAST_RETRY_UNITS = 256


cdef int choose_huge(CPopulator *self) noexcept nogil:
    """Whether the next unit should be a huge page. Called with the lock held."""
    cdef int huge
    if self.huge_ns == 0 or self.huge_ns <= SLOW_UNIT_NS:
        return 1
    if self.small_ns == 0:
        return 0
    huge = self.huge_ns <= self.small_ns
    self.until_retry -= 1
    if self.until_retry > 0:
        return huge
    # Sometimes the slower one, because costs change.
    self.retry_units = min(2 * self.retry_units, <int>LAST_RETRY_UNITS)
    self.until_retry = self.retry_units
    return not huge


cdef void learn(int64_t *cost, int64_t took) noexcept nogil:
    """The state of free memory changes during a load: a fast unit replaces the known cost, a slow
    one moves it halfway."""
    cost[0] = took if cost[0] == 0 or took < cost[0] else (cost[0] + took) // 2


cdef int populate_unit(
    CRegion *region, uint64_t start, uint64_t length, int huge, int gentle
) noexcept nogil:
    """Populates a unit; small pages in short steps, so that other threads can map memory."""
    cdef uint64_t done = 0
    cdef uint64_t page = page_bytes()
    cdef uint64_t step = length if huge else STEP_BYTES
    if huge:
        madvise(region.base + start, length, MADV_HUGEPAGE)
    while done < length:
        step = min(step, length - done)
        if gentle:
            step = min(page, length - done)
            gds_touch(region.base + start + done)
        elif madvise(region.base + start + done, step, MADV_POPULATE_WRITE) != 0:
            return errno
        done += step
    return 0


cdef void wake_pump(CPopulator *self) noexcept nogil:
    """Without the lock: the pump takes it while it holds its own."""
    cdef CPump *pump = self.pump
    if pump != NULL:
        pthread_mutex_lock(&pump.lock)
        pthread_cond_signal(&pump.news)
        pthread_mutex_unlock(&pump.lock)


cdef void stop_threads(CPopulator *self, int threads) noexcept nogil:
    cdef int i
    pthread_mutex_lock(&self.lock)
    self.stopping = 1
    pthread_cond_broadcast(&self.room)
    pthread_mutex_unlock(&self.lock)
    for i in range(threads):
        pthread_join(self.thread[i], NULL)


cdef void *serve(void *arg) noexcept nogil:
    cdef CPopulator *self = <CPopulator *>arg
    cdef Range *range_
    cdef uint64_t unit, start, length
    cdef int64_t began, took
    cdef int huge, gentle, failed, number
    pthread_mutex_lock(&self.lock)
    number = self.started
    self.started += 1
    while True:
        while not self.stopping and (
            self.ahead >= self.most_ahead or (self.gentle and number >= self.gentle)
        ):
            pthread_cond_wait(&self.room, &self.lock)
        while self.range < self.count and self.unit > self.ranges[self.range].last:
            self.range += 1
            if self.range < self.count:
                self.unit = self.ranges[self.range].first
        if self.stopping or self.range >= self.count:
            break
        range_ = &self.ranges[self.range]
        unit = self.unit
        self.unit += 1
        if gds_load_flag(&range_.region.ready[unit]):
            continue
        # Only bytes that will be read: gaps between the reads must not use memory.
        start = max(unit * UNIT_BYTES, range_.start)
        length = min((unit + 1) * UNIT_BYTES, range_.end) - start
        self.ahead += length
        huge = self.huge_pages and length == UNIT_BYTES and choose_huge(self)
        gentle = self.gentle
        pthread_mutex_unlock(&self.lock)

        began = monotonic_ns()
        failed = populate_unit(range_.region, start, length, huge, gentle)
        took = monotonic_ns() - began
        # Also if the kernel cannot (before 5.14): then the read itself takes the page faults.
        gds_store_flag(&range_.region.ready[unit], 1)
        wake_pump(self)

        pthread_mutex_lock(&self.lock)
        if failed:
            if failed == EINVAL:  # this kernel cannot: a limit on the distance gains nothing
                self.most_ahead = 1 << 62
            continue
        self.busy_ns += took
        if huge:
            self.huge_units += 1
            learn(&self.huge_ns, took)
        else:
            self.small_units += 1
            if length == UNIT_BYTES:
                learn(&self.small_ns, took)
    pthread_mutex_unlock(&self.lock)
    return NULL


@cython.final
cdef class Populator:
    """Threads that populate parts of regions, in order, a bounded way ahead of the reads."""

    cdef CPopulator *populator
    cdef pid_t pid

    def __cinit__(self, list parts, int threads, uint64_t most_ahead, bint huge_pages):
        """``parts``: (region's handle, first byte, bytes) in the order of the reads. ``most_ahead``:
        bytes that may be populated without a submitted read."""
        cdef CPopulator *made = <CPopulator *>calloc(1, sizeof(CPopulator))
        cdef CRegion *region
        cdef uint64_t first, length
        if made == NULL:
            raise MemoryError("no memory for a populator")
        pthread_mutex_init(&made.lock, NULL)
        monotonic_cond_init(&made.room)
        made.most_ahead = <int64_t>most_ahead
        made.huge_pages = huge_pages
        made.retry_units = FIRST_RETRY_UNITS
        made.until_retry = FIRST_RETRY_UNITS
        self.populator = made
        self.pid = getpid()
        made.ranges = <Range *>calloc(max(len(parts), 1), sizeof(Range))
        if made.ranges == NULL:
            raise MemoryError("no memory for a populator")
        for handle, start, nbytes in parts:
            region = <CRegion *>PyCapsule_GetPointer(handle, b"gdsload.region")
            first, length = start, nbytes
            if length == 0 or first > region.length or length > region.length - first:
                raise ValueError(
                    f"{nbytes} bytes at {start} exceed a region of {region.length} bytes"
                )
            if region.ready == NULL:
                region.ready = <uint8_t *>calloc(region.length // UNIT_BYTES + 1, 1)
                if region.ready == NULL:
                    raise MemoryError("no memory for a populator")
            retain_region(region)
            made.ranges[made.count].region = region
            made.ranges[made.count].start = page_floor(first)
            made.ranges[made.count].end = min(page_ceil(first + length), region.length)
            made.ranges[made.count].first = first // UNIT_BYTES
            made.ranges[made.count].last = (first + length - 1) // UNIT_BYTES
            made.count += 1
        if made.count:
            made.unit = made.ranges[0].first
        while made.threads < threads and made.threads < MOST_THREADS:
            if start_quiet_thread(&made.thread[made.threads], serve, made) != 0:
                break
            made.threads += 1
        if made.threads == 0:
            self.give_up()

    cdef void give_up(self):
        """Marks everything as ready: without threads, the reads must not wait."""
        cdef int i
        cdef uint64_t unit
        for i in range(self.populator.count):
            for unit in range(self.populator.ranges[i].first, self.populator.ranges[i].last + 1):
                gds_store_flag(&self.populator.ranges[i].region.ready[unit], 1)

    def handle(self):
        """Its C struct, as a capsule for the pump; valid while this object lives."""
        return PyCapsule_New(self.populator, b"gdsload.populator", NULL)

    def advance(self, uint64_t nbytes):
        """Reports that ``nbytes`` populated bytes are in use: the threads may populate as many."""
        with nogil:
            pthread_mutex_lock(&self.populator.lock)
            self.populator.ahead -= <int64_t>nbytes
            pthread_cond_broadcast(&self.populator.room)
            pthread_mutex_unlock(&self.populator.lock)

    @property
    def gentle(self):
        """Threads that work gently, while no load waits for the reads; 0: all, at full speed."""
        return self.populator.gentle

    @gentle.setter
    def gentle(self, int threads):
        with nogil:
            pthread_mutex_lock(&self.populator.lock)
            self.populator.gentle = max(threads, 0)
            pthread_cond_broadcast(&self.populator.room)
            pthread_mutex_unlock(&self.populator.lock)

    def stop(self):
        """Ends the threads, each after its current unit. Idempotent."""
        cdef int threads = self.populator.threads
        self.populator.threads = 0  # a concurrent call must not join them again
        if self.pid != getpid():  # after a fork they, and perhaps the lock, belong to the parent
            return
        with nogil:
            stop_threads(self.populator, threads)
        self.give_up()

    def counts(self):
        """(units populated as huge pages, units as small pages, ns spent). A unit has up to 2 MiB."""
        return self.populator.huge_units, self.populator.small_units, self.populator.busy_ns

    def __dealloc__(self):
        cdef int i
        if self.populator == NULL:
            return
        if self.pid == getpid():
            with nogil:
                stop_threads(self.populator, self.populator.threads)
        if self.populator.ranges != NULL:
            for i in range(self.populator.count):
                release_region(self.populator.ranges[i].region)
        if self.populator.pump != NULL:
            release_pump(self.populator.pump)
        if self.pid != getpid():  # destroying a condition waits for its waiters, in the parent
            return
        pthread_cond_destroy(&self.populator.room)
        pthread_mutex_destroy(&self.populator.lock)
        free(self.populator.ranges)
        free(self.populator)
