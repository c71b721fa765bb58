# Reads of a private mapping into the page cache: see mapped.pyx.

from libc.stdint cimport int64_t

from gdsload._native.engine cimport Read
from gdsload._native.page_choice cimport PageChoice
from gdsload._native.pthreads cimport pthread_mutex_t

# Which folios the threads of one engine ask for.
cdef struct Folios:
    pthread_mutex_t lock
    PageChoice choice

cdef void open_folios(Folios *self, int mode) noexcept nogil
cdef void close_folios(Folios *self) noexcept nogil
cdef int64_t read_mapped(
    Folios *folios, const Read *read, int64_t *cancelled, int64_t cancels
) noexcept nogil
