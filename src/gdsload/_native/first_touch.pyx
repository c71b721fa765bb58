"""Reads into fresh host memory: each thread that reads also makes the memory ready for its read.

A page that was never touched costs a page fault, which can take longer than reading the page. What
it costs depends on the machine and changes within a load: a huge page takes 0.2 ms if the machine
has backed memory ready, and 5 ms if a hypervisor must find it first. So the threads measure both
ways of making a unit of 2 MiB ready, by CPU time, and use the cheaper:

    huge page     touch it ─► read in place
    small pages   read to the thread's bounce buffer ─► touch them in one call ─► copy

The bounce buffer is a huge page that is reused: a direct read into small pages is slow on a virtual
disk, because its host maps each page separately. Not responsible for memory of others and for memory
that an earlier load has touched: reads go to it directly.
"""

from libc.errno cimport errno
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.string cimport memcpy
from posix.mman cimport (
    MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_FAILED, MAP_NORESERVE, MAP_PRIVATE, PROT_READ, PROT_WRITE,
    madvise, mincore, mmap, munmap,
)
from posix.unistd cimport pread

from gdsload._native.atomics cimport (
    gds_add, gds_load, gds_load_flag, gds_store_flag, gds_touch,
)
from gdsload._native.engine cimport DIRECT, FreshMemory
from gdsload._native.memory cimport UNIT_BYTES, CRegion
from gdsload._native.page_choice cimport (
    AUTO, BOUNCE, HUGE, NO_HUGE_PAGE_NS, SMALL, choose_huge, unit_took,
)
from gdsload._native.pages cimport advise, page_bytes, page_floor
from gdsload._native.pthreads cimport (
    cpu_ns, monotonic_cond_init, pthread_cond_broadcast, pthread_cond_destroy, pthread_cond_wait,
    pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_unlock,
)

cdef enum:
    MADV_POPULATE_WRITE = 23     # of Linux 5.14 and newer

    # Together they touch 20 GB/s. If the next huge page is expensive, the others learn it from them.
    MOST_TOUCHING = 2

# The values of the option `pages`.
MODES = {"auto": AUTO, "huge": HUGE, "small": SMALL, "bounce": BOUNCE}


cdef void open_first_touch(FirstTouch *self, int mode) noexcept nogil:
    """`self` is zeroed memory."""
    self.choice.mode = mode
    pthread_mutex_init(&self.lock, NULL)
    monotonic_cond_init(&self.touched)


cdef void close_first_touch(FirstTouch *self) noexcept nogil:
    pthread_cond_destroy(&self.touched)
    pthread_mutex_destroy(&self.lock)


cdef int64_t touch_as_huge(CRegion *region, uint64_t unit, int *huge) noexcept nogil:
    """Touches a unit as a huge page, and returns the CPU time that it took. `huge` becomes 0 if the
    kernel had no huge page free and gave a smaller one; writes then touch the rest."""
    cdef char *base = region.base + unit * UNIT_BYTES
    cdef unsigned char resident = 0
    cdef int64_t took = cpu_ns()
    madvise(base, UNIT_BYTES, MADV_HUGEPAGE)
    gds_touch(base)
    took = cpu_ns() - took
    mincore(base + UNIT_BYTES - page_bytes(), 1, &resident)
    huge[0] = resident & 1
    return took


cdef int64_t touch_pages(char *address, uint64_t length) noexcept nogil:
    """Touches each page of a range, without asking for a huge one: the CPU time that it took."""
    cdef int64_t took = cpu_ns()
    cdef char *page = <char *>page_floor(<uintptr_t>address)
    if advise(address, length, MADV_POPULATE_WRITE) != 0:
        while page < address + length:  # takes a quarter more CPU time
            gds_touch(page)
            page += page_bytes()
    return cpu_ns() - took


cdef void note_small(FreshMemory *memory, uint64_t unit) noexcept nogil:
    """Notes that a unit was touched as small pages."""
    gds_add(&memory.small_units, 1)
    gds_store_flag(&memory.region.touched[unit], 1)


cdef void small_took(FirstTouch *self, int64_t took) noexcept nogil:
    """Records the CPU time of a unit of small pages."""
    pthread_mutex_lock(&self.lock)
    unit_took(&self.choice, 0, took)
    pthread_mutex_unlock(&self.lock)


cdef int touch_huge(FirstTouch *self, FreshMemory *memory, uint64_t unit) noexcept nogil:
    """Touches a unit as a huge page, if this is the cheaper way. False if it is not."""
    cdef int64_t took
    cdef int chosen, huge
    pthread_mutex_lock(&self.lock)
    while self.touching >= MOST_TOUCHING:
        pthread_cond_wait(&self.touched, &self.lock)
    chosen = choose_huge(&self.choice, 1)
    self.touching += chosen
    pthread_mutex_unlock(&self.lock)
    if not chosen:
        return 0
    took = touch_as_huge(memory.region, unit, &huge)
    pthread_mutex_lock(&self.lock)
    gds_add(&memory.huge_units if huge else &memory.small_units, 1)
    # Without a huge page, this is the time of one small page of 512.
    unit_took(&self.choice, 1, took if huge else <int64_t>NO_HUGE_PAGE_NS)
    self.touching -= 1
    pthread_cond_broadcast(&self.touched)  # a woken thread may touch nothing, and wake no other
    pthread_mutex_unlock(&self.lock)
    gds_store_flag(&memory.region.touched[unit], 1)
    return 1


