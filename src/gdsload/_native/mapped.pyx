"""Reads the pages of a private mapping into the page cache, without a copy.

The page cache holds a file in folios. Small ones are slow on a virtual disk, whose host maps each of
them separately, and cost more to allocate and to map. Between them and huge ones are those that the
read-ahead of the kernel makes: they grow. Compared with these, huge ones take a fifth of the CPU time
where the machine has memory ready, and twice as much where a hypervisor must find it first. So the
threads measure both kinds, by CPU time, and use the cheaper (`page_choice.pxd`):

    huge folios      ask for them in the mapping: the kernel reads two
    growing folios   leave a mark ─► the read-ahead of the kernel makes larger ones with each window

A read is a sequence of such streams. Each opens the file again, because the read-ahead of the kernel
follows one reader per open file:

    open again, map the range ─► populate (the read-ahead of this stream)
                              ─► populate the mapping of the load ─► take its faults

Huge folios are not read ahead: that would be 8 MiB and more for each thread, and if a hypervisor must
find the memory, the disk stands still for 0.1 s before the threads can tell. Of a file that is partly
in the page cache, units that are there are only mapped.

Growing folios are four times as large in each window of the read-ahead. The kernel marks one page of
each window; when this page is read, it reads the next window ahead. A reader that finds its first page
missing begins with folios of one page, and half of its window lies before that page. A reader that
finds a marked page reads ahead from there, in folios of four pages. After four windows the folios would
be huge, and the next stream begins.

In a virtual machine, the first access of the processor to a page that a disk has written takes a
fault of the hypervisor, which can cost as much as reading it. So the threads that read take these
faults, while the disk works for others: they touch every 16th page, and those between them as long as
the touched ones had faults. One fault may be of many pages. The kernel touches for them, by a write
that copies a byte of each page to a file in memory: a page that is gone, since the file was truncated,
is an error of the write, and not a signal that ends the process.

Reads of several windows each, at different places of the file, are the fastest
(`system.storage.fill_request_bytes`). Filesystems without large folios take the same way with small ones.
Not responsible for: choosing between this and direct reads (`loading.page_cache_fill`).
"""

from libc.errno cimport errno
from libc.stdint cimport int64_t, uint8_t, uint64_t, uintptr_t
from libc.stdio cimport snprintf
from libc.string cimport memset
from posix.fcntl cimport (
    O_CLOEXEC, O_NOCTTY, O_NONBLOCK, O_RDONLY, POSIX_FADV_WILLNEED, open, posix_fadvise,
)
from posix.mman cimport (
    MADV_DONTFORK, MADV_DONTNEED, MADV_HUGEPAGE, MADV_NORMAL, MADV_RANDOM, MAP_FAILED, MAP_PRIVATE,
    PROT_READ, madvise, mmap, munmap,
)
from posix.uio cimport iovec, pwritev
from posix.unistd cimport close, pread

from gdsload._native.atomics cimport gds_add, gds_load
from gdsload._native.engine cimport Read
from gdsload._native.memory cimport UNIT_BYTES
from gdsload._native.page_choice cimport (
    HUGE, NO_HUGE_PAGE_NS, choose_huge, huge_is_cheap, unit_took,
)
from gdsload._native.pages cimport (
    MADV_POPULATE_READ, advise, page_bytes, page_floor, pages_in_cache,
)
from gdsload._native.pthreads cimport (
    cpu_ns, monotonic_ns, pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock,
    pthread_mutex_unlock,
)

cdef extern from "<sys/syscall.h>" nogil:
    long SYS_memfd_create

cdef extern from "<unistd.h>" nogil:
    long syscall(long number, ...)

cdef enum:
    MFD_CLOEXEC = 1
    TOUCHED_PAGES = 256          # by one write: at most half of the pages of a unit
    FIRST_STEP_PAGES = 16        # from a touched page to the next
    # Touching a page took 200 to 600 ns without a fault of the hypervisor, and 2,000 and more with one.
    FAULT_NS = 1000
    COPY_BYTES = 65536           # on the stack of a worker
    MOST_UNITS = 513             # of a read: it has 1 GiB at most
    WINDOW_BYTES = 8388608       # of the read-ahead
    GROWING_BYTES = 33554432     # of a stream of growing folios: four windows
    # A read that takes longer ends short, and the pump continues it: a slow disk is no stalled one.
    MOST_NS = 1000000000

