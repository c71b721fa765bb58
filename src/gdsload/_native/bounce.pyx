"""An engine that reads through another engine into a few huge pages, and copies from there, if that
is faster than reading in place.

A direct read into small pages is a list of a thousand segments. The host of a virtual disk maps each
of them, which takes longer than the transfer, and reads twice as fast into one segment. A physical
disk gathers them itself, and the copy is wasted. So both ways are measured during the load, in runs
of reads, and the slower way is tried again from time to time.

    pump ─► bounce ─► engine ─► slot ─► copied by the pump's own thread ─► pump
                  └─► engine ─► in place

    run of reads:  │ warm-up: 64 MiB arrive │ measured: 128 MiB arrive │ next run, either way
"""

cimport cython
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.errno cimport ENOMEM
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy
from posix.mman cimport MADV_HUGEPAGE, madvise

from gdsload._native.atomics cimport gds_add, gds_load, gds_store
from gdsload._native.engine cimport (
    BATCH, DIRECT, Buffer, Completion, EngineOps, Read, engine_capsule,
)
from gdsload._native.memory cimport CRegion, release_region, retain_region
from gdsload._native.pthreads cimport monotonic_ns

cdef enum:
    MOST_SLOTS = 16
    # Reads of the previous run arrive during the warm-up, and the slots are touched for the first
    # time. 128 MiB take 60 ms on a fast disk: long compared with the overlap of two runs.
    WARM_UP_BYTES = 67108864
    RUN_BYTES = 201326592
    MOST_UNDECIDED_RUNS = 8    # if both ways are not measured by then, reads go in place
    # Runs between two tries of the slower way; doubled each time it is still slower.
    FIRST_RETRY_RUNS = 5
    LAST_RETRY_RUNS = 85
    # The first of them if an earlier load has chosen: a stale 'in place' costs more.
    RETRY_IN_PLACE_RUNS = 3
    RETRY_BOUNCED_RUNS = 21
    PAUSE_NS = 50000000        # without reads: the consumer's time, not the storage's
    WORTH_PERCENT = 110        # a copy costs processor time: bounced reads must be this much faster

cdef enum:
    IN_PLACE = 0
    BOUNCED = 1

cdef struct CBounce:
    int64_t references         # the Python object and the engine
    EngineOps *ops             # of the engine that reads
    CRegion *region            # of the slots; NULL until it is armed
    uint64_t slot_bytes
    int slots
    int first_way              # chosen by an earlier load; -1: none
    int only                   # the way of all reads, without measuring; -1: measure
    int64_t armed
    int64_t copied_bytes
    # Bytes and time of the measured runs by way, each run weighing twice the one before. Written by
    # the pump's thread.
    int64_t bytes[2]
    int64_t ns[2]

cdef struct Entry:             # one read that the engine has
    uint64_t cookie            # of the pump
    char *address              # destination of the bytes
    int slot                   # -1: in place
    int run                    # index in `runs`; -1: not measured
    int next_idle

cdef struct Run:
    int way
    int in_flight
    int failed                 # a read failed, or the load paused
    uint64_t submitted         # bytes
    uint64_t arrived
    uint64_t foreign           # bytes of the other run that arrived while this one was measured
    uint64_t warm              # bytes that had arrived at the end of the warm-up
    int64_t warm_ns            # when that was; 0: not yet

cdef struct Runner:
    CBounce *bounce
    void *engine
    Entry *entries             # `depth` of them
    int idle
    int slots[MOST_SLOTS]      # stack of the free ones
    int free_slots             # -1: not armed yet
    int in_flight              # entries in use
    Completion done[BATCH]     # reaped from the engine, and not yet returned
    int first
    int count
    Run runs[2]
    int run                    # the current run: reads are added to it
    int begun                  # number of runs
    int best                   # the chosen way; -1: none yet
    int retry                  # runs between two tries
    int until_retry
    int64_t idle_since         # when the last read in flight arrived


cdef void release_bounce(CBounce *self) noexcept nogil:
    if gds_add(&self.references, -1) > 0:
        return
    if self.region != NULL:
        release_region(self.region)
    free(self)


cdef double rate(CBounce *bounce, int way) noexcept nogil:
    """Bytes per second; 0: not measured."""
    return <double>bounce.bytes[way] * 1e9 / <double>bounce.ns[way] if bounce.ns[way] else 0.0


cdef int better(Runner *self) noexcept nogil:
    """The faster way. If one was not measured, the choice stays as it is."""
    cdef double in_place = rate(self.bounce, IN_PLACE), bounced = rate(self.bounce, BOUNCED)
    if in_place == 0 or bounced == 0:
        return self.best
    if self.best == BOUNCED:
        return IN_PLACE if in_place > bounced else BOUNCED
    return BOUNCED if bounced * 100 > in_place * WORTH_PERCENT else IN_PLACE