cdef void touch_small(FirstTouch *self, FreshMemory *memory, uint64_t unit) noexcept nogil:
    """Touches each page of a unit, without asking for a huge one."""
    small_took(self, touch_pages(memory.region.base + unit * UNIT_BYTES, UNIT_BYTES))
    note_small(memory, unit)


cdef char *bounce_buffer(Bounce *self) noexcept nogil:
    """The bounce buffer of this thread: one unit, in a huge page; NULL if there is no memory."""
    cdef char *mapped
    if self.mapping == NULL:
        mapped = <char *>mmap(
            NULL, 2 * UNIT_BYTES, PROT_READ | PROT_WRITE,
            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0,
        )
        if mapped == MAP_FAILED:
            return NULL
        self.mapping = mapped
        self.buffer = mapped + (-<uintptr_t>mapped & (UNIT_BYTES - 1))
        madvise(self.buffer, UNIT_BYTES, MADV_HUGEPAGE)
    return self.buffer


cdef void free_bounce(Bounce *self) noexcept nogil:
    if self.mapping != NULL:
        munmap(self.mapping, 2 * UNIT_BYTES)


cdef int64_t read_small(
    FirstTouch *self, char *buffer, int fd, char *address, uint64_t length, uint64_t offset
) noexcept nogil:
    """Reads one unit to small pages. NULL: not by a bounce buffer."""
    cdef int64_t took = cpu_ns()
    cdef int64_t got = pread(fd, address if buffer == NULL else buffer, length, <int64_t>offset)
    if got <= 0:
        return got
    if buffer != NULL:
        took = cpu_ns()
        touch_pages(address, <uint64_t>got)
        memcpy(address, buffer, <size_t>got)
    small_took(self, (cpu_ns() - took) * UNIT_BYTES // got)
    return got


cdef int64_t read_first_touch(
    FirstTouch *self, Bounce *bounce, const Read *read, int64_t cancels
) noexcept nogil:
    """Reads, and touches the memory where it is fresh: bytes, or -errno if nothing was read.

    `cancels`: the number of cancellations before the read. After another one no further unit is
    read: the descriptor may be closed as soon as the call under way has returned.
    """
    cdef FreshMemory *memory = read.memory
    cdef uint64_t base, done = 0, end, unit
    cdef char *buffer
    cdef int64_t got
    if memory != NULL:
        base = <uint64_t>(read.address - memory.region.base)
    while done < read.length:
        # In place up to `end`: ready units, and parts of units, whose rest belongs to other reads.
        end = done
        if memory == NULL or self.choice.mode == SMALL:
            end = read.length
        while end < read.length:
            unit = (base + end) // UNIT_BYTES
            if (
                (base + end) % UNIT_BYTES == 0
                and end + UNIT_BYTES <= read.length
                and not gds_load_flag(&memory.region.touched[unit])
                and not touch_huge(self, memory, unit)
            ):
                break
            end = min((unit + 1) * UNIT_BYTES - base, read.length)
        if end > done:
            got = pread(read.fd, read.address + done, end - done, <int64_t>(read.offset + done))
        else:
            buffer = bounce_buffer(bounce) if read.io_mode == DIRECT else NULL
            end = done + UNIT_BYTES
            got = read_small(
                self, buffer, read.fd, read.address + done, UNIT_BYTES, read.offset + done
            )
            if got > 0 and buffer != NULL:
                gds_add(&memory.bounced_bytes, got)
            if got == UNIT_BYTES:
                note_small(memory, unit)
        if got < 0:
            return done if done else -errno
        done += <uint64_t>got
        # Short: the pump reads the rest, or meets the end of the file.
        if done < end or gds_load(&self.cancels) != cancels:
            break
    return <int64_t>done


cdef void touch_before(
    FirstTouch *self, const Read *read, uint64_t at, uint64_t length
) noexcept nogil:
    """Before ``length`` bytes are copied to byte ``at`` of a read: touches the units that begin there,
    the cheaper way."""
    cdef FreshMemory *memory = read.memory
    cdef uint64_t base, unit
    if memory == NULL:
        return
    base = <uint64_t>(read.address - memory.region.base)
    unit = (base + at + UNIT_BYTES - 1) // UNIT_BYTES
    while unit * UNIT_BYTES < base + at + length:
        if (
            (unit + 1) * UNIT_BYTES <= base + read.length
            and not gds_load_flag(&memory.region.touched[unit])
        ):
            if not touch_huge(self, memory, unit):
                touch_small(self, memory, unit)
        unit += 1
