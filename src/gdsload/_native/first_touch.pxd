# Reads into memory that nothing has touched yet: see first_touch.pyx.

from libc.stdint cimport int64_t, uint64_t

from gdsload._native.engine cimport FreshMemory, Read
from gdsload._native.page_choice cimport PageChoice
from gdsload._native.pthreads cimport pthread_cond_t, pthread_mutex_t

# Shared by the threads of one engine, or of one `Copier`.
cdef struct FirstTouch:
    pthread_mutex_t lock
    pthread_cond_t touched # a thread has touched a huge page
    PageChoice choice
    int touching           # threads that touch a huge page now
    int64_t cancels        # number of cancellations: a read stops at its next unit

# One thread's bounce buffer.
cdef struct Bounce:
    char *mapping          # NULL: none yet
    char *buffer

cdef void open_first_touch(FirstTouch *self, int mode) noexcept nogil
cdef void close_first_touch(FirstTouch *self) noexcept nogil
cdef int64_t read_first_touch(
    FirstTouch *self, Bounce *bounce, const Read *read, int64_t cancels
) noexcept nogil
cdef void touch_before(
    FirstTouch *self, const Read *read, uint64_t at, uint64_t length
) noexcept nogil
cdef int touch_huge(FirstTouch *self, FreshMemory *memory, uint64_t unit) noexcept nogil
cdef int64_t touch_pages(char *address, uint64_t length) noexcept nogil
cdef void note_small(FreshMemory *memory, uint64_t unit) noexcept nogil
cdef void small_took(FirstTouch *self, int64_t took) noexcept nogil
cdef void free_bounce(Bounce *self) noexcept nogil
