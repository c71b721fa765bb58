"""The staging road: an engine reads into slots, asynchronous copies carry the bytes on.

A `Ring` is memory that was registered once and is cut into slots. A `Landing` is a range of
addresses that stands for device memory: which of its bytes go where. A `Stage` is an engine for the
pump that reads through another engine: it lends each read a slot, copies what arrived to where it
belongs, and tells the pump when the copy is done, not before. The pump's own thread does all of
it, without the GIL, and waits for no copy while there is something to read.

    pump ─► stage ─► engine ─► slot ─► copies ─► event seen ─► pump
"""

cimport cython
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memset
from posix.time cimport timespec

from gdsload._native.atomics cimport gds_add, gds_load
from gdsload._native.cuda cimport (
    CU_EVENT_DISABLE_TIMING,
    CU_STREAM_NON_BLOCKING,
    CUDA_ERROR_NOT_READY,
    CUDA_SUCCESS,
    CudaApi,
)
from gdsload._native.engine cimport Buffer, Completion, EngineOps, Read
from gdsload._native.pthreads cimport (
    monotonic_ns,
    pthread_mutex_destroy,
    pthread_mutex_init,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from gdsload._native.stage cimport (
    LANDING_BIT,
    LANDING_SHIFT,
    LOST,
    MOST_LANDINGS,
    CLanding,
    CRing,
    CStage,
    Share,
    release_landing,
    release_ring,
)

cdef extern from "<time.h>" nogil:
    int nanosleep(const timespec *, timespec *)

cdef extern from "<sys/mman.h>" nogil:
    enum:
        MADV_HUGEPAGE
    int madvise(void *address, size_t length, int advice)

cdef extern from "<sys/syscall.h>" nogil:
    enum:
        SYS_mbind

cdef extern from "<unistd.h>" nogil:
    long syscall(long number, ...)

cdef enum:
    EIO = 5
    EFAULT = 14
    EINVAL = 22
    ENOMEM = 12
    ECANCELED = 125
    MPOL_PREFERRED = 1
    BATCH = 64
    # How long to look away while a copy is on its way: a slot of 4 MiB takes some 80 us at
    # 55 GB/s, and costs nothing while it waits to be noticed.
    COPY_LOOK_NS = 20000
    CLOSE_LOOK_NS = 20000000
    LAST_COPIES_NS = 1000000000

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


cdef int borrow(CRing *ring) noexcept nogil:
    """The number of a slot that nobody has, or -1."""
    cdef int number = -1
    pthread_mutex_lock(&ring.lock)
    if ring.idle_count > 0:
        ring.idle_count -= 1
        number = ring.idle[ring.idle_count]
    pthread_mutex_unlock(&ring.lock)
    return number


cdef void give_back(CRing *ring, int number) noexcept nogil:
    pthread_mutex_lock(&ring.lock)
    ring.idle[ring.idle_count] = number
    ring.idle_count += 1
    pthread_mutex_unlock(&ring.lock)


cdef void lose(CRing *ring) noexcept nogil:
    pthread_mutex_lock(&ring.lock)
    ring.lost += 1
    pthread_mutex_unlock(&ring.lock)


cdef CLanding *landing_of(CStage *stage, char *address) noexcept nogil:
    """The landing that an address is of, retained; NULL where there is none any more."""
    cdef uint64_t word = <uint64_t>address
    cdef uint64_t number
    cdef CLanding *found = NULL
    if not word >> LANDING_BIT & 1:
        return NULL
    number = (word ^ (<uint64_t>1 << LANDING_BIT)) >> LANDING_SHIFT
    pthread_mutex_lock(&stage.lock)
    if number < <uint64_t>stage.room:
        found = stage.landings[number]
        if found != NULL:
            gds_add(&found.references, 1)
    pthread_mutex_unlock(&stage.lock)
    return found


cdef int first_share(CLanding *landing, uint64_t place) noexcept nogil:
    """The first share that ends after ``place``."""
    cdef int low = 0, high = landing.count, middle
    while low < high:
        middle = (low + high) // 2
        if landing.shares[middle].start + landing.shares[middle].length > place:
            high = middle
        else:
            low = middle + 1
    return low


cdef void vacate(Runner *self, Slot *slot) noexcept nogil:
    give_back(self.stage.ring, slot.number)
    release_landing(slot.landing)
    slot.landing = NULL
    slot.state = IDLE


cdef void announce(Runner *self, Slot *slot, int64_t result) noexcept nogil:
    self.ready[self.ready_count].cookie = slot.cookie
    self.ready[self.ready_count].result = result
    self.ready_count += 1


cdef int copy_on(Runner *self, Slot *slot) noexcept nogil:
    """Starts the copies of what a slot holds: how many, or a negative CUresult.

    One copy for each share of the slot: a run of small tensors costs a launch each, which the
    plan keeps few by joining what lies together.
    """
    cdef CStage *stage = self.stage
    cdef CLanding *landing = slot.landing
    cdef Share *share
    cdef char *source = stage.ring.base + <uint64_t>slot.number * stage.ring.slot_bytes
    cdef uint64_t end = slot.place + <uint64_t>slot.result
    cdef uint64_t start, stop
    cdef int i = first_share(landing, slot.place)
    cdef int made = 0, code
    while i < landing.count:
        share = &landing.shares[i]
        start = share.start if share.start > slot.place else slot.place
        stop = share.start + share.length
        if stop > end:
            stop = end
        if share.start >= end:
            break
        code = stage.cuda.copy_async(
            share.to + (start - share.start), <uint64_t>(source + (start - slot.place)),
            stop - start, stage.stream,
        )
        if code != CUDA_SUCCESS:
            return -code
        gds_add(&stage.copies, 1)
        gds_add(&stage.copied_bytes, <int64_t>(stop - start))
        made += 1
        i += 1
    return made


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
    made = copy_on(self, slot)
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


cdef int look_at_reads(Runner *self, int64_t wait_ns) noexcept nogil:
    cdef Completion completions[BATCH]
    cdef int seen, i
    seen = self.stage.ops.reap(self.engine, completions, BATCH, wait_ns)
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
            break
        slot.number = number
        slot.state = READING
        slot.cookie = reads[prepared].cookie
        slot.place = <uint64_t>reads[prepared].address & ((<uint64_t>1 << LANDING_SHIFT) - 1)
        slot.length = reads[prepared].length
        inner[prepared] = reads[prepared]
        inner[prepared].address = stage.ring.base + <uint64_t>number * stage.ring.slot_bytes
        inner[prepared].buffer = 0 if self.fixed else -1
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


cdef int reap_stage(void *engine, Completion *out, int room, int64_t wait_ns) noexcept nogil:
    cdef Runner *self = <Runner *>engine
    cdef int64_t until = monotonic_ns() + wait_ns
    cdef int64_t left
    cdef timespec pause
    cdef int seen
    while True:
        look_at_copies(self)
        left = until - monotonic_ns()
        if self.ready_count >= room:
            return hand_out(self, out, room)
        if self.ready_count > 0 or left < 0:
            left = 0
        if self.reading > 0:
            # While something is being copied, it is looked at again soon.
            seen = look_at_reads(
                self, left if self.copying_count == 0 or left < COPY_LOOK_NS else COPY_LOOK_NS
            )
            if seen < 0:
                return seen
        elif self.copying_count > 0 and left > 0:
            pause.tv_sec = 0
            pause.tv_nsec = COPY_LOOK_NS
            nanosleep(&pause, NULL)
        if self.ready_count > 0 or left == 0 or self.reading + self.copying_count == 0:
            look_at_copies(self)
            return hand_out(self, out, room)


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
    while self.reading > 0 and look_at_reads(self, CLOSE_LOOK_NS) >= 0:
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


cdef void release_stage(CStage *stage) noexcept nogil:
    cdef void *popped
    if gds_add(&stage.references, -1) > 0:
        return
    if stage.stream != NULL and stage.cuda.push_current(stage.context) == CUDA_SUCCESS:
        if stage.gate != NULL:
            stage.cuda.event_destroy(stage.gate)
        stage.cuda.stream_destroy(stage.stream)
        stage.cuda.pop_current(&popped)
    release_ring(stage.ring)
    pthread_mutex_destroy(&stage.lock)
    free(stage.landings)
    free(stage)


@cython.final
cdef class Ring:
    """Memory that was registered once, in slots that are lent to reads and come back."""

    cdef CRing *ring

    def __cinit__(self, uint64_t base, uint64_t slot_bytes, int count):
        """``count`` slots of ``slot_bytes`` bytes from address ``base``; whose they are is the
        caller's business, and they must be there as long as a slot is lent."""
        cdef CRing *made
        cdef int i
        if count < 1 or slot_bytes < 1:
            raise ValueError(f"a ring of {count} slots of {slot_bytes} bytes holds nothing")
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
    def address(self):
        return <uintptr_t>self.ring.base

    @property
    def slot_bytes(self):
        return self.ring.slot_bytes

    @property
    def count(self):
        """Slots, in all."""
        return self.ring.count

    @property
    def lost(self):
        """Slots that were taken out of use: a read of them was never heard of again."""
        return self.ring.lost

    def settle(self, int node):
        """Before its pages are there: asks for huge ones, near ``node`` (-1: anywhere).

        Both are wishes: a kernel without huge pages or NUMA leaves the memory as good as it was.
        True where the node was accepted.
        """
        cdef unsigned long nodes[16]
        cdef uint64_t nbytes = self.ring.slot_bytes * <uint64_t>self.ring.count
        madvise(self.ring.base, nbytes, MADV_HUGEPAGE)
        if node < 0 or node >= 1024:
            return False
        memset(nodes, 0, sizeof(nodes))
        nodes[node // 64] = 1UL << (node % 64)
        return syscall(SYS_mbind, self.ring.base, nbytes, MPOL_PREFERRED, nodes, 1025UL, 0) == 0

    def retire(self):
        """Takes every slot out of use; False where one is lent or lost, and nothing was done."""
        cdef int home
        pthread_mutex_lock(&self.ring.lock)
        home = self.ring.idle_count == self.ring.count
        if home:
            self.ring.idle_count = 0
        pthread_mutex_unlock(&self.ring.lock)
        return bool(home)

    def __dealloc__(self):
        if self.ring != NULL:
            release_ring(self.ring)


@cython.final
cdef class Stage:
    """An engine that reads through another one, by way of a ring, into landings."""

    cdef CStage *stage
    cdef object ring, device, engine, files    # what its pointers point at

    def __cinit__(
        self, Ring ring, object device, object engine, int register=0, object files=None
    ):
        """``engine``: the capsule of the engine that reads into the slots. ``register``: hand it
        the ring to register. ``files``: the table of cuFile handles, for an engine that works
        with one.

        Raises OSError where the device gives no stream.
        """
        cdef CStage *made = <CStage *>calloc(1, sizeof(CStage))
        cdef void *popped
        cdef int code
        if made == NULL:
            raise MemoryError("no memory for a stage")
        made.references = 1
        made.ring = ring.ring
        gds_add(&ring.ring.references, 1)
        pthread_mutex_init(&made.lock, NULL)
        cuda, context = device.handles()
        made.cuda = <CudaApi *>PyCapsule_GetPointer(cuda, b"gdsload.cuda")
        made.context = PyCapsule_GetPointer(context, b"gdsload.context")
        self.stage = made
        self.ring, self.device, self.engine, self.files = ring, device, engine, files
        made.ops = <EngineOps *>PyCapsule_GetPointer(engine, b"gdsload.engine")
        if register or files is not None:
            made.buffers[0].address = ring.ring.base
            made.buffers[0].length = ring.ring.slot_bytes * <uint64_t>ring.ring.count
            made.buffer_count = 1
        if files is not None:
            made.buffers[1].address = <char *><uintptr_t>files.address
            made.buffers[1].length = 0
            made.buffer_count = 2
        code = made.cuda.push_current(made.context)
        if code == CUDA_SUCCESS:
            code = made.cuda.stream_create(&made.stream, CU_STREAM_NON_BLOCKING)
            if code != CUDA_SUCCESS:
                made.stream = NULL
            else:
                code = made.cuda.event_create(&made.gate, CU_EVENT_DISABLE_TIMING)
                if code != CUDA_SUCCESS:
                    made.gate = NULL
            made.cuda.pop_current(&popped)
        if code != CUDA_SUCCESS:
            raise OSError(5, f"the device gives no stream (CUDA error {code})")

    def capsule(self):
        """The functions of this engine, for the pump."""
        return PyCapsule_New(&OPS, b"gdsload.engine", NULL)

    def buffers(self):
        """What the pump has to open it with: itself, in the place of buffers to register.

        The seam hands an engine its buffers and nothing else.
        """
        return [(<uintptr_t>self.stage, sizeof(CStage))]

    def follow(self, uint64_t stream):
        """Copies that are started from now on come after all that ``stream`` (a CUstream of the
        same device, 0: the default one) was given so far. Returns at once; False where the driver
        refused."""
        cdef CStage *stage = self.stage
        cdef void *popped
        cdef int code
        if stage.cuda.push_current(stage.context) != CUDA_SUCCESS:
            return False
        with nogil:
            # A wait takes the event as it is now: it may be recorded again for the next one.
            pthread_mutex_lock(&stage.lock)
            code = stage.cuda.event_record(stage.gate, <void *><uintptr_t>stream)
            if code == CUDA_SUCCESS:
                code = stage.cuda.stream_wait(stage.stream, stage.gate, 0)
            pthread_mutex_unlock(&stage.lock)
        stage.cuda.pop_current(&popped)
        return code == CUDA_SUCCESS

    def land(self, list shares):
        """A `Landing`: ``shares`` are (place in it, bytes, device address), in any order."""
        return Landing(self, shares)

    @property
    def copies(self):
        """Copies that were started."""
        return gds_load(&self.stage.copies)

    @property
    def copied_bytes(self):
        return gds_load(&self.stage.copied_bytes)

    @property
    def cuda_error(self):
        """The last CUresult that was no success; 0: there was none."""
        return self.stage.cuda_error

    def __dealloc__(self):
        if self.stage != NULL:
            release_stage(self.stage)


# No collector: clearing `stage` before __dealloc__ would leave the landing in its table.
@cython.no_gc
@cython.final
cdef class Landing:
    """A range of addresses to read to. End it before the memory behind it goes."""

    cdef CLanding *landing
    cdef Stage stage
    cdef int number

    def __cinit__(self, Stage stage, list shares):
        cdef CLanding *made
        cdef CLanding **grown
        cdef int i, room
        self.number = -1
        self.stage = stage
        made = <CLanding *>calloc(1, sizeof(CLanding))
        if made == NULL:
            raise MemoryError("no memory for a landing")
        self.landing = made
        made.references = 1
        pthread_mutex_init(&made.lock, NULL)
        made.shares = <Share *>calloc(len(shares) + 1, sizeof(Share))
        if made.shares == NULL:
            raise MemoryError(f"no memory for a landing of {len(shares)} shares")
        for start, length, to in sorted(shares):
            if length < 1 or start + length > (<uint64_t>1 << LANDING_SHIFT):
                raise ValueError(f"a share of {length} bytes at {start} fits no landing")
            made.shares[made.count].start = start
            made.shares[made.count].length = length
            made.shares[made.count].to = to
            if made.count and (
                made.shares[made.count - 1].start + made.shares[made.count - 1].length > start
            ):
                raise ValueError(f"two shares of a landing overlap at {start}")
            made.count += 1
        pthread_mutex_lock(&stage.stage.lock)
        for i in range(stage.stage.room):
            if stage.stage.landings[i] == NULL:
                self.number = i
                break
        if self.number < 0 and stage.stage.room < MOST_LANDINGS:
            room = 2 * stage.stage.room + 8
            grown = <CLanding **>realloc(stage.stage.landings, room * sizeof(CLanding *))
            if grown != NULL:
                memset(grown + stage.stage.room, 0, (room - stage.stage.room) * sizeof(void *))
                self.number = stage.stage.room
                stage.stage.landings = grown
                stage.stage.room = room
        if self.number >= 0:
            stage.stage.landings[self.number] = made
        pthread_mutex_unlock(&stage.stage.lock)
        if self.number < 0:
            raise MemoryError("too many landings")

    @property
    def base(self):
        """The address of its first byte: to be handed to the pump, and to nobody else."""
        return (<uint64_t>1 << LANDING_BIT) | (<uint64_t>self.number << LANDING_SHIFT)

    def end(self, double timeout):
        """No copy is started any more; True when none is on its way either."""
        cdef CLanding *landing = self.landing
        cdef int64_t until = monotonic_ns() + <int64_t>(timeout * 1e9)
        cdef timespec pause
        cdef int copying
        with nogil:
            pthread_mutex_lock(&landing.lock)
            landing.dead = 1
            copying = landing.copying
            pthread_mutex_unlock(&landing.lock)
            while copying and monotonic_ns() < until:
                pause.tv_sec = 0
                pause.tv_nsec = COPY_LOOK_NS
                nanosleep(&pause, NULL)
                pthread_mutex_lock(&landing.lock)
                copying = landing.copying
                pthread_mutex_unlock(&landing.lock)
        return not copying

    def __dealloc__(self):
        cdef CStage *stage
        if self.landing == NULL:
            return
        if self.number >= 0:
            stage = self.stage.stage
            pthread_mutex_lock(&stage.lock)
            stage.landings[self.number] = NULL
            pthread_mutex_unlock(&stage.lock)
            pthread_mutex_lock(&self.landing.lock)
            self.landing.dead = 1
            pthread_mutex_unlock(&self.landing.lock)
        release_landing(self.landing)
