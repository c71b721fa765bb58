# Which pages take less CPU time for a unit of 2 MiB: one huge page, or small ones. What they cost
# depends on the machine, and changes within a load, so it is measured all the time. The caller holds
# a lock.

from libc.stdint cimport int64_t

cdef enum:
    AUTO = 0
    HUGE = 1
    SMALL = 2
    BOUNCE = 3                   # small, by way of a bounce buffer

    # Small pages never cost less, on any machine that was measured.
    CHEAP_NS = 250000
    # Counts as the time of a huge page that the kernel did not have: dearer than small pages.
    NO_HUGE_PAGE_NS = 10000000
    # Units between two tries of the dearer kind, because costs change: 128 MiB to 1 GiB. Doubled as
    # long as the other kind stays cheaper and the dearer one as dear. Where a hypervisor must find
    # the memory, a try takes as long as 20 units of small pages, and the disk waits for it.
    FIRST_RETRY_UNITS = 64
    LAST_RETRY_UNITS = 512
    # A unit counts at most this, or twice the mean of the other kind.
    MOST_NS = 1000000

# Zeroed memory, but for `mode`, is a choice of which nothing is known yet.
cdef struct PageChoice:
    int mode                     # one of the four above
    int64_t huge_ns              # mean CPU time of a unit as a huge page; 0: none
    int64_t small_ns             # mean CPU time of a unit as small pages; 0: none
    int huge_preferred           # whether huge pages were cheaper at the last choice
    int units_until_retry
    int retry_units              # 0: nothing was compared yet


cdef inline int huge_is_cheap(const PageChoice *self) noexcept nogil:
    """Whether huge pages were tried, and cost so little that no others can be cheaper."""
    return 0 < self.huge_ns <= CHEAP_NS


cdef inline int choose_huge(PageChoice *self, int units) noexcept nogil:
    """Whether huge pages are for the next units. `units`: how many these are, if they are small.

    Until it is known what a huge page costs, only the first caller tries them, and another one
    after FIRST_RETRY_UNITS: if they are dear, few are in flight.
    """
    cdef int huge
    if self.mode != AUTO:
        return self.mode == HUGE
    if huge_is_cheap(self):
        return 1
    if self.huge_ns != 0 and self.small_ns == 0:
        return 0
    huge = 0 < self.huge_ns <= self.small_ns
    if huge != self.huge_preferred:
        self.huge_preferred = huge
        self.units_until_retry = self.retry_units = FIRST_RETRY_UNITS
    if self.units_until_retry > 0:
        self.units_until_retry -= 1 if huge else units
        return huge
    self.retry_units = min(2 * self.retry_units, <int>LAST_RETRY_UNITS) or <int>FIRST_RETRY_UNITS
    self.units_until_retry = self.retry_units
    return not huge


cdef inline void unit_took(PageChoice *self, int huge, int64_t took) noexcept nogil:
    """Adds the CPU time of a unit to the mean of its kind, to which it counts a quarter.

    Costs come in runs, and single units are exceptions. So what a unit counts is limited: about three
    of them in a row change the choice. If one of the dearer kind takes less than half of the mean, the
    next one follows at once.
    """
    cdef int64_t *mean = &self.huge_ns if huge else &self.small_ns
    cdef int64_t other = self.small_ns if huge else self.huge_ns
    cdef int64_t most
    took = max(took, <int64_t>1)  # some sandboxes count in ticks
    most = max(2 * other, <int64_t>MOST_NS) if other else took
    if took < mean[0] // 2 and huge != self.huge_preferred:
        self.units_until_retry = self.retry_units = 0
    took = min(took, most)
    mean[0] = (3 * min(mean[0], most) + took) // 4 if mean[0] else took
