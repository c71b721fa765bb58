# Libraries that are opened at run time: one, and a table of its functions. Whoever cimports this also
# imports os, which it uses.

import os

cdef extern from "<dlfcn.h>" nogil:
    enum:
        RTLD_NOW
        RTLD_LOCAL
        RTLD_NODELETE
    void *dlopen(const char *path, int flags)
    void *dlsym(void *library, const char *name)
    char *dlerror()


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
    """Puts the functions of these names into a table, NULL for those that are missing: the names
    of those that were found. "new|old" stands for a function that has had two names."""
    cdef int place = 0
    found = set()
    for name in names:
        table[place] = NULL
        for each in name.split("|"):
            symbol = each.encode()
            if table[place] == NULL:
                table[place] = dlsym(library, symbol)
        if table[place] != NULL:
            found.add(name.partition("|")[0])
        place += 1
    return frozenset(found)
