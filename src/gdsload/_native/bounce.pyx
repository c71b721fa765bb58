"""An engine that reads through another one into a few huge pages, and copies from there to where the
bytes belong, where that is quicker than reading in place.

A direct read into small pages is a list of a thousand pieces, each of which somebody has to map on
its way: a virtual disk's host takes longer for them than for the bytes, and reads twice as fast into
one piece. A disk that fetches the pieces itself does not care, and then the copy is lost. So both
are measured as the load goes, a stretch of reads each, and the dearer way is tried again now and
then.

    pump ─► bounce ─► engine ─► slot ─► copied by the pump's own thread ─► pump
                  └─► engine ─► in place
"""

cimport cython
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from gdsload._native.atomics cimport gds_add, gds_load, gds_store
from gdsload._native.engine cimport DIRECT, Buffer, Completion, EngineOps, Read
from gdsload._native.pthreads cimport monotonic_ns
from gdsload._native.region cimport CRegion, release_region, retain_region

cdef extern from "<sys/mman.h>" nogil:
    enum:
        MADV_HUGEPAGE
    int madvise(void *address, size_t length, int advice)

cdef enum:
    EINVAL = 22
    ENOMEM = 12
    BATCH = 64
    MOST_SLOTS = 16
    # What is measured at a time: 30 ms of a fast disk, and long beside what overlaps at its ends.
    STRETCH_BYTES = 67108864
    LIVE_STRETCHES = 8
    # Of each way, before one is chosen: storage has its moods. Ways change after RUN_STRETCHES: the
    # first of a run is not measured, since reads of the other way end while it begins.
    FIRST_STRETCHES = 2
    RUN_STRETCHES = 3
    MOST_UNDECIDED = 24        # where they cannot be told apart by then, reads go in place
    # Stretches between two tries of the other way, doubled each time that it is no better.
    FIRST_RETRY = 16
    LAST_RETRY = 256
    # The first of them where an earlier load has chosen: it costs most where that was in place.
    RETRY_IN_PLACE = 8
    RETRY_BOUNCED = 64
    PAUSE_NS = 50000000
    WORTH_PERCENT = 110        # a copy costs the processor: it has to be that much faster

cdef enum:
    # The ways, as indices.
    IN_PLACE = 0
    BOUNCED = 1

cdef struct CBounce:
    int64_t references         # the Python object and the engine
    EngineOps *ops             # of the engine that reads
    CRegion *region            # the slots; NULL until it is armed
    uint64_t slot_bytes
    int slots
    int first_way              # chosen by an earlier load; -1: by none
    int only                   # the way of all reads, measured or not; -1: as it is measured
    int64_t armed
    int64_t copied_bytes
    int64_t rates[2]           # bytes per second by way, as last measured; 0: not yet
    int64_t best               # the way that is chosen; -1: none yet
    # Of all that was measured, by way. Only read when the engine is closed.
    int64_t bytes[2]
    int64_t ns[2]

cdef struct Entry:             # one read that the engine has
    uint64_t cookie            # the pump's
    char *address              # where the bytes belong
    int slot                   # that they come to; -1: they come in place
    int stretch                # that it is measured with; -1: none
    int next_idle

cdef struct Stretch:
    uint64_t handed            # bytes of its reads
    uint64_t came
    int under_way
    int way
    int follows                # a stretch of the same way
    int closed                 # nothing is added to it any more

cdef struct Runner:
    CBounce *bounce
    void *engine
    Entry *entries             # `depth` of them
    int idle
    int slots[MOST_SLOTS]      # stack of those that are free
    int free_slots
    int under_way              # entries in use
    Completion came[BATCH]     # taken from the engine, and not yet handed on
    int first
    int count
    Stretch stretches[LIVE_STRETCHES]
    int stretch                # the one that reads are added to
    int64_t last_end           # when the stretch before ended; 0: nobody read meanwhile
    int64_t came_bytes[2]      # by way, of all stretches
    int64_t came_then[2]       # the same, when the stretch before ended
    int run                    # stretches of the way that is tried, but for the first
    int64_t still_since        # when the last read came that was under way
    int begun                  # stretches
    int measured[2]            # by way
    int until_retry
    int retry


cdef void release_bounce(CBounce *self) noexcept nogil:
    if gds_add(&self.references, -1) > 0:
        return
    if self.region != NULL:
        release_region(self.region)
    free(self)


