# Libraries that are opened at run time: one, and a table of its functions. A module that cimports
# this also imports os, which the functions use.

import os

from posix.dlfcn cimport RTLD_LOCAL, RTLD_NOW, dlerror, dlopen, dlsym

cdef extern from "<dlfcn.h>" nogil:
    enum: RTLD_NODELETE


cdef inline void *open_library(str path) except NULL:
    """Opens it for good: libcuda and libcufile start threads and exit handlers, which would crash
    when their code is unmapped. Raises OSError."""
    cdef void *library
    encoded = os.fsencode(path)
    library = dlopen(encoded, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE)
    if library == NULL:
        raise OSError(dlerror().decode(errors="replace"))
    return library


cdef inline frozenset fill_table(void *library, void **table, tuple names):
    """Writes the functions of these names to a table, NULL for those that are missing. Returns the
    names found. "new|old" stands for a function that has had two names."""
    cdef int i
    found = set()
    for i, name in enumerate(names):
        table[i] = NULL
        for alias in name.split("|"):
            symbol = alias.encode()
            if table[i] == NULL:
                table[i] = dlsym(library, symbol)
        if table[i] != NULL:
            found.add(name.partition("|")[0])
    return frozenset(found)
