# Reads of a private mapping into the page cache: see mapped.pyx.

from libc.stdint cimport int64_t

from gdsload._native.engine cimport Read

cdef int64_t read_mapped(const Read *read, int64_t *cancelled, int64_t cancels) noexcept nogil
