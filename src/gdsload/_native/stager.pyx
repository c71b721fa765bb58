"""The engine of the staging road: it reads through another one, by way of slots, into landings.

It lends each read a slot, copies what arrived to where it belongs, and tells the pump when the copy
is done, not before. The pump's own thread does all of it, without the GIL, and waits for no copy
while there is something to read.

    pump ─► stager ─► engine ─► slot ─► copies ─► event seen ─► pump
"""

from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free
from posix.time cimport timespec

from gdsload._native.atomics cimport gds_add
from gdsload._native.cuda cimport (
    CU_EVENT_DISABLE_TIMING,
    CUDA_ERROR_NOT_READY,
    CUDA_SUCCESS,
    relax,
)
from gdsload._native.engine cimport APART, CACHED, Buffer, Completion, EngineOps, Read
from gdsload._native.pthreads cimport (
    monotonic_ns,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from gdsload._native.stage cimport (
    COPIED_IN_A_LOOK,
    COPY_LOOK_NS,
    LANDING_SHIFT,
    LOST,
    CLanding,
    CStage,
    all_lost,
    borrow,
    copy_on,
    give_back,
    landing_of,
    lose,
    release_landing,
    release_stage,
)

cdef extern from "<time.h>" nogil:
    int nanosleep(const timespec *, timespec *)

cdef enum:
    EIO = 5
    EFAULT = 14
    EINVAL = 22
    ENOMEM = 12
    ENOBUFS = 105
    ECANCELED = 125
    BATCH = 64
    CLOSE_LOOK_NS = 20000000
    LAST_COPIES_NS = 1000000000
    APART_BYTES = 262144   # 20 us of copying: less is done sooner than handed to somebody

cdef enum:
    IDLE = 0
    READING = 1
    COPYING = 2
    VOID = 3               # given up by the pump, still with the engine

cdef struct Slot:
    int state
    int number             # of the ring's slot that it has borrowed
    uint64_t cookie        # the pump's
    CLanding *landing
    uint64_t place         # in the landing
    uint64_t length
    int64_t result
    void *event

cdef struct Runner:
    CStage *stage
    void *engine
    int fixed
    Slot *slots
    int depth
    int *copying           # ring of slots, in the order in which their copies were started
    int first_copying
    int copying_count
    Completion *ready      # for the next reap
    int ready_count
    int reading            # reads that the engine has, given up ones included


cdef void vacate(Runner *self, Slot *slot) noexcept nogil:
    give_back(self.stage.ring, slot.number)
    release_landing(slot.landing)
    slot.landing = NULL
    slot.state = IDLE


cdef void announce(Runner *self, Slot *slot, int64_t result) noexcept nogil:
    self.ready[self.ready_count].cookie = slot.cookie
    self.ready[self.ready_count].result = result
    self.ready_count += 1


cdef void arrived(Runner *self, Slot *slot, int64_t result) noexcept nogil:
    """A read has ended: its bytes go on, or the pump hears of it at once."""
    cdef CStage *stage = self.stage
    cdef int made, code
    self.reading -= 1
    if result <= -LOST:
        # Nobody knows whether it will still be written to: the slot is never used again.
        lose(stage.ring)
        if slot.state == READING:
            announce(self, slot, result + LOST)
        release_landing(slot.landing)
        slot.landing = NULL
        slot.state = IDLE
        return
    if slot.state == VOID or result <= 0:
        if slot.state == READING:
            announce(self, slot, result)
        vacate(self, slot)
        return
    slot.result = result if <uint64_t>result < slot.length else <int64_t>slot.length
    pthread_mutex_lock(&slot.landing.lock)
    if slot.landing.dead:
        pthread_mutex_unlock(&slot.landing.lock)
        announce(self, slot, -ECANCELED)
        vacate(self, slot)
        return
    slot.landing.copying += 1
    made = copy_on(
        stage,
        slot.landing,
        stage.ring.base + <uint64_t>slot.number * stage.ring.slot_bytes,
        slot.place,
        <uint64_t>slot.result,
    )
    pthread_mutex_unlock(&slot.landing.lock)
    if made < 0:
        stage.cuda_error = -made
        slot.result = -EIO
    # Also after a failure: copies before it may be on their way.
    code = stage.cuda.event_record(slot.event, stage.stream)
    if code != CUDA_SUCCESS:
        # A device in this state runs nothing any more.
        stage.cuda_error = code
        slot.result = -EIO
        copied(self, slot)
        return
    if made == 0:
        copied(self, slot)
        return
    slot.state = COPYING
    self.copying[(self.first_copying + self.copying_count) % self.depth] = <int>(slot - self.slots)
    self.copying_count += 1


cdef void copied(Runner *self, Slot *slot) noexcept nogil:
    pthread_mutex_lock(&slot.landing.lock)
    slot.landing.copying -= 1
    pthread_mutex_unlock(&slot.landing.lock)
    announce(self, slot, slot.result)
    vacate(self, slot)


cdef void look_at_copies(Runner *self) noexcept nogil:
    """Copies end in the order in which they were started: they share a stream."""
    cdef Slot *slot
    cdef int code
    while self.copying_count > 0:
        slot = &self.slots[self.copying[self.first_copying]]
        code = self.stage.cuda.event_query(slot.event)
        if code == CUDA_ERROR_NOT_READY:
            return
        if code != CUDA_SUCCESS:
            self.stage.cuda_error = code
            slot.result = -EIO
        self.first_copying = (self.first_copying + 1) % self.depth
        self.copying_count -= 1
        copied(self, slot)


cdef int look_at_reads(Runner *self, int wanted, int64_t wait_ns) noexcept nogil:
    cdef Completion completions[BATCH]
    cdef int seen, i
    seen = self.stage.ops.reap(self.engine, completions, BATCH, wanted, wait_ns)
    for i in range(seen):
        arrived(self, <Slot *>completions[i].cookie, completions[i].result)
    return seen


# --- the engine's five functions --------------------------------------------------------------

cdef int open_stage(
    void **engine, int depth, const Buffer *buffers, int count, int *fixed
) noexcept nogil:
    cdef CStage *stage
    cdef Runner *self
    cdef int error, i
    if count != 1 or buffers[0].length != sizeof(CStage):
        return -EINVAL
    stage = <CStage *>buffers[0].address
    self = <Runner *>calloc(1, sizeof(Runner))
    if self == NULL:
        return -ENOMEM
    self.stage = stage
    self.depth = depth
    self.slots = <Slot *>calloc(depth, sizeof(Slot))
    self.copying = <int *>calloc(depth, sizeof(int))
    # A read that is given up is announced at once, and its place is free for the next.
    self.ready = <Completion *>calloc(2 * depth, sizeof(Completion))
    gds_add(&stage.references, 1)
    if self.slots == NULL or self.copying == NULL or self.ready == NULL:
        free_runner(self)
        return -ENOMEM
    if stage.cuda.set_current(stage.context) != CUDA_SUCCESS:
        free_runner(self)
        return -EIO
    relax(stage.cuda)
    for i in range(depth):
        error = stage.cuda.event_create(&self.slots[i].event, CU_EVENT_DISABLE_TIMING)
        if error != CUDA_SUCCESS:
            stage.cuda_error = error
            self.slots[i].event = NULL
            free_runner(self)
            return -EIO
    error = stage.ops.open(
        &self.engine, depth, stage.buffers, stage.buffer_count, &self.fixed
    )
    if error != 0:
        free_runner(self)
        return error
    fixed[0] = self.fixed
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
    free(self.ready)
    free(self)


cdef int submit_stage(void *engine, const Read *reads, int count) noexcept nogil:
    cdef Runner *self = <Runner *>engine
    cdef CStage *stage = self.stage
    cdef Read inner[BATCH]
    cdef Slot *slot
    cdef int prepared = 0, taken, i, next_slot = 0, number
    cdef int refused = 0
    if count > BATCH:
        count = BATCH
    while prepared < count:
        while next_slot < self.depth and self.slots[next_slot].state != IDLE:
            next_slot += 1
        if next_slot == self.depth:
            break
        slot = &self.slots[next_slot]
        if reads[prepared].length > stage.ring.slot_bytes:
            refused = -EINVAL
            break
        slot.landing = landing_of(stage, reads[prepared].address)
        if slot.landing == NULL:
            refused = -EFAULT
            break
        number = borrow(stage.ring)
        if number < 0:
            release_landing(slot.landing)
            slot.landing = NULL
            if all_lost(stage.ring):
                refused = -ENOBUFS  # nobody will ever give one back
            break
        slot.number = number
        slot.state = READING
        slot.cookie = reads[prepared].cookie
        slot.place = <uint64_t>reads[prepared].address & ((<uint64_t>1 << LANDING_SHIFT) - 1)
        slot.length = reads[prepared].length
        inner[prepared] = reads[prepared]
        inner[prepared].address = stage.ring.base + <uint64_t>number * stage.ring.slot_bytes
        inner[prepared].buffer = 0 if self.fixed else -1
        if inner[prepared].way == CACHED and inner[prepared].length >= APART_BYTES:
            # One core copies a fraction of what a device takes; and copies to it are to be started
            # meanwhile.
            inner[prepared].way = APART
        inner[prepared].cookie = <uint64_t>slot
        prepared += 1
        next_slot += 1
    if prepared == 0:
        return refused
    taken = stage.ops.submit(self.engine, inner, prepared)
    for i in range(taken if taken > 0 else 0, prepared):
        vacate(self, <Slot *>inner[i].cookie)
    if taken > 0:
        self.reading += taken
    return taken


cdef int hand_out(Runner *self, Completion *out, int room) noexcept nogil:
    cdef int given = self.ready_count if self.ready_count < room else room
    cdef int i
    for i in range(given):
        out[i] = self.ready[i]
    self.ready_count -= given
    for i in range(self.ready_count):
        self.ready[i] = self.ready[i + given]
    return given


cdef int64_t copies_take(Runner *self, int count) noexcept nogil:
    """How soon so many copies can have ended: nobody needs to look before."""
    cdef int64_t nbytes = <int64_t>count * <int64_t>self.stage.ring.slot_bytes
    return max(<int64_t>COPY_LOOK_NS, nbytes * COPY_LOOK_NS // COPIED_IN_A_LOOK)


cdef int reap_stage(
    void *engine, Completion *out, int room, int wanted, int64_t wait_ns
) noexcept nogil:
    cdef Runner *self = <Runner *>engine
    cdef int64_t until = monotonic_ns() + wait_ns
    cdef int64_t left
    cdef timespec pause
    cdef int missing, seen, looked = 0
    while True:
        look_at_copies(self)
        missing = wanted - self.ready_count
        left = max(until - monotonic_ns(), <int64_t>0) if missing > 0 else 0
        if self.ready_count >= room or (looked and left == 0):
            return hand_out(self, out, room)
        if self.reading > 0:
            if missing > self.copying_count:
                # However soon the copies end, there will not be enough of them. Never more than
                # half of the reads: what has come is on its way while the others are read.
                missing = min(missing - self.copying_count, (self.reading + 1) // 2)
            elif missing > 0:
                # The copies that are under way would do.
                left = min(left, copies_take(self, missing))
                missing = 1
            seen = look_at_reads(self, max(missing, 1), left)
            if seen < 0:
                return seen
        elif self.copying_count > 0 and left > 0:
            pause.tv_sec = 0
            pause.tv_nsec = min(left, copies_take(self, min(missing, self.copying_count)))
            nanosleep(&pause, NULL)
        else:
            return hand_out(self, out, room)
        looked = 1


cdef void cancel_stage(void *engine) noexcept nogil:
    """Reads are given up at once, also those that the engine cannot call back: what they bring
    goes no further than their slots."""
    cdef Runner *self = <Runner *>engine
    cdef int i
    self.stage.ops.cancel(self.engine)
    for i in range(self.depth):
        if self.slots[i].state == READING:
            self.slots[i].state = VOID
            announce(self, &self.slots[i], -ECANCELED)


cdef void close_stage(void *engine) noexcept nogil:
    """Waits for the reads that were given up: their slots are somebody else's afterwards. And for
    the copies of an engine that broke down meanwhile, as long as a device may take for them."""
    cdef Runner *self = <Runner *>engine
    cdef int64_t until
    cdef timespec pause
    while self.reading > 0 and look_at_reads(self, 1, CLOSE_LOOK_NS) >= 0:
        pass
    until = monotonic_ns() + LAST_COPIES_NS
    look_at_copies(self)
    while self.copying_count > 0 and monotonic_ns() < until:
        pause.tv_sec = 0
        pause.tv_nsec = COPY_LOOK_NS
        nanosleep(&pause, NULL)
        look_at_copies(self)
    self.stage.ops.close(self.engine)
    free_runner(self)


cdef EngineOps OPS
OPS.name = b"stage"
OPS.open = open_stage
OPS.submit = submit_stage
OPS.reap = reap_stage
OPS.cancel = cancel_stage
OPS.close = close_stage


def engine():
    """The functions of this engine, for the pump. It is opened with a stage in the place of buffers
    to register: the seam hands an engine its buffers and nothing else."""
    return PyCapsule_New(&OPS, b"gdsload.engine", NULL)
