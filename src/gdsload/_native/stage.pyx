"""The staging pipeline in native code: reads go through registered slots into device memory.

A `Ring` owns the slots. A `Stage` is an engine for the pump that reads through another engine: it
lends each read a slot, copies the bytes on to the device, and reports the read as complete when the
copy is. The pump's thread does all of it, without the GIL, and submits reads while copies run. Not
responsible for the memory of the ring: gdsload.memory.staging_ring.

    pump ─► stage ─► engine ─► slot ─► copies of some slots ─► event seen ─► pump

A device pauses after each copy, for about 3 us on an H200: after 2 MiB, of 40 us, that costs 6 % of
its rate, and nearly nothing between copies that were started by one call of the driver. So slots
that have been read wait for others, as long as the device has enough to copy.

The pump knows addresses only, and device memory is not contiguous. So an `AddressMap` reserves a
range of addresses that no real pointer has, and maps parts of it to device memory:

    bit 63   62   61 ... 44                43 ... 0
       ┌────┬────┬────────────────────────┬──────────────────────────────┐
       │  0 │  1 │ number of the map (18) │ offset in the map (44): 16 TiB│
       └────┴────┴────────────────────────┴──────────────────────────────┘
"""

cimport cython
from cpython.pycapsule cimport PyCapsule_GetContext, PyCapsule_GetPointer
from libc.errno cimport EFAULT, EINVAL, EIO, ENOBUFS, ENOMEM
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc, qsort, realloc
from libc.string cimport memset
from posix.mman cimport MADV_HUGEPAGE, MADV_WIPEONFORK, madvise
from posix.unistd cimport getpid

from gdsload._native.atomics cimport gds_add, gds_load, gds_store
from gdsload._native.cuda cimport (
    CU_EVENT_DISABLE_TIMING, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, CU_STREAM_NON_BLOCKING,
    CUDA_ERROR_NOT_READY, CUDA_SUCCESS, CopyAttributes, CudaApi, enter_context, leave_context, relax,
)
from gdsload._native.cufile cimport CFiles, release_files
from gdsload._native.engine cimport (
    BATCH, BUFFERED, BUFFERED_ASYNC, ECANCELED, LOST, Buffer, Completion, EngineOps, Read, Results,
    add_result, engine_capsule, take_results,
)
from gdsload._native.pthreads cimport (
    monotonic_ns, pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t,
    pthread_mutex_unlock, sleep_ns,
)

cdef extern from "<sys/syscall.h>" nogil:
    enum: SYS_mbind

cdef extern from "<unistd.h>" nogil:
    long syscall(long number, ...)

cdef enum:
    MPOL_PREFERRED = 1
    MAP_BIT = 62
    MAP_SHIFT = 44
    LEAST_MAPS = 1024
    MOST_MAPS = 262144
    # Shortest time between two polls of a copy, and the bytes that take at least as long: 4 MiB take
    # 80 us at 55 GB/s.
    COPY_POLL_NS = 20000
    BYTES_PER_POLL = 4194304
    CLOSE_POLL_NS = 20000000
    LAST_COPIES_NS = 1000000000
    # -CUDA_REFUSED - CUresult, of a read or of opening: the device refused the copy, or what copies
    # need. Engines have no such results.
    CUDA_REFUSED = 65536
    ASYNC_BYTES = 262144   # 20 us of copying: a smaller read is copied faster than handed over
    # Slots whose copies are started together, and slots in flight that are enough for the device.
    TOGETHER = 4
    MOST_COPIES = 64       # of one call of the driver

REFUSED_COPY = CUDA_REFUSED
SLOTS_TOGETHER = TOGETHER

# --- ring: slots that are registered once ------------------------------------------------------

cdef struct CRing:
    int64_t references
    pthread_mutex_t lock
    char *base
    uint64_t slot_bytes
    int count
    int *idle               # stack of the numbers of idle slots
    int idle_count
    int lost                # slots that may still be written to: never returned


cdef void release_ring(CRing *ring) noexcept nogil:
    if gds_add(&ring.references, -1) > 0:
        return
    pthread_mutex_destroy(&ring.lock)
    free(ring.idle)
    free(ring)


cdef int borrow_slot(CRing *ring, int *all_lost) noexcept nogil:
    """The number of an idle slot, or -1; `all_lost`: whether none will ever be returned."""
    cdef int number = -1
    pthread_mutex_lock(&ring.lock)
    if ring.idle_count > 0:
        ring.idle_count -= 1
        number = ring.idle[ring.idle_count]
    all_lost[0] = ring.lost == ring.count
    pthread_mutex_unlock(&ring.lock)
    return number