# Part of a read, in a mapping of its own, whose read-ahead is of this reader alone.
cdef struct Stream:
    char *base                   # NULL: none
    uint64_t offset              # of `base` in the file
    uint64_t end                 # of the read in the file
    uint64_t kept                # where the range in the file begins that it has in page tables
    int huge                     # whether it asks for huge folios; never without `base`
    uint64_t until               # bytes of the read at the next choice
    uint64_t grown               # bytes of the read where growing folios would be huge
    uint64_t measured            # bytes of the read at the last choice
    int64_t measured_ns          # CPU time of the thread at the last choice


cdef void open_folios(Folios *self, int mode) noexcept nogil:
    """`self` is zeroed memory."""
    self.choice.mode = mode
    pthread_mutex_init(&self.lock, NULL)


cdef void close_folios(Folios *self) noexcept nogil:
    pthread_mutex_destroy(&self.lock)


cdef int open_again(const Read *read) noexcept nogil:
    """The file of a read with a read-ahead of its own, or -1."""
    cdef char[32] name
    snprintf(name, sizeof(name), b"/proc/self/fd/%d", read.fd)
    return open(name, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY)


cdef void leave_mark(const Read *read, uint64_t offset) noexcept nogil:
    """Reads the first two pages of a range: the kernel reads a few more and marks one of them."""
    cdef char first, second
    cdef int fd = open_again(read)
    if fd < 0:
        return
    if pread(fd, &first, 1, <int64_t>offset) == 1:
        pread(fd, &second, 1, <int64_t>(offset + page_bytes()))
    close(fd)


cdef void forget(Stream *stream, uint64_t end) noexcept nogil:
    """Takes what a stream has read out of its page tables, two units at a time: it would count twice
    as memory. Each time all processors of the process are interrupted.

    Unmapping it would stop all other threads that map something.
    """
    if stream.base != NULL and end - stream.kept >= 2 * UNIT_BYTES:
        advise(stream.base + (stream.kept - stream.offset), end - stream.kept, MADV_DONTNEED)
        stream.kept = end


cdef void close_stream(Stream *stream) noexcept nogil:
    if stream.base != NULL:
        munmap(stream.base, stream.end - stream.offset)
        stream.base = NULL


cdef void open_stream(Stream *stream, const Read *read, uint64_t done, int huge) noexcept nogil:
    """Begins to read ahead at byte `done` of a read, by huge folios if these are wanted and possible:
    some kernels are built without them.

    Without /proc or memory there is no mapping: that of the load is populated alone then.
    """
    cdef uint64_t offset = read.offset + done, length
    cdef char *mapped
    cdef int fd
    close_stream(stream)
    stream.offset = <uint64_t>page_floor(<uintptr_t>offset)
    stream.end = read.offset + read.length
    stream.huge = 0
    stream.kept = stream.offset
    length = stream.end - stream.offset
    fd = open_again(read)
    if fd >= 0:
        mapped = <char *>mmap(NULL, length, PROT_READ, MAP_PRIVATE, fd, <int64_t>stream.offset)
        close(fd)  # the mapping keeps the open file
        if mapped != MAP_FAILED:
            stream.base = mapped
            madvise(mapped, length, MADV_DONTFORK)
            stream.huge = huge and madvise(mapped, length, MADV_HUGEPAGE) == 0
    if not stream.huge and read.length - done >= UNIT_BYTES:
        leave_mark(read, offset)


cdef void measure(Stream *stream, Folios *folios, uint64_t done) noexcept nogil:
    """Adds what a stream cost since its last choice. Called with the lock of `folios` held."""
    cdef uint64_t length = done - stream.measured
    if length >= UNIT_BYTES:
        unit_took(
            &folios.choice, stream.huge, (cpu_ns() - stream.measured_ns) * UNIT_BYTES // length
        )


