# What the staging road is made of: slots that are registered once, the places their bytes go on to,
# and the stage that ties the two together. slots.pyx makes rings, stage.pyx stages and
# landings, stager.pyx is the engine that runs them.

from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free
from posix.unistd cimport getpid

from gdsload._native.atomics cimport gds_add
from gdsload._native.cuda cimport CUDA_SUCCESS, CudaApi, enter_context, leave_context
from gdsload._native.engine cimport Buffer, EngineOps
from gdsload._native.pthreads cimport (
    pthread_mutex_destroy,
    pthread_mutex_lock,
    pthread_mutex_t,
    pthread_mutex_unlock,
)

cdef struct CRing:
    int64_t references
    pthread_mutex_t lock
    char *base
    uint64_t slot_bytes
    int count
    int *idle               # numbers of the slots that nobody has
    int idle_count
    int lost                # slots that something may still be written to, and never were given back

# Some bytes of a landing, and the device memory that they are for.
cdef struct Share:
    uint64_t start
    uint64_t length
    uint64_t to

# A range of addresses that stands for device memory: what is read "to" it is copied on.
cdef struct CLanding:
    int64_t references
    pthread_mutex_t lock
    Share *shares           # sorted by start
    int count
    int dead                # nothing may be copied any more
    int copying             # copies whose end has not been seen

cdef enum:
    # Bits of a landing's address: one that is set in no real pointer, the landing's number, and
    # the place in it.
    LANDING_BIT = 62
    LANDING_SHIFT = 44
    MOST_LANDINGS = 262144

cdef enum:
    # How long to look away while a copy is on its way, at least, and the bytes that are not copied
    # sooner: a slot of 4 MiB takes some 80 us at 55 GB/s, and costs nothing while it waits to be
    # noticed.
    COPY_LOOK_NS = 20000
    COPIED_IN_A_LOOK = 4194304

cdef enum:
    # An engine's answer -LOST - errno: the read failed, and may still write to its slot.
    LOST = 1048576

cdef struct CStage:
    int64_t references
    CudaApi *cuda
    void *context           # a share of the primary one: what is in it must not go before us
    int device
    int pid
    void *stream
    void *gate              # an event of other streams that ours waits for
    CRing *ring
    EngineOps *ops          # the engine that reads into the slots
    Buffer buffers[2]       # what it is opened with
    int buffer_count
    pthread_mutex_t lock
    CLanding **landings
    int room
    int64_t copies
    int64_t copied_bytes
    int cuda_error          # the last CUresult that was no success

cdef inline void release_ring(CRing *ring) noexcept nogil:
    if gds_add(&ring.references, -1) > 0:
        return
    pthread_mutex_destroy(&ring.lock)
    free(ring.idle)
    free(ring)

cdef inline void release_landing(CLanding *landing) noexcept nogil:
    if gds_add(&landing.references, -1) > 0:
        return
    pthread_mutex_destroy(&landing.lock)
    free(landing.shares)
    free(landing)

cdef inline int borrow(CRing *ring) noexcept nogil:
    """The number of a slot that nobody has, or -1."""
    cdef int number = -1
    pthread_mutex_lock(&ring.lock)
    if ring.idle_count > 0:
        ring.idle_count -= 1
        number = ring.idle[ring.idle_count]
    pthread_mutex_unlock(&ring.lock)
    return number

cdef inline void give_back(CRing *ring, int number) noexcept nogil:
    pthread_mutex_lock(&ring.lock)
    ring.idle[ring.idle_count] = number
    ring.idle_count += 1
    pthread_mutex_unlock(&ring.lock)

cdef inline void lose(CRing *ring) noexcept nogil:
    pthread_mutex_lock(&ring.lock)
    ring.lost += 1
    pthread_mutex_unlock(&ring.lock)

cdef inline int all_lost(CRing *ring) noexcept nogil:
    """Whether no slot is left that could ever be lent."""
    cdef int lost
    pthread_mutex_lock(&ring.lock)
    lost = ring.lost == ring.count
    pthread_mutex_unlock(&ring.lock)
    return lost

cdef inline CLanding *landing_of(CStage *stage, char *address) noexcept nogil:
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

cdef inline int first_share(CLanding *landing, uint64_t place) noexcept nogil:
    """The first share that ends after ``place``."""
    cdef int low = 0, high = landing.count, middle
    while low < high:
        middle = (low + high) // 2
        if landing.shares[middle].start + landing.shares[middle].length > place:
            high = middle
        else:
            low = middle + 1
    return low

cdef inline int copy_on(
    CStage *stage, CLanding *landing, char *source, uint64_t place, uint64_t length
) noexcept nogil:
    """Starts the copies of ``length`` bytes that arrived for ``place``: how many, or a negative
    CUresult.

    One copy for each share: whoever makes the landing joins what lies side by side on the device.
    """
    cdef Share *share
    cdef uint64_t end = place + length
    cdef uint64_t start, stop, nbytes = 0
    cdef int i = first_share(landing, place)
    cdef int made = 0, code = CUDA_SUCCESS
    while i < landing.count:
        share = &landing.shares[i]
        if share.start >= end:
            break
        start = share.start if share.start > place else place
        stop = share.start + share.length
        if stop > end:
            stop = end
        code = stage.cuda.copy_async(
            share.to + (start - share.start), <uint64_t>(source + (start - place)),
            stop - start, stage.stream,
        )
        if code != CUDA_SUCCESS:
            break
        nbytes += stop - start
        made += 1
        i += 1
    gds_add(&stage.copies, made)
    gds_add(&stage.copied_bytes, <int64_t>nbytes)
    return made if code == CUDA_SUCCESS else -code

cdef inline void release_stage(CStage *stage) noexcept nogil:
    cdef int mode
    if gds_add(&stage.references, -1) > 0:
        return
    # What a fork has copied is the parent's, and so is its driver.
    if stage.context != NULL and stage.pid == getpid():
        if stage.stream != NULL and (
            enter_context(stage.cuda, stage.context, &mode) == CUDA_SUCCESS
        ):
            if stage.gate != NULL:
                stage.cuda.event_destroy(stage.gate)
            stage.cuda.stream_destroy(stage.stream)
            leave_context(stage.cuda, mode)
        stage.cuda.primary_release(stage.device)
    release_ring(stage.ring)
    pthread_mutex_destroy(&stage.lock)
    free(stage.landings)
    free(stage)