cdef void return_slot(CRing *ring, int number, int lost) noexcept nogil:
    pthread_mutex_lock(&ring.lock)
    if lost:
        ring.lost += 1
    else:
        ring.idle[ring.idle_count] = number
        ring.idle_count += 1
    pthread_mutex_unlock(&ring.lock)


@cython.final
cdef class Ring:
    """Memory that is registered once, in slots that are lent to reads."""

    cdef CRing *ring

    def __cinit__(self, uint64_t base, uint64_t slot_bytes, int count):
        """``count`` slots of ``slot_bytes`` bytes from address ``base``. The caller owns the memory,
        which must exist as long as a slot is lent."""
        cdef CRing *made
        cdef int i
        if count < 1 or slot_bytes < 1:
            raise ValueError(f"a ring of {count} slots of {slot_bytes} bytes is empty")
        made = <CRing *>calloc(1, sizeof(CRing))
        if made == NULL:
            raise MemoryError("no memory for a ring")
        self.ring = made
        made.references = 1
        made.base = <char *><uintptr_t>base
        made.slot_bytes = slot_bytes
        made.count = made.idle_count = count
        pthread_mutex_init(&made.lock, NULL)
        made.idle = <int *>malloc(count * sizeof(int))
        if made.idle == NULL:
            raise MemoryError("no memory for a ring")
        for i in range(count):
            made.idle[i] = count - 1 - i

    @property
    def slot_bytes(self):
        return self.ring.slot_bytes

    @property
    def count(self):
        """Number of slots."""
        return self.ring.count

    @property
    def lost(self):
        """Slots out of use, because a read into them never completed."""
        return self.ring.lost

    @property
    def lent(self):
        """Slots in use, including lost ones."""
        cdef int lent
        pthread_mutex_lock(&self.ring.lock)
        lent = self.ring.count - self.ring.idle_count
        pthread_mutex_unlock(&self.ring.lock)
        return lent

    def advise(self, int node):
        """Before the first use of the memory: asks for huge pages, on NUMA ``node`` (-1: any), and
        for zeros in a child of fork().

        Without the last, a fork copies pinned pages; before Linux 5.12 the parent's next write even
        goes to a new page, while the device still reads the old one.

        All three are hints; the memory is usable without them. True if the node was accepted.
        """
        cdef unsigned long nodes[16]
        cdef uint64_t nbytes = self.ring.slot_bytes * <uint64_t>self.ring.count
        madvise(self.ring.base, nbytes, MADV_HUGEPAGE)
        madvise(self.ring.base, nbytes, MADV_WIPEONFORK)
        if node < 0 or node >= 1024:
            return False
        memset(nodes, 0, sizeof(nodes))
        nodes[node // 64] = 1UL << (node % 64)
        return syscall(SYS_mbind, self.ring.base, nbytes, MPOL_PREFERRED, nodes, 1025UL, 0) == 0

    def retire(self):
        """Takes every slot out of use. False, and no change, if one is lent or lost."""
        cdef int complete
        pthread_mutex_lock(&self.ring.lock)
        complete = self.ring.idle_count == self.ring.count
        if complete:
            self.ring.idle_count = 0
        pthread_mutex_unlock(&self.ring.lock)
        return bool(complete)

    def __dealloc__(self):
        if self.ring != NULL:
            release_ring(self.ring)


# --- address maps ------------------------------------------------------------------------------

# Contiguous bytes of an address map, and the device memory they are for.
cdef struct Share:
    uint64_t start
    uint64_t length
    uint64_t to

cdef struct CMap:
    int64_t references
    pthread_mutex_t lock
    Share *shares           # sorted by start
    int count
    int ended               # no further copies
    int copying             # copies in flight

cdef struct CStage:
    int64_t references
    CudaApi *cuda
    void *context           # a reference to the primary context: outlives everything in it
    int device
    int pid
    void *stream
    void *gate              # an event of another stream that `stream` waits for
    CRing *ring
    EngineOps *ops          # of the engine that reads into the slots
    void *engine_context
    CFiles *files           # the same, for an engine of cuFile: opening may outlive its object
    Buffer buffer           # what that engine registers: the whole ring
    int buffer_count        # 1, or 0: nothing
    pthread_mutex_t lock
    CMap **maps
    int room
    int next_map            # where a free number is searched first
    int64_t only_copies     # 1: all reads have ended, and some of their copies have not
    int64_t lent            # slots that it has borrowed and that are not lost
    int64_t lost            # slots that it has lost


cdef void release_map(CMap *addresses) noexcept nogil:
    if gds_add(&addresses.references, -1) > 0:
        return
    pthread_mutex_destroy(&addresses.lock)
    free(addresses.shares)
    free(addresses)


cdef CMap *find_map(CStage *stage, char *address) noexcept nogil:
    """The map of an address, retained; NULL if it does not exist any more."""
    cdef uint64_t word = <uint64_t>address
    cdef uint64_t number
    cdef CMap *found = NULL
    if not word >> MAP_BIT & 1:
        return NULL
    number = (word ^ (<uint64_t>1 << MAP_BIT)) >> MAP_SHIFT
    pthread_mutex_lock(&stage.lock)
    if number < <uint64_t>stage.room:
        found = stage.maps[number]
        if found != NULL:
            gds_add(&found.references, 1)
    pthread_mutex_unlock(&stage.lock)
    return found


cdef int first_share(CMap *addresses, uint64_t offset) noexcept nogil:
    """Index of the first share that ends after ``offset``."""
    cdef int low = 0, high = addresses.count, middle
    while low < high:
        middle = (low + high) // 2
        if addresses.shares[middle].start + addresses.shares[middle].length > offset:
            high = middle
        else:
            low = middle + 1
    return low


cdef void release_stage(CStage *stage) noexcept nogil:
    cdef int mode
    if gds_add(&stage.references, -1) > 0:
        return
    # After a fork the driver and all of this belong to the parent.
    if stage.context != NULL and stage.pid == getpid():
        if stage.stream != NULL and (
            enter_context(stage.cuda, stage.context, &mode) == CUDA_SUCCESS
        ):
            if stage.gate != NULL:
                stage.cuda.event_destroy(stage.gate)
            stage.cuda.stream_destroy(stage.stream)
            leave_context(stage.cuda, mode)
        stage.cuda.primary_release(stage.device)
    if stage.files != NULL:
        release_files(stage.files)
    release_ring(stage.ring)
    pthread_mutex_destroy(&stage.lock)
    free(stage.maps)
    free(stage)


@cython.final
cdef class Stage:
    """An engine that reads through another engine and a ring into address maps."""

    cdef CStage *stage
    cdef object device, engine, files    # owners of what the struct points at

    def __cinit__(
        self, Ring ring, object device, object engine, int register=0, object files=None
    ):
        """``engine``: capsule of the engine that reads into the slots. ``register``: let it register
        the ring. ``files``: the table of cuFile handles, for an engine of cuFile.

        Raises OSError if the device refuses a stream.
        """
        cdef CStage *made = <CStage *>calloc(1, sizeof(CStage))
        cdef int code, mode, ordinal
        if made == NULL:
            raise MemoryError("no memory for a stage")
        made.references = 1
        made.ring = ring.ring
        gds_add(&made.ring.references, 1)
        pthread_mutex_init(&made.lock, NULL)
        self.stage = made
        self.device, self.engine, self.files = device, engine, files
        cuda, _ = device.handles()
        made.cuda = <CudaApi *>PyCapsule_GetPointer(cuda, b"gdsload.cuda")
        made.pid = device.cuda.pid
        made.ops = <EngineOps *>PyCapsule_GetPointer(engine, b"gdsload.engine")
        made.buffer.address = made.ring.base
        made.buffer.length = made.ring.slot_bytes * <uint64_t>made.ring.count
        made.buffer_count = register or files is not None
        made.engine_context = PyCapsule_GetContext(engine)
        if files is not None:
            made.files = <CFiles *><uintptr_t>files.address
            gds_add(&made.files.references, 1)
            made.engine_context = made.files
        ordinal = device.ordinal
        with nogil:  # the driver may be busy with another thread
            code = made.cuda.device_get(&made.device, ordinal)
            if code == CUDA_SUCCESS:
                code = made.cuda.primary_retain(&made.context, made.device)
                if code != CUDA_SUCCESS:
                    made.context = NULL
            if code == CUDA_SUCCESS:
                code = enter_context(made.cuda, made.context, &mode)
            if code == CUDA_SUCCESS:
                code = made.cuda.stream_create(&made.stream, CU_STREAM_NON_BLOCKING)
                if code != CUDA_SUCCESS:
                    made.stream = NULL
                else:
                    code = made.cuda.event_create(&made.gate, CU_EVENT_DISABLE_TIMING)
                    if code != CUDA_SUCCESS:
                        made.gate = NULL
                leave_context(made.cuda, mode)
        if code != CUDA_SUCCESS:
            raise OSError(EIO, f"the device refused a stream (CUDA error {code})")

    def capsule(self):
        """This engine, as a capsule for the pump."""
        return engine_capsule(&OPS, self.stage)

    def follow(self, uint64_t stream):
        """Orders later copies after the work that ``stream`` (a CUstream of the same device, 0: the
        default one) has so far. Returns at once; False if the driver refuses."""
        cdef CStage *stage = self.stage
        cdef int code, mode
        if enter_context(stage.cuda, stage.context, &mode) != CUDA_SUCCESS:
            return False
        with nogil:
            # A wait refers to the event's latest record, so the event can be reused at once.
            pthread_mutex_lock(&stage.lock)
            code = stage.cuda.event_record(stage.gate, <void *><uintptr_t>stream)
            if code == CUDA_SUCCESS:
                code = stage.cuda.stream_wait(stage.stream, stage.gate, 0)
            pthread_mutex_unlock(&stage.lock)
        leave_context(stage.cuda, mode)
        return code == CUDA_SUCCESS

    @property
    def only_copies(self):
        """Whether all reads have ended, and some of their copies have not."""
        return gds_load(&self.stage.only_copies) != 0

    @property
    def lent(self):
        """Slots of the ring that it has borrowed, without lost ones."""
        return gds_load(&self.stage.lent)

    @property
    def lost(self):
        """Slots of the ring that it has lost: a read or a copy may still use them. Final when its
        pump has finished."""
        return gds_load(&self.stage.lost)

    def __dealloc__(self):
        if self.stage != NULL:
            release_stage(self.stage)


cdef int compare_shares(const void *left, const void *right) noexcept nogil:
    cdef uint64_t first = (<const Share *>left).start, second = (<const Share *>right).start
    return (first > second) - (first < second)


# No collector: clearing `stage` before __dealloc__ would leave the map in its table.
@cython.no_gc
@cython.final
cdef class AddressMap:
    """A range of addresses for the pump to read to. End it before freeing the device memory."""

    cdef CMap *map
    cdef Stage stage
    cdef int number

    def __cinit__(self, Stage stage, list spaces):
        """``spaces``: (offset in the map, bytes, shares) of memory; ``shares``: (offset in the memory,
        bytes, device address), in any order. A share takes one copy, so contiguous device memory
        should be one share.

        Raises ValueError for shares that overlap or leave their memory.
        """
        cdef CMap *made
        cdef CMap **grown
        cdef Share *share
        cdef uint64_t start, length, to, most = <uint64_t>1 << MAP_SHIFT
        cdef int64_t at, nbytes
        cdef int i, place, room
        cdef Py_ssize_t count = 0
        self.number = -1
        self.stage = stage
        made = <CMap *>calloc(1, sizeof(CMap))
        if made == NULL:
            raise MemoryError("no memory for an address map")
        self.map = made
        made.references = 1
        pthread_mutex_init(&made.lock, NULL)
        spaces = [(start, length, tuple(shares)) for start, length, shares in spaces]
        for _, _, shares in spaces:
            count += len(shares)
        made.shares = <Share *>calloc(count + 1, sizeof(Share))
        if made.shares == NULL:
            raise MemoryError(f"no memory for an address map of {count} shares")
        for start, length, shares in spaces:
            if length > most or start > most - length:
                raise ValueError(f"{length} bytes at {start} fit no address map")
            for at, nbytes, to in shares:
                if at < 0 or nbytes < 0 or <uint64_t>nbytes > length or (
                    <uint64_t>at > length - <uint64_t>nbytes
                ):
                    raise ValueError(f"a share of {nbytes} bytes at {at} leaves its memory")
                if nbytes > 0:
                    made.shares[made.count] = Share(start + <uint64_t>at, <uint64_t>nbytes, to)
                    made.count += 1
        qsort(made.shares, made.count, sizeof(Share), compare_shares)
        for i in range(1, made.count):
            share = &made.shares[i]
            if share.start < made.shares[i - 1].start + made.shares[i - 1].length:
                raise ValueError(f"two shares of an address map overlap at {share.start}")
        pthread_mutex_lock(&stage.stage.lock)
        # A number is used again as late as possible: the pump may still hold an address of its map.
        for i in range(stage.stage.room):
            place = (stage.stage.next_map + i) % stage.stage.room
            if stage.stage.maps[place] == NULL:
                self.number = place
                break
        if self.number < 0 and stage.stage.room < MOST_MAPS:
            room = min(2 * stage.stage.room + LEAST_MAPS, <int>MOST_MAPS)
            grown = <CMap **>realloc(stage.stage.maps, room * sizeof(CMap *))
            if grown != NULL:
                memset(grown + stage.stage.room, 0, (room - stage.stage.room) * sizeof(void *))
                self.number = stage.stage.room
                stage.stage.maps = grown
                stage.stage.room = room
        if self.number >= 0:
            stage.stage.maps[self.number] = made
            stage.stage.next_map = self.number + 1
        pthread_mutex_unlock(&stage.stage.lock)
        if self.number < 0:
            raise MemoryError("too many address maps")

    @property
    def base(self):
        """Its first address. Only the pump can use it."""
        return (<uint64_t>1 << MAP_BIT) | (<uint64_t>self.number << MAP_SHIFT)

    def end(self, double timeout):
        """Prevents further copies and waits up to ``timeout`` seconds for those in flight. True if
        none is left."""
        cdef int64_t until = monotonic_ns() + <int64_t>(timeout * 1e9)
        cdef int copying
        with nogil:
            while True:
                pthread_mutex_lock(&self.map.lock)
                self.map.ended = 1
                copying = self.map.copying
                pthread_mutex_unlock(&self.map.lock)
                if not copying or monotonic_ns() >= until:
                    break
                sleep_ns(COPY_POLL_NS)
        return not copying

    def __dealloc__(self):
        cdef CStage *stage
        if self.map == NULL:
            return
        # In a child of fork(), a thread of the parent may hold these locks.
        if self.number >= 0 and self.stage.stage.pid == getpid():
            stage = self.stage.stage
            pthread_mutex_lock(&stage.lock)
            stage.maps[self.number] = NULL
            pthread_mutex_unlock(&stage.lock)
            pthread_mutex_lock(&self.map.lock)
            self.map.ended = 1
            pthread_mutex_unlock(&self.map.lock)
        release_map(self.map)


# --- the engine --------------------------------------------------------------------------------

cdef enum SlotState:
    IDLE
    READING
    FILLED                 # its copies wait for those of others
    COPYING
    VOID                   # ended for the pump, still with the engine

cdef struct Slot:
    SlotState state
    int number             # of the borrowed slot of the ring
    uint64_t cookie        # of the pump
    CMap *map
    uint64_t offset        # in the map
    uint64_t length
    int64_t result
    void *event            # after the copies of this slot and of those that follow it:
    int together           # their number, with this slot
    int recorded           # the CUresult of recording it
    int counted            # among the copies of the map

# Copies that are about to be started, and the slot of each.
cdef struct Copies:
    int count
    uint64_t to[MOST_COPIES]
    uint64_t sources[MOST_COPIES]
    size_t nbytes[MOST_COPIES]
    Slot *slots[MOST_COPIES]

cdef struct Runner:
    CStage *stage
    void *engine
    Slot *slots
    int depth
    int *copying           # ring of slots, in the order of their copies
    int first_copying
    int copying_count
    int started            # of these, the first ones, whose copies are in flight
    int most_together      # TOGETHER; 1 if the driver starts no copies together
    Results ready
    int reading            # reads that the engine has
    int given_up           # of these, the ones that have ended for the pump


cdef char *slot_address(Runner *self, int number) noexcept nogil:
    return self.stage.ring.base + <uint64_t>number * self.stage.ring.slot_bytes


cdef void vacate(Runner *self, Slot *slot, int lost) noexcept nogil:
    return_slot(self.stage.ring, slot.number, lost)
    gds_add(&self.stage.lent, -1)
    gds_add(&self.stage.lost, lost)
    release_map(slot.map)
    slot.map = NULL
    slot.state = IDLE


cdef void end_read(Runner *self, Slot *slot, int64_t result) noexcept nogil:
    """Has the bytes of a completed read copied on, or reports its failure."""
    cdef int lost = result <= -LOST
    self.reading -= 1
    self.given_up -= slot.state == VOID
    if lost or slot.state == VOID or result <= 0:
        if slot.state == READING:
            add_result(&self.ready, slot.cookie, result + LOST if lost else result)
        vacate(self, slot, lost)  # lost: the slot may still be written to, and is never used again
        return
    slot.result = min(result, <int64_t>slot.length)
    slot.state = FILLED
    self.copying[(self.first_copying + self.copying_count) % self.depth] = <int>(slot - self.slots)
    self.copying_count += 1


cdef Slot *copied_slot(Runner *self, int place) noexcept nogil:
    """The slot at this place of the ring of copies."""
    return &self.slots[self.copying[(self.first_copying + place) % self.depth]]


cdef void begin_copies(Runner *self) noexcept nogil:
    """Starts the copies of filled slots, but for a few that can wait: the device is busy."""
    cdef int waiting = self.copying_count - self.started
    while waiting > 0 and (waiting >= self.most_together or self.started < self.most_together):
        copy_slots(self, min(waiting, self.most_together))
        waiting = self.copying_count - self.started


cdef void copy_slots(Runner *self, int together) noexcept nogil:
    """Starts the copies of so many filled slots: one for each share of each, and one event."""
    cdef CStage *stage = self.stage
    cdef Slot *first = copied_slot(self, self.started)
    cdef Slot *slot
    cdef Copies copies
    cdef int i
    copies.count = 0
    for i in range(self.started, self.started + together):
        slot = copied_slot(self, i)
        pthread_mutex_lock(&slot.map.lock)
        slot.counted = not slot.map.ended
        slot.map.copying += slot.counted
        pthread_mutex_unlock(&slot.map.lock)
        if slot.counted:
            add_copies(self, slot, &copies)
        else:
            slot.result = -ECANCELED
        slot.state = COPYING
    start_copies(self, &copies)
    first.together = together
    self.started += together
    # Also after a failure: other copies may be in flight.
    first.recorded = stage.cuda.event_record(first.event, stage.stream)


cdef void add_copies(Runner *self, Slot *slot, Copies *copies) noexcept nogil:
    cdef CMap *addresses = slot.map
    cdef Share *share
    cdef uint64_t source = <uint64_t>slot_address(self, slot.number)
    cdef uint64_t end = slot.offset + <uint64_t>slot.result
    cdef uint64_t begin
    cdef int i
    for i in range(first_share(addresses, slot.offset), addresses.count):
        share = &addresses.shares[i]
        if share.start >= end:
            break
        if copies.count == MOST_COPIES:
            start_copies(self, copies)
        begin = max(share.start, slot.offset)
        copies.to[copies.count] = share.to + (begin - share.start)
        copies.sources[copies.count] = source + (begin - slot.offset)
        copies.nbytes[copies.count] = min(share.start + share.length, end) - begin
        copies.slots[copies.count] = slot
        copies.count += 1


cdef void start_copies(Runner *self, Copies *copies) noexcept nogil:
    """Starts these copies. A slot whose copy is refused gets that as its result."""
    cdef CStage *stage = self.stage
    cdef CopyAttributes attributes
    cdef size_t first = 0, failed = 0
    cdef int i, code, refused = 0
    cdef int count = copies.count
    cdef int batched = count > 1 and self.most_together > 1
    copies.count = 0
    if batched:
        memset(&attributes, 0, sizeof(attributes))
        attributes.source_order = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        code = stage.cuda.copy_batch(
            copies.to, copies.sources, copies.nbytes, <size_t>count, &attributes, &first, 1, &failed,
            stage.stream,
        )
        if code == CUDA_SUCCESS:
            return
    # One by one they tell which one is refused. Some may be copied twice.
    for i in range(count):
        code = stage.cuda.copy_async(
            copies.to[i], copies.sources[i], copies.nbytes[i], stage.stream
        )
        if code != CUDA_SUCCESS:
            copies.slots[i].result = -code - CUDA_REFUSED
            refused = 1
    if batched and not refused:
        self.most_together = 1


cdef void end_first_copies(Runner *self, int code) noexcept nogil:
    """Reports the oldest slots that were copied together; ``code``: the result of their event."""
    cdef Slot *slot
    cdef int i
    for i in range(copied_slot(self, 0).together):
        slot = copied_slot(self, 0)
        self.first_copying = (self.first_copying + 1) % self.depth
        self.copying_count -= 1
        self.started -= 1
        if code != CUDA_SUCCESS:
            slot.result = -code - CUDA_REFUSED
        pthread_mutex_lock(&slot.map.lock)
        slot.map.copying -= slot.counted
        pthread_mutex_unlock(&slot.map.lock)
        add_result(&self.ready, slot.cookie, slot.result)
        vacate(self, slot, 0)


cdef void poll_copies(Runner *self) noexcept nogil:
    """Copies end in the order of their starts: they share a stream."""
    cdef Slot *first
    cdef int code
    while self.started > 0:
        first = copied_slot(self, 0)
        code = first.recorded
        if code == CUDA_SUCCESS:
            code = self.stage.cuda.event_query(first.event)
        if code == CUDA_ERROR_NOT_READY:
            return
        if code != CUDA_SUCCESS:
            # The event has failed; the copies may still run, from slots and to memory that others
            # use next. This refuses to wait only if the device runs nothing any more.
            self.stage.cuda.stream_synchronize(self.stage.stream)
        end_first_copies(self, code)


cdef int reap_reads(Runner *self, int wanted, int64_t wait_ns) noexcept nogil:
    cdef Completion completions[BATCH]
    cdef int i, count
    count = self.stage.ops.reap(self.engine, completions, BATCH, wanted, wait_ns)
    for i in range(count):
        end_read(self, <Slot *>completions[i].cookie, completions[i].result)
    return count


cdef int open_stage(
    void **engine, void *context, int depth, const Buffer *buffers, int count
) noexcept nogil:
    cdef CStage *stage = <CStage *>context
    cdef Runner *self = <Runner *>calloc(1, sizeof(Runner))
    cdef int error, i
    if self == NULL:
        return -ENOMEM
    gds_add(&stage.references, 1)
    self.stage = stage
    self.depth = depth
    self.most_together = TOGETHER if stage.cuda.copy_batch != NULL else 1
    self.slots = <Slot *>calloc(depth, sizeof(Slot))
    self.copying = <int *>calloc(depth, sizeof(int))
    # A read that is given up completes at once, and its place may be used for the next.
    self.ready.items = <Completion *>calloc(2 * depth, sizeof(Completion))
    if self.slots == NULL or self.copying == NULL or self.ready.items == NULL:
        free_runner(self)
        return -ENOMEM
    error = stage.cuda.set_current(stage.context)
    relax(stage.cuda)
    for i in range(depth):
        if error == CUDA_SUCCESS:
            error = stage.cuda.event_create(&self.slots[i].event, CU_EVENT_DISABLE_TIMING)
            if error != CUDA_SUCCESS:
                self.slots[i].event = NULL
    if error != CUDA_SUCCESS:
        free_runner(self)
        return -error - CUDA_REFUSED
    error = stage.ops.open(
        &self.engine, stage.engine_context, depth, &stage.buffer, stage.buffer_count
    )
    if error != 0:
        free_runner(self)
        return error
    engine[0] = self
    return 0


cdef void free_runner(Runner *self) noexcept nogil:
    cdef int i
    if self.slots != NULL:
        for i in range(self.depth):
            if self.slots[i].event != NULL:
                self.stage.cuda.event_destroy(self.slots[i].event)
    release_stage(self.stage)
    free(self.slots)
    free(self.copying)
    free(self.ready.items)
    free(self)


cdef int submit_stage(void *engine, const Read *reads, int count) noexcept nogil:
    cdef Runner *self = <Runner *>engine
    cdef CStage *stage = self.stage
    cdef Read inner[BATCH]
    cdef const Read *read
    cdef Slot *slot
    cdef int prepared = 0, taken, i, refused = 0, all_lost
    # With nothing else in flight, there would be no other reap.
    taken = take_back_slots(self)
    if taken < 0:
        return taken
    for i in range(self.depth):
        if prepared == min(count, <int>BATCH):
            break
        slot = &self.slots[i]
        if slot.state != IDLE:
            continue
        read = &reads[prepared]
        if read.length > stage.ring.slot_bytes:
            refused = -EINVAL
            break
        slot.map = find_map(stage, read.address)
        if slot.map == NULL:
            refused = -EFAULT
            break
        slot.number = borrow_slot(stage.ring, &all_lost)
        if slot.number < 0:
            release_map(slot.map)
            slot.map = NULL
            refused = -ENOBUFS if all_lost else 0
            break
        gds_add(&stage.lent, 1)
        slot.state = READING
        slot.cookie = read.cookie
        slot.offset = <uint64_t>read.address & ((<uint64_t>1 << MAP_SHIFT) - 1)
        slot.length = read.length
        inner[prepared] = read[0]
        inner[prepared].address = slot_address(self, slot.number)
        inner[prepared].buffer = 0 if stage.buffer_count else -1
        inner[prepared].memory = NULL
        if read.io_mode == BUFFERED and read.length >= ASYNC_BYTES:
            # One core copies slower than the device, and this thread also has to start the copies.
            inner[prepared].io_mode = BUFFERED_ASYNC
        inner[prepared].cookie = <uint64_t>slot
        prepared += 1
    if prepared == 0:
        return refused
    taken = stage.ops.submit(self.engine, inner, prepared)
    for i in range(max(taken, 0), prepared):
        vacate(self, <Slot *>inner[i].cookie, 0)
    self.reading += max(taken, 0)
    return taken


cdef int64_t shortest_copy_ns(Runner *self, int count) noexcept nogil:
    """The least time in which ``count`` copies can end: no need to poll earlier."""
    cdef int64_t nbytes = <int64_t>count * <int64_t>self.stage.ring.slot_bytes
    return max(<int64_t>COPY_POLL_NS, nbytes * COPY_POLL_NS // BYTES_PER_POLL)


cdef int reap_stage(
    void *engine, Completion *out, int room, int wanted, int64_t wait_ns
) noexcept nogil:
    cdef Runner *self = <Runner *>engine
    cdef int64_t until = monotonic_ns() + wait_ns
    cdef int64_t left
    cdef int missing, seen, polled = 0
    wanted = min(wanted, <int>TOGETHER)  # free slots should be filled while the others are copied
    while True:
        poll_copies(self)
        begin_copies(self)
        missing = wanted - self.ready.count
        left = max(until - monotonic_ns(), <int64_t>0) if missing > 0 else 0
        if self.ready.count >= room or (polled and left == 0):
            break
        if self.reading > 0:
            if self.copying_count > self.started:
                # Filled slots wait for the device.
                left = min(left, shortest_copy_ns(self, self.started))
                missing = 1
            elif missing > self.copying_count:
                # The copies in flight are too few: wait for reads. At most for half of them, so that
                # the first half is copied while the second is read.
                missing = min(missing - self.copying_count, (self.reading + 1) // 2)
            elif missing > 0:
                # The copies in flight are enough.
                left = min(left, shortest_copy_ns(self, missing))
                missing = 1
            seen = reap_reads(self, max(missing, 1), left)
            if seen < 0:
                return seen
        elif self.copying_count > 0 and left > 0:
            sleep_ns(min(left, shortest_copy_ns(self, min(missing, self.copying_count))))
        else:
            break
        polled = 1
    gds_store(
        &self.stage.only_copies, self.copying_count > 0 and self.reading == self.given_up
    )
    return take_results(&self.ready, out, room)


cdef void cancel_stage(void *engine) noexcept nogil:
    """Completes all reads at once, also those that the engine cannot cancel: their bytes stay in
    their slots."""
    cdef Runner *self = <Runner *>engine
    cdef int i
    self.stage.ops.cancel(self.engine)
    for i in range(self.depth):
        if self.slots[i].state == READING:
            self.slots[i].state = VOID
            self.given_up += 1
            add_result(&self.ready, self.slots[i].cookie, -ECANCELED)


cdef int take_back_slots(void *engine) noexcept nogil:
    """A slot that no read writes to any more may be needed by other stages, too."""
    cdef Runner *self = <Runner *>engine
    cdef int seen = 0
    if self.given_up > 0:
        seen = reap_reads(self, 1, 0)
    return seen if seen < 0 else self.given_up


cdef void close_stage(void *engine) noexcept nogil:
    """Waits for the reads that were given up, because others will use their slots, and a limited
    time for the copies of an engine that failed. Slots that are read to or copied from are lost."""
    cdef Runner *self = <Runner *>engine
    cdef int64_t until
    cdef int i
    while self.reading > 0 and reap_reads(self, 1, CLOSE_POLL_NS) >= 0:
        pass
    until = monotonic_ns() + LAST_COPIES_NS
    poll_copies(self)
    while self.started > 0 and monotonic_ns() < until:
        sleep_ns(COPY_POLL_NS)
        poll_copies(self)
    for i in range(self.depth):
        if self.slots[i].state != IDLE:
            vacate(self, &self.slots[i], self.slots[i].state != FILLED)
    self.stage.ops.close(self.engine)
    free_runner(self)


cdef EngineOps OPS = EngineOps(
    open_stage, submit_stage, reap_stage, cancel_stage, close_stage, take_back_slots
)
