# Reads of a private mapping into the page cache: see mapped.pyx.

from libc.stdint cimport int64_t

from gdsload._native.engine cimport Read
from gdsload._native.first_touch cimport FirstTouch

cdef enum:
    # CPU time of 512 small folios: 0.6 to 0.9 ms where it was measured. It does not depend on the
    # state of memory, because the kernel takes small pages from blocks that were in use before.
    SMALL_FOLIOS_NS = 800000

cdef int64_t read_mapped(FirstTouch *self, const Read *read, int64_t cancels) noexcept nogil
