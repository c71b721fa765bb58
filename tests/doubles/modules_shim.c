/* Gives libcufile a /proc/modules on a machine without one: it would never stop looking for it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static const char *place(const char *path)
{
    const char *other = getenv("STANDIN_MODULES");
    return other && path && !strcmp(path, "/proc/modules") ? other : path;
}
#define OPEN(name) int name(const char *path, int flags, ...) { va_list more; va_start(more, flags); \
    int mode = va_arg(more, int); va_end(more); \
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, #name); return real(place(path), flags, mode); }
#define FOPEN(name) FILE *name(const char *path, const char *how) { \
    FILE *(*real)(const char *, const char *) = dlsym(RTLD_NEXT, #name); return real(place(path), how); }
OPEN(open) OPEN(open64) FOPEN(fopen) FOPEN(fopen64)