cdef void choose_stream(
    Stream *stream, Folios *folios, const Read *read, uint64_t done
) noexcept nogil:
    """Continues a stream, or begins the next one, as is cheaper.

    Growing folios are left after their first window if huge ones have turned out to be cheap. Such a
    part is not measured: the first windows cost most.
    """
    cdef int huge
    pthread_mutex_lock(&folios.lock)
    if done < stream.grown and not huge_is_cheap(&folios.choice):
        stream.until = stream.grown
        pthread_mutex_unlock(&folios.lock)
        return
    if done >= stream.grown:
        measure(stream, folios, done)
    huge = (
        read.length - done >= UNIT_BYTES
        and (
            huge_is_cheap(&folios.choice)
            or folios.choice.mode == HUGE
            or not has_present(read, done)
        )
        and choose_huge(&folios.choice, GROWING_BYTES // UNIT_BYTES)
    )
    pthread_mutex_unlock(&folios.lock)
    if not (huge and stream.huge):
        open_stream(stream, read, done, huge)
        if huge and not stream.huge:
            pthread_mutex_lock(&folios.lock)
            unit_took(&folios.choice, 1, NO_HUGE_PAGE_NS)
            pthread_mutex_unlock(&folios.lock)
    stream.measured_ns = cpu_ns()
    stream.measured = done
    stream.until = stream.grown = done
    if stream.huge:
        stream.until += unit_part(read, done) + UNIT_BYTES
    else:
        stream.grown += GROWING_BYTES
        stream.until += WINDOW_BYTES


cdef int has_present(const Read *read, uint64_t done) noexcept nogil:
    """Whether part of the unit of the file in which a read goes on is in the page cache, as the header
    is. Its folio will not be huge, and what it costs says nothing about huge ones."""
    cdef uint64_t offset = read.offset + done
    return pages_in_cache(read.fd, offset - offset % UNIT_BYTES, UNIT_BYTES) > 0


cdef uint64_t unit_part(const Read *read, uint64_t done) noexcept nogil:
    """Bytes of a read from `done` on that are in one unit of the file."""
    return min(UNIT_BYTES - (read.offset + done) % UNIT_BYTES, read.length - done)


cdef void advise_mapping(const Read *read, int advice) noexcept nogil:
    """What the mapping of a load is for: with MADV_RANDOM its pages do not read ahead, which is left
    to the streams."""
    cdef char *start = <char *>page_floor(<uintptr_t>read.address)
    madvise(start, read.address + read.length - start, advice)


cdef int populate(char *address, uint64_t length) noexcept nogil:
    """Makes a range of a mapping present: 0, or -1 if a page cannot be read, or the kernel is old."""
    return advise(address, length, MADV_POPULATE_READ)


cdef int64_t touch_pages(int sink, char *address, char *end, uint64_t step) noexcept nogil:
    """Makes the kernel read a byte of each ``step`` bytes, whole pages, of a range that is present:
    CPU time of one, or 0 if there is none. What is wrong with a page is found where it is used.
    """
    cdef iovec[TOUCHED_PAGES] touched
    cdef int64_t began = cpu_ns()
    cdef int count = 0
    while address < end and count < TOUCHED_PAGES:
        touched[count].iov_base = address
        touched[count].iov_len = 1
        count += 1
        address += step
    if count == 0 or pwritev(sink, touched, count, 0) < 0:
        return 0
    return (cpu_ns() - began) // count


cdef void take_faults(int sink, char *address, uint64_t length) noexcept nogil:
    """Takes the faults of the hypervisor for a range of at most a unit that is present.

    ``sink``: a file in memory, or -1: nothing is touched.
    """
    cdef char *first = <char *>page_floor(<uintptr_t>address)
    cdef char *end = address + length
    cdef uint64_t step = FIRST_STEP_PAGES * page_bytes()
    cdef int64_t took = touch_pages(sink, first, end, step)
    while took >= FAULT_NS and step > page_bytes():
        took = touch_pages(sink, first + step // 2, end, step)
        step //= 2


cdef int is_second(
    const Stream *stream, const Read *read, uint64_t done, uint64_t length
) noexcept nogil:
    """Whether this unit is the second of a pair of huge folios, which the kernel reads together. To
    use it in the mapping of the stream would read the next ones ahead."""
    return stream.huge and done > stream.measured and present_bytes(read, done, length) >= length


cdef int64_t read_unit(
    const Read *read, Stream *stream, int sink, uint64_t done, uint64_t length
) noexcept nogil:
    """Reads part of a unit into the page cache, and maps it: bytes, or -errno if nothing was read.

    The error of a page that cannot be read is that of a ``pread``, which also does the work of
    kernels without MADV_POPULATE_READ.
    """
    cdef char[COPY_BYTES] copy
    cdef uint64_t offset = read.offset + done, copied = 0
    cdef int64_t got
    if stream.base != NULL:
        if not is_second(stream, read, done, length):
            populate(stream.base + (offset - stream.offset), length)
        forget(stream, offset + length)
    else:  # page faults would read page by page, or far more than the unit
        posix_fadvise(read.fd, <int64_t>offset, <int64_t>length, POSIX_FADV_WILLNEED)
    if populate(read.address + done, length) == 0:
        take_faults(sink, read.address + done, length)
        return <int64_t>length
    while copied < length:
        got = pread(
            read.fd, copy, min(length - copied, <uint64_t>COPY_BYTES), <int64_t>(offset + copied)
        )
        if got < 0 and copied == 0:
            return -errno
        if got <= 0:
            break
        copied += <uint64_t>got
    return <int64_t>copied


cdef uint64_t present_bytes(const Read *read, uint64_t done, uint64_t length) noexcept nogil:
    """Bytes of the pages in the page cache of a part of a read; 0 if the kernel does not tell."""
    return max(pages_in_cache(read.fd, read.offset + done, length), 0) * page_bytes()


cdef void find_present(const Read *read, uint8_t *present) noexcept nogil:
    """Notes for each unit of a read whether it was in the page cache before anything was read. Of a
    read that goes on after it ended short, no unit counts: what the kernel has read ahead is there."""
    cdef uint64_t done = 0, length, number = 0
    cdef int cold = read.memory != NULL and read.memory.cold
    cdef int any_is = not cold and present_bytes(read, 0, read.length) > 0
    if read.memory != NULL:
        read.memory.cold = 1
    while done < read.length:
        length = unit_part(read, done)
        present[number] = any_is and present_bytes(read, done, length) >= length
        done += length
        number += 1


cdef int map_present(const Read *read, Stream *stream, uint64_t done, uint64_t length) noexcept nogil:
    """Maps part of a read that was in the page cache: false if it cannot.

    It does not count for what pages of a stream cost, and ends the stream: its read-ahead would begin
    anew behind such a part, with folios of one page.
    """
    cdef int64_t began = cpu_ns()
    if populate(read.address + done, length) != 0:
        return 0
    if read.memory != NULL:
        gds_add(&read.memory.present_bytes, <int64_t>length)
    stream.until = stream.grown = done + length
    stream.measured += length
    stream.measured_ns += cpu_ns() - began
    return 1


cdef int64_t read_mapped(
    Folios *folios, const Read *read, int64_t *cancelled, int64_t cancels
) noexcept nogil:
    """Reads the pages of a mapping: bytes, or -errno if nothing was read.

    ``cancelled``: the number of cancellations, and ``cancels`` what it was before the read. After
    another one no further unit is read.
    """
    cdef Stream stream
    cdef int sink = <int>syscall(SYS_memfd_create, <char *>b"gdsload-touch", MFD_CLOEXEC)
    cdef int64_t latest = monotonic_ns() + MOST_NS, got = 0
    cdef uint64_t done = 0, length, number = 0
    cdef uint8_t[MOST_UNITS] present
    find_present(read, present)
    memset(&stream, 0, sizeof(stream))
    advise_mapping(read, MADV_RANDOM)
    while done < read.length:
        length = unit_part(read, done)
        if present[number] and map_present(read, &stream, done, length):
            got = <int64_t>length
        else:
            if done >= stream.until:
                choose_stream(&stream, folios, read, done)
            got = read_unit(read, &stream, sink, done, length)
        if got <= 0:
            break
        done += <uint64_t>got
        number += 1
        # Short: the pump reads the rest, or meets the end of the file.
        if (
            <uint64_t>got < length
            or gds_load(cancelled) != cancels
            or monotonic_ns() > latest
        ):
            break
    pthread_mutex_lock(&folios.lock)
    measure(&stream, folios, done)
    pthread_mutex_unlock(&folios.lock)
    close_stream(&stream)
    advise_mapping(read, MADV_NORMAL)
    if sink >= 0:
        close(sink)
    return <int64_t>done if done else got