cdef int next_way(Runner *self) noexcept nogil:
    """The way of the run that begins."""
    if self.bounce.only >= 0:
        return self.bounce.only
    self.best = better(self)
    if self.best < 0:
        return 1 - self.runs[self.run].way if self.begun < MOST_UNDECIDED_RUNS else IN_PLACE
    self.until_retry -= 1
    if self.until_retry > 0:
        return self.best
    self.retry = min(2 * self.retry, <int>LAST_RETRY_RUNS)
    self.until_retry = self.retry
    return 1 - self.best


cdef void begin_run(Runner *self, int way) noexcept nogil:
    self.run = 1 - self.run
    self.runs[self.run] = Run(way, 0, 0, 0, 0, 0, 0, 0)
    self.begun += 1


cdef void end_run(Runner *self, Run *run) noexcept nogil:
    """All reads of a run have arrived: counts what arrived since its warm-up."""
    cdef CBounce *bounce = self.bounce
    cdef uint64_t own = run.arrived - run.warm
    if run.failed or run.warm_ns == 0 or 8 * run.foreign > own:
        return
    bounce.bytes[run.way] = bounce.bytes[run.way] // 2 + <int64_t>own
    bounce.ns[run.way] = bounce.ns[run.way] // 2 + max(monotonic_ns() - run.warm_ns, <int64_t>1)


cdef void arm(Runner *self) noexcept nogil:
    """The slots exist, seen for the first time."""
    cdef CBounce *bounce = self.bounce
    cdef int i
    for i in range(bounce.slots):
        self.slots[i] = i
    self.free_slots = bounce.slots
    self.best = bounce.first_way
    self.retry = FIRST_RETRY_RUNS
    if self.best >= 0:
        self.retry = RETRY_BOUNCED_RUNS if self.best == BOUNCED else RETRY_IN_PLACE_RUNS
    self.until_retry = self.retry
    begin_run(self, bounce.only if bounce.only >= 0 else self.best if self.best >= 0 else BOUNCED)


cdef int open_bounce(
    void **engine, void *context, int depth, const Buffer *buffers, int count, int *fixed
) noexcept nogil:
    cdef CBounce *bounce = <CBounce *>context
    cdef Runner *self = <Runner *>calloc(1, sizeof(Runner))
    cdef int i, error = -ENOMEM
    if self == NULL:
        return error
    self.entries = <Entry *>calloc(depth, sizeof(Entry))
    if self.entries != NULL:
        error = bounce.ops.open(&self.engine, NULL, depth, buffers, count, fixed)
    if error != 0:
        free(self.entries)
        free(self)
        return error
    for i in range(depth):
        self.entries[i].next_idle = i + 1 if i + 1 < depth else -1
    self.free_slots = -1
    self.bounce = bounce
    gds_add(&bounce.references, 1)
    engine[0] = self
    return 0


cdef int run_of(Runner *self, const Read *read) noexcept nogil:
    """Index of the run that a read belongs to; -1: it cannot be bounced."""
    cdef Run *run = &self.runs[self.run]
    if self.free_slots < 0 or read.io_mode != DIRECT or read.length > self.bounce.slot_bytes:
        return -1
    if run.submitted >= RUN_BYTES and self.runs[1 - self.run].in_flight == 0:
        begin_run(self, next_way(self))
    elif run.warm_ns and self.in_flight == 0 and monotonic_ns() - self.idle_since > PAUSE_NS:
        run.failed = 1         # it would measure the pause
    return self.run


cdef int submit_bounce(void *engine, const Read *reads, int count) noexcept nogil:
    cdef Runner *self = <Runner *>engine
    cdef CBounce *bounce = self.bounce
    cdef Read batch[BATCH]
    cdef Entry *entry
    cdef Run *run
    cdef int made = 0, accepted, i
    if self.free_slots < 0 and gds_load(&bounce.armed):
        arm(self)
    while made < count and made < BATCH and self.idle >= 0:
        entry = &self.entries[self.idle]
        entry.run = run_of(self, &reads[made])
        run = &self.runs[entry.run] if entry.run >= 0 else NULL
        if run != NULL and run.way == BOUNCED and self.free_slots == 0:
            break              # the next copy makes room
        self.idle = entry.next_idle
        self.in_flight += 1
        entry.cookie = reads[made].cookie
        entry.address = reads[made].address
        entry.slot = -1
        batch[made] = reads[made]
        batch[made].cookie = <uint64_t>(entry - self.entries)
        if run != NULL:
            run.in_flight += 1
            run.submitted += reads[made].length
            if run.way == BOUNCED:
                self.free_slots -= 1
                entry.slot = self.slots[self.free_slots]
                batch[made].address = bounce.region.base + entry.slot * bounce.slot_bytes
                batch[made].buffer = -1
        made += 1
    if made == 0:
        return 0
    accepted = bounce.ops.submit(self.engine, batch, made)
    for i in range(made - 1, max(accepted, 0) - 1, -1):  # the pump submits these again
        entry = &self.entries[batch[i].cookie]
        if entry.run >= 0:
            self.runs[entry.run].submitted -= batch[i].length
        vacate(self, entry)
    return accepted