cdef int better(CBounce *bounce) noexcept nogil:
    """What the rates say. Storage that is slower than either way tells nothing of them: then it
    stays as it is, and in place where nothing was chosen yet."""
    cdef int64_t in_place = bounce.rates[IN_PLACE], bounced = bounce.rates[BOUNCED]
    if in_place == 0 or bounced == 0:
        return <int>bounce.best
    if bounce.best == BOUNCED:
        return IN_PLACE if in_place > bounced else BOUNCED
    return BOUNCED if bounced * 100 > in_place * WORTH_PERCENT else IN_PLACE


cdef int next_way(Runner *self) noexcept nogil:
    """The way of the stretch that begins."""
    cdef CBounce *bounce = self.bounce
    if bounce.only >= 0:
        return bounce.only
    cdef int way = self.stretches[self.stretch].way
    cdef int undecided = min(self.measured[0], self.measured[1]) < FIRST_STRETCHES
    if bounce.best < 0 and undecided and self.begun < MOST_UNDECIDED:
        self.run = (self.run + 1) % RUN_STRETCHES
        return way if self.run else 1 - way
    gds_store(&bounce.best, better(bounce))
    if bounce.best < 0:
        return IN_PLACE
    self.until_retry -= 1
    if self.until_retry > 0:
        return <int>bounce.best
    if self.until_retry == 0:
        return 1 - <int>bounce.best
    self.retry = min(2 * self.retry, <int>LAST_RETRY)
    self.until_retry = self.retry
    return way                 # the second of a try is the one that is measured


cdef void begin_stretch(Runner *self, int way) noexcept nogil:
    cdef Stretch *one
    cdef int place = (self.stretch + 1) % LIVE_STRETCHES
    one = &self.stretches[place]
    if one.under_way > 0:      # reads of long ago: what goes on is not measured
        self.stretches[self.stretch].closed = 0
        return
    one.handed, one.came, one.closed, one.way = 0, 0, 0, way
    one.follows = self.stretches[self.stretch].way == way
    self.stretch = place
    self.begun += 1


