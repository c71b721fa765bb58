"""The staging road's two ends: a `Stage` is an engine for the pump that reads through another engine
(stager.pyx) by way of a ring of slots; a `Landing` is a range of addresses that stands for device
memory: which of its bytes go where.
"""

cimport cython
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, realloc
from libc.string cimport memset
from posix.time cimport timespec
from posix.unistd cimport getpid

from gdsload._native import stager

from gdsload._native.atomics cimport gds_add, gds_load
from gdsload._native.cuda cimport (
    CU_EVENT_DISABLE_TIMING,
    CU_STREAM_NON_BLOCKING,
    CUDA_SUCCESS,
    CudaApi,
    enter_context,
    leave_context,
)
from gdsload._native.engine cimport EngineOps
from gdsload._native.pthreads cimport (
    monotonic_ns,
    pthread_mutex_init,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from gdsload._native.stage cimport (
    COPY_LOOK_NS,
    LANDING_BIT,
    LANDING_SHIFT,
    MOST_LANDINGS,
    CLanding,
    CRing,
    CStage,
    Share,
    release_landing,
    release_stage,
)

cdef extern from "<time.h>" nogil:
    int nanosleep(const timespec *, timespec *)


@cython.final
cdef class Stage:
    """An engine that reads through another one, by way of a ring, into landings."""

    cdef CStage *stage
    cdef object ring, device, engine, files    # what its pointers point at

    def __cinit__(
        self, object ring, object device, object engine, int register=0, object files=None
    ):
        """``engine``: the capsule of the engine that reads into the slots. ``register``: hand it
        the ring to register. ``files``: the table of cuFile handles, for an engine that works
        with one.

        Raises OSError where the device gives no stream.
        """
        cdef CStage *made = <CStage *>calloc(1, sizeof(CStage))
        cdef CRing *slots
        cdef int code, mode
        if made == NULL:
            raise MemoryError("no memory for a stage")
        made.references = 1
        slots = <CRing *>PyCapsule_GetPointer(ring.handle(), b"gdsload.memory.staging_ring")
        made.ring = slots
        gds_add(&slots.references, 1)
        pthread_mutex_init(&made.lock, NULL)
        cuda, _ = device.handles()
        made.cuda = <CudaApi *>PyCapsule_GetPointer(cuda, b"gdsload.cuda")
        made.pid = device.cuda.pid
        self.stage = made
        self.ring, self.device, self.engine, self.files = ring, device, engine, files
        made.ops = <EngineOps *>PyCapsule_GetPointer(engine, b"gdsload.engine")
        if register or files is not None:
            made.buffers[0].address = slots.base
            made.buffers[0].length = slots.slot_bytes * <uint64_t>slots.count
            made.buffer_count = 1
        if files is not None:
            made.buffers[1].address = <char *><uintptr_t>files.address
            made.buffers[1].length = 0
            made.buffer_count = 2
        code = made.cuda.device_get(&made.device, device.ordinal)
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
            raise OSError(5, f"the device gives no stream (CUDA error {code})")

    def capsule(self):
        """The functions of this engine, for the pump."""
        return stager.engine()

    def buffers(self):
        """What the pump has to open it with: itself, in the place of buffers to register."""
        return [(<uintptr_t>self.stage, sizeof(CStage))]

    def follow(self, uint64_t stream):
        """Copies that are started from now on come after all that ``stream`` (a CUstream of the
        same device, 0: the default one) was given so far. Returns at once; False where the driver
        refused."""
        cdef CStage *stage = self.stage
        cdef int code, mode
        if enter_context(stage.cuda, stage.context, &mode) != CUDA_SUCCESS:
            return False
        with nogil:
            # A wait takes the event as it is now: it may be recorded again for the next one.
            pthread_mutex_lock(&stage.lock)
            code = stage.cuda.event_record(stage.gate, <void *><uintptr_t>stream)
            if code == CUDA_SUCCESS:
                code = stage.cuda.stream_wait(stage.stream, stage.gate, 0)
            pthread_mutex_unlock(&stage.lock)
        leave_context(stage.cuda, mode)
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
        # In a child of fork(), a thread of the parent may have held these locks.
        if self.number >= 0 and self.stage.stage.pid == getpid():
            stage = self.stage.stage
            pthread_mutex_lock(&stage.lock)
            stage.landings[self.number] = NULL
            pthread_mutex_unlock(&stage.lock)
            pthread_mutex_lock(&self.landing.lock)
            self.landing.dead = 1
            pthread_mutex_unlock(&self.landing.lock)
        release_landing(self.landing)