cdef void vacate(Runner *self, Entry *entry) noexcept nogil:
    """Makes an entry and its slot free for the next read."""
    if entry.slot >= 0:
        self.slots[self.free_slots] = entry.slot
        self.free_slots += 1
    if entry.run >= 0:
        self.runs[entry.run].in_flight -= 1
    entry.next_idle = self.idle
    self.idle = <int>(entry - self.entries)
    self.in_flight -= 1
    if self.in_flight == 0:
        self.idle_since = monotonic_ns()


cdef void end_read(Runner *self, Entry *entry, int64_t result) noexcept nogil:
    """Copies the bytes of a bounced read to their destination, and counts them for its run."""
    cdef CBounce *bounce = self.bounce
    cdef Run *run
    if entry.slot >= 0 and result > 0:
        memcpy(
            entry.address,
            bounce.region.base + entry.slot * bounce.slot_bytes,
            min(<uint64_t>result, bounce.slot_bytes),
        )
        gds_add(&bounce.copied_bytes, result)
    vacate(self, entry)
    if entry.run < 0:
        return
    run = &self.runs[entry.run]
    if result <= 0:
        run.failed = 1
        return
    run.arrived += <uint64_t>result
    if self.runs[1 - entry.run].warm_ns:
        self.runs[1 - entry.run].foreign += <uint64_t>result
    if run.warm_ns == 0 and run.arrived >= WARM_UP_BYTES:
        run.warm_ns, run.warm = monotonic_ns(), run.arrived
    if run.submitted >= RUN_BYTES and run.in_flight == 0:
        end_run(self, run)


cdef int reap_bounce(
    void *engine, Completion *out, int room, int wanted, int64_t wait_ns
) noexcept nogil:
    cdef Runner *self = <Runner *>engine
    cdef Entry *entry
    cdef int taken = 0, copied = 0, seen
    if self.count == 0:
        # While a slot waits for its copy, nothing is read into it.
        if self.free_slots >= 0 and self.free_slots < self.bounce.slots:
            wanted = 1
        seen = self.bounce.ops.reap(self.engine, self.done, BATCH, wanted, wait_ns)
        if seen < 0:
            return seen
        self.first, self.count = 0, seen
    # One copy at a time, so that the pump can submit a read into the slot before the next copy.
    while taken < room and self.count > 0 and not copied:
        entry = &self.entries[self.done[self.first].cookie]
        copied = entry.slot >= 0
        out[taken].cookie = entry.cookie
        out[taken].result = self.done[self.first].result
        end_read(self, entry, out[taken].result)
        self.first += 1
        self.count -= 1
        taken += 1
    return taken


cdef void cancel_bounce(void *engine) noexcept nogil:
    cdef Runner *self = <Runner *>engine
    self.bounce.ops.cancel(self.engine)


cdef void close_bounce(void *engine) noexcept nogil:
    cdef Runner *self = <Runner *>engine
    self.bounce.ops.close(self.engine)
    release_bounce(self.bounce)
    free(self.entries)
    free(self)


cdef EngineOps OPS = EngineOps(open_bounce, submit_bounce, reap_bounce, cancel_bounce, close_bounce)


@cython.final
cdef class Bounce:
    """Bounce buffers for the direct reads of one pump into host memory."""

    cdef CBounce *bounce
    cdef object engine         # owner of `ops`

    def __cinit__(self, object engine):
        """``engine``: the capsule of the engine that reads. Reads go in place until `arm`."""
        self.engine = engine
        self.bounce = <CBounce *>calloc(1, sizeof(CBounce))
        if self.bounce == NULL:
            raise MemoryError("no memory for a bounce")
        self.bounce.references = 1
        self.bounce.first_way = self.bounce.only = -1
        self.bounce.ops = <EngineOps *>PyCapsule_GetPointer(engine, b"gdsload.engine")

    def capsule(self):
        """This engine, as a capsule for the pump."""
        return engine_capsule(&OPS, self.bounce)

    def arm(self, object region, uint64_t slot_bytes, int slots, int first_way=-1, int only=-1):
        """Lets reads go through ``slots`` slots of ``slot_bytes`` bytes at the start of a region,
        given by its handle. ``first_way``: 1 (bounced) or 0 (in place), as an earlier load chose;
        -1: unknown. ``only``: the same, for all reads and without measuring. Idempotent."""
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
        """(in place, bounced) in bytes per second, as measured; 0: not measured. Only after the pump
        has ended: there is no lock."""
        return int(rate(self.bounce, IN_PLACE)), int(rate(self.bounce, BOUNCED))

    def __dealloc__(self):
        if self.bounce != NULL:
            release_bounce(self.bounce)
