# Traffic of all pumps of the process: who yields to whom, and how fast it may go.
#
# Two classes: loads, which somebody waits for, and what is read ahead. While a load has reads
# under way, in whichever pump, what is read ahead goes on with one read at a time, so that it still
# comes to an end. Each class may be held to a rate, and both together.

from libc.stdint cimport int64_t, uint64_t

from gdsload._native.pthreads cimport (
    pthread_mutex_lock,
    pthread_mutex_t,
    pthread_mutex_unlock,
)

cdef enum:
    # What an idle lane may have saved up: one look of a pump, not a burst.
    SAVED_NS = 1000000

cdef struct Lane:
    int64_t rate         # bytes per second; 0: no limit
    int64_t free_ns      # when the next read may go

cdef struct CTraffic:
    pthread_mutex_t lock
    int64_t loads        # requests of loads under way
    Lane all
    Lane ahead

cdef inline int lane_open(Lane *lane, int64_t now) noexcept nogil:
    return lane.rate <= 0 or now >= lane.free_ns

cdef inline void lane_take(Lane *lane, uint64_t nbytes, int64_t now) noexcept nogil:
    if lane.rate <= 0:
        return
    if lane.free_ns < now - SAVED_NS:
        lane.free_ns = now - SAVED_NS
    lane.free_ns += <int64_t>(<double>nbytes * 1e9 / <double>lane.rate)

cdef inline int traffic_admits(
    CTraffic *self, int ahead, int in_flight, uint64_t nbytes, int64_t now
) noexcept nogil:
    """Whether a read may go now, in a pump that has so many in flight; if so it is counted."""
    cdef int admitted
    pthread_mutex_lock(&self.lock)
    admitted = lane_open(&self.all, now) and not (
        ahead and ((self.loads > 0 and in_flight > 0) or not lane_open(&self.ahead, now))
    )
    if admitted:
        lane_take(&self.all, nbytes, now)
        if ahead:
            lane_take(&self.ahead, nbytes, now)
    pthread_mutex_unlock(&self.lock)
    return admitted

cdef inline void traffic_count(CTraffic *self, int change) noexcept nogil:
    """A load's request has begun, or ended."""
    pthread_mutex_lock(&self.lock)
    self.loads += change
    pthread_mutex_unlock(&self.lock)
