# What the staging road is made of: slots that are registered once, the places their bytes go on to,
# and the engine that ties the two together. See stage.pyx.

from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free

from gdsload._native.atomics cimport gds_add
from gdsload._native.cuda cimport CudaApi
from gdsload._native.engine cimport Buffer, EngineOps
from gdsload._native.pthreads cimport pthread_mutex_destroy, pthread_mutex_t

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
    # An engine's answer -LOST - errno: the read failed, and may still write to its slot.
    LOST = 1048576

cdef struct CStage:
    int64_t references
    CudaApi *cuda
    void *context
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