cdef void measured(Runner *self, Stretch *one) noexcept nogil:
    """All of a stretch has come.

    What counts is what came since the stretch before ended, of any stretch of this way: reads that
    came before, while others held the pump up, would make it look faster than the device.
    """
    cdef CBounce *bounce = self.bounce
    cdef int64_t now = monotonic_ns()
    cdef int64_t took = now - self.last_end
    cdef int way = one.way
    cdef int64_t known = bounce.rates[way], rate
    cdef int64_t own = self.came_bytes[way] - self.came_then[way]
    cdef int64_t other = self.came_bytes[1 - way] - self.came_then[1 - way]
    if (
        self.last_end != 0 and took > 0 and one.came == one.handed and one.follows
        and 2 * own >= STRETCH_BYTES and 8 * other <= own
    ):
        # A fast stretch is believed at once, a slow one by half.
        rate = max(<int64_t>(<double>own * 1e9 / took), 1)
        gds_store(&bounce.rates[way], rate if rate > known else (rate + known) // 2)
        bounce.bytes[way] += own
        bounce.ns[way] += took
        self.measured[way] += 1
    self.came_then[0], self.came_then[1] = self.came_bytes[0], self.came_bytes[1]
    self.last_end = now


cdef int way_of(Runner *self, const Read *read) noexcept nogil:
    """How a read goes: -1 where it is none of those that can be bounced."""
    cdef CBounce *bounce = self.bounce
    if self.free_slots < 0 or read.way != DIRECT or read.length > bounce.slot_bytes:
        return -1
    if self.under_way == 0 and monotonic_ns() - self.still_since > PAUSE_NS:
        self.last_end = 0      # what follows a pause measures the pause
    return self.stretches[self.stretch].way


cdef int open_bounce(
    void **engine, int depth, const Buffer *buffers, int count, int *fixed
) noexcept nogil:
    cdef CBounce *bounce
    cdef Runner *self
    cdef int error, i
    if count < 1 or buffers[0].length != sizeof(CBounce):
        return -EINVAL
    bounce = <CBounce *>buffers[0].address
    self = <Runner *>calloc(1, sizeof(Runner))
    if self == NULL:
        return -ENOMEM
    self.entries = <Entry *>calloc(depth, sizeof(Entry))
    if self.entries == NULL:
        free(self)
        return -ENOMEM
    for i in range(depth):
        self.entries[i].next_idle = i + 1 if i + 1 < depth else -1
    self.bounce = bounce
    self.retry = self.until_retry = FIRST_RETRY
    self.free_slots = -1       # until it is armed
    error = bounce.ops.open(&self.engine, depth, buffers + 1, count - 1, fixed)
    if error != 0:
        free(self.entries)
        free(self)
        return error
    gds_add(&bounce.references, 1)
    engine[0] = self
    return 0


cdef void arm(Runner *self) noexcept nogil:
    """The slots are there, seen for the first time."""
    cdef CBounce *bounce = self.bounce
    cdef int i
    self.free_slots = bounce.slots
    for i in range(self.free_slots):
        self.slots[i] = i
    # The first stretch ramps up, and touches the slots for the first time: it is not measured.
    self.stretches[0].way = BOUNCED
    if bounce.only >= 0:
        self.stretches[0].way = bounce.only
    elif bounce.first_way >= 0:
        self.stretches[0].way = bounce.first_way
        gds_store(&bounce.best, bounce.first_way)
        self.retry = RETRY_BOUNCED if bounce.first_way == BOUNCED else RETRY_IN_PLACE
        self.until_retry = self.retry


cdef void taken(Runner *self, Entry *entry, uint64_t length) noexcept nogil:
    """A read that is measured is on its way."""
    cdef Stretch *one = &self.stretches[entry.stretch]
    one.under_way += 1
    one.handed += length
    if one.handed >= STRETCH_BYTES and entry.stretch == self.stretch:
        one.closed = 1
        begin_stretch(self, next_way(self))


cdef int submit_bounce(void *engine, const Read *reads, int count) noexcept nogil:
    cdef Runner *self = <Runner *>engine
    cdef CBounce *bounce = self.bounce
    cdef Read batch[BATCH]
    cdef Entry *entry
    cdef int made = 0, got, i, way
    if self.free_slots < 0 and gds_load(&bounce.armed):
        arm(self)
    while made < count and made < BATCH and self.idle >= 0:
        entry = &self.entries[self.idle]
        way = way_of(self, &reads[made])
        if way == BOUNCED and self.free_slots == 0:
            break              # the next copy makes room
        self.idle = entry.next_idle
        self.under_way += 1
        entry.cookie = reads[made].cookie
        entry.address = reads[made].address
        entry.stretch = self.stretch if way >= 0 else -1
        entry.slot = -1
        batch[made] = reads[made]
        batch[made].cookie = <uint64_t>(entry - self.entries)
        if way == BOUNCED:
            self.free_slots -= 1
            entry.slot = self.slots[self.free_slots]
            batch[made].address = bounce.region.base + entry.slot * bounce.slot_bytes
            batch[made].buffer = -1
        if way >= 0:
            taken(self, entry, batch[made].length)
        made += 1
    if made == 0:
        return 0
    got = bounce.ops.submit(self.engine, batch, made)
    i = made
    while i > max(got, 0):     # the pump asks for these again
        i -= 1
        entry = &self.entries[batch[i].cookie]
        if entry.stretch >= 0:
            self.stretches[entry.stretch].handed -= batch[i].length
        leave(self, entry)
    return got


cdef void leave(Runner *self, Entry *entry) noexcept nogil:
    """An entry, and its slot, are free for the next read."""
    if entry.slot >= 0:
        self.slots[self.free_slots] = entry.slot
        self.free_slots += 1
    if entry.stretch >= 0:
        self.stretches[entry.stretch].under_way -= 1
    entry.next_idle = self.idle
    self.idle = <int>(entry - self.entries)
    self.under_way -= 1
    if self.under_way == 0:
        self.still_since = monotonic_ns()


cdef void arrived(Runner *self, Entry *entry, int64_t result) noexcept nogil:
    """A read has ended: its bytes go to where they belong."""
    cdef CBounce *bounce = self.bounce
    cdef Stretch *one
    if entry.slot >= 0 and result > 0:
        memcpy(
            entry.address,
            bounce.region.base + entry.slot * bounce.slot_bytes,
            min(<uint64_t>result, bounce.slot_bytes),
        )
        gds_add(&bounce.copied_bytes, result)
    if entry.stretch < 0:
        leave(self, entry)
        return
    one = &self.stretches[entry.stretch]
    one.came += <uint64_t>max(result, 0)
    self.came_bytes[one.way] += max(result, 0)
    leave(self, entry)
    if one.closed and one.under_way == 0:
        measured(self, one)


cdef int reap_bounce(
    void *engine, Completion *out, int room, int wanted, int64_t wait_ns
) noexcept nogil:
    cdef Runner *self = <Runner *>engine
    cdef Entry *entry
    cdef int handed = 0, copied = 0, seen
    if self.count == 0:
        # A slot that waits to be emptied reads nothing.
        if self.free_slots >= 0 and self.free_slots < self.bounce.slots:
            wanted = 1
        seen = self.bounce.ops.reap(self.engine, self.came, BATCH, wanted, wait_ns)
        if seen < 0:
            return seen
        self.first, self.count = 0, seen
    # One copy at a time: meanwhile the pump hands the slot to the next read.
    while handed < room and self.count > 0 and not copied:
        entry = &self.entries[self.came[self.first].cookie]
        copied = entry.slot >= 0
        out[handed].cookie = entry.cookie
        out[handed].result = self.came[self.first].result
        arrived(self, entry, self.came[self.first].result)
        self.first += 1
        self.count -= 1
        handed += 1
    return handed


cdef void cancel_bounce(void *engine) noexcept nogil:
    cdef Runner *self = <Runner *>engine
    self.bounce.ops.cancel(self.engine)


cdef void close_bounce(void *engine) noexcept nogil:
    cdef Runner *self = <Runner *>engine
    self.bounce.ops.close(self.engine)
    release_bounce(self.bounce)
    free(self.entries)
    free(self)


cdef EngineOps OPS
OPS.name = b"bounce"
OPS.open = open_bounce
OPS.submit = submit_bounce
OPS.reap = reap_bounce
OPS.cancel = cancel_bounce
OPS.close = close_bounce


@cython.final
cdef class Bounce:
    """The way of direct reads into host memory: through a few slots, or in place."""

    cdef CBounce *bounce
    cdef object engine         # what `ops` points into

    def __cinit__(self, object engine):
        """``engine``: the capsule of the engine that reads. Nothing is bounced before `arm`."""
        self.engine = engine
        self.bounce = <CBounce *>calloc(1, sizeof(CBounce))
        if self.bounce == NULL:
            raise MemoryError("no memory for a bounce")
        self.bounce.references = 1
        self.bounce.first_way = self.bounce.only = -1
        self.bounce.best = -1
        self.bounce.ops = <EngineOps *>PyCapsule_GetPointer(engine, b"gdsload.engine")

    def capsule(self):
        """The functions of this engine, for the pump."""
        return PyCapsule_New(&OPS, b"gdsload.engine", NULL)

    def buffers(self):
        """What the pump has to open it with, before the buffers that it is to register."""
        return [(<uintptr_t>self.bounce, sizeof(CBounce))]

    def arm(self, object region, uint64_t slot_bytes, int slots, int first_way=-1, int only=-1):
        """From now on reads may go through ``slots`` of ``slot_bytes`` bytes at the start of a
        region, whose handle it is, asked for as huge pages. ``first_way``: 1 through them, 0 in
        place, as an earlier load chose; -1: nobody did. ``only``: the same, and nothing is
        measured. Once is enough."""
        cdef CRegion *memory = <CRegion *>PyCapsule_GetPointer(region, b"gdsload.region")
        cdef CBounce *bounce = self.bounce
        if bounce.armed:
            return
        if not 1 <= slots <= MOST_SLOTS or slot_bytes < 1 or slots * slot_bytes > memory.length:
            raise ValueError(f"{slots} slots of {slot_bytes} bytes, in {memory.length}")
        madvise(memory.base, slots * slot_bytes, MADV_HUGEPAGE)
        retain_region(memory)
        bounce.region = memory
        bounce.slot_bytes, bounce.slots = slot_bytes, slots
        bounce.first_way, bounce.only = first_way, only
        gds_store(&bounce.armed, 1)

    @property
    def armed(self):
        return bool(self.bounce.armed)

    @property
    def copied_bytes(self):
        """Bytes that went through slots."""
        return gds_load(&self.bounce.copied_bytes)

    def rates(self):
        """Bytes per second in place and through slots, of all that was measured; 0: nothing was.
        To be asked when the pump has ended, which has no lock for it."""
        return tuple(
            int(self.bounce.bytes[way] * 1e9 / self.bounce.ns[way]) if self.bounce.ns[way] else 0
            for way in (IN_PLACE, BOUNCED)
        )

    def __dealloc__(self):
        if self.bounce != NULL:
            release_bounce(self.bounce)
