# What the pump needs to know of a populator: how to tell it that reads have moved on.

from libc.stdint cimport int64_t, uint64_t

from gdsload._native.pthreads cimport (
    pthread_cond_broadcast,
    pthread_cond_t,
    pthread_mutex_lock,
    pthread_mutex_t,
    pthread_mutex_unlock,
    pthread_t,
)
from gdsload._native.region cimport CRegion

cdef struct Range:
    CRegion *region
    uint64_t start       # bytes, the end excluded
    uint64_t end
    uint64_t first       # units, both ends included
    uint64_t last

cdef struct CPopulator:
    pthread_mutex_t lock
    pthread_cond_t room      # the reads moved on, or it is time to stop
    Range *ranges
    int count
    int range                # the next unit to populate: its range and number
    uint64_t unit
    int64_t ahead            # bytes populated that no read was submitted for yet
    int64_t most_ahead
    int stopping
    int gentle               # so many threads, which leave the address space to others; 0: all
    int started              # threads that have a number
    int huge_pages           # whether huge pages may be tried at all
    int64_t huge_ns          # what a unit costs as a huge page, and as small ones; 0: not known
    int64_t small_ns
    int retry_units
    int until_retry
    int64_t huge_units
    int64_t small_units
    int64_t busy_ns
    int threads
    pthread_t thread[8]

cdef inline void populator_advance(CPopulator *self, uint64_t nbytes) noexcept nogil:
    pthread_mutex_lock(&self.lock)
    self.ahead -= <int64_t>nbytes
    pthread_cond_broadcast(&self.room)
    pthread_mutex_unlock(&self.lock)

cdef inline void populator_starved(CPopulator *self) noexcept nogil:
    """The reads wait for memory and nothing is in flight: the bound on the way ahead is off.

    What was populated but skipped over would otherwise count as ahead for good.
    """
    pthread_mutex_lock(&self.lock)
    if self.ahead > 0:
        self.ahead = 0
        pthread_cond_broadcast(&self.room)
    pthread_mutex_unlock(&self.lock)

cdef inline void populator_stop(CPopulator *self) noexcept nogil:
    pthread_mutex_lock(&self.lock)
    self.stopping = 1
    pthread_cond_broadcast(&self.room)
    pthread_mutex_unlock(&self.lock)
