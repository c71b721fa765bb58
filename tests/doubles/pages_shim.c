/* A kernel with pages of 64 KiB, as some arm64 machines have, on one with smaller pages.
 *
 * Preloaded, it answers sysconf() with that size, and applies the rules of such a kernel to the
 * calls that work on pages: addresses and offsets must be multiples of a page, lengths are rounded
 * up to one, and what is counted or written to a vector is counted by such pages. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_cachestat
#define SYS_cachestat 451
#endif
#define EXPORT __attribute__((visibility("default")))
#define PAGE 65536UL
#define UP(length) (((length) + PAGE - 1) & ~(PAGE - 1))

struct cachestat { uint64_t cached, dirty, writeback, evicted, recently_evicted; };

static long small_page(void)
{
    long (*real)(int) = dlsym(RTLD_NEXT, "sysconf");
    return real(_SC_PAGESIZE);
}

EXPORT long sysconf(int name)
{
    long (*real)(int) = dlsym(RTLD_NEXT, "sysconf");
    return name == _SC_PAGESIZE ? (long)PAGE : real(name);
}

EXPORT int madvise(void *address, size_t length, int advice)
{
    int (*real)(void *, size_t, int) = dlsym(RTLD_NEXT, "madvise");
    if ((uintptr_t)address % PAGE) {
        errno = EINVAL;
        return -1;
    }
    return real(address, UP(length), advice);
}

EXPORT int mincore(void *address, size_t length, unsigned char *vec)
{
    size_t each = PAGE / small_page(), pages = UP(length) / PAGE;
    unsigned char *small = malloc(pages * each);
    if ((uintptr_t)address % PAGE) {
        free(small);
        errno = EINVAL;
        return -1;
    }
    int (*real)(void *, size_t, unsigned char *) = dlsym(RTLD_NEXT, "mincore");
    size_t known = (length + small_page() - 1) / small_page();
    int failed = real(address, length, small);
    for (size_t i = 0; !failed && i < pages; i++) {
        vec[i] = 1;
        for (size_t j = i * each; j < (i + 1) * each && j < known; j++)
            vec[i] &= small[j];
    }
    free(small);
    return failed;
}

EXPORT void *mmap(void *address, size_t length, int protection, int flags, int fd, off_t offset)
{
    void *(*real)(void *, size_t, int, int, int, off_t) = dlsym(RTLD_NEXT, "mmap");
    if (offset % PAGE) {
        errno = EINVAL;
        return MAP_FAILED;
    }
    if (address)
        return real(address, length, protection, flags, fd, offset);
    /* What is left over at the ends stays reserved. */
    char *room = real(NULL, UP(length) + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED)
        return MAP_FAILED;
    return real((void *)UP((uintptr_t)room), length, protection, flags | MAP_FIXED, fd, offset);
}

EXPORT void *mmap64(void *address, size_t length, int protection, int flags, int fd, off_t offset)
{
    return mmap(address, length, protection, flags, fd, offset);
}

EXPORT long syscall(long number, ...)
{
    long (*real)(long, ...) = dlsym(RTLD_NEXT, "syscall");
    va_list more;
    va_start(more, number);
    long a[6];
    for (int i = 0; i < 6; i++)
        a[i] = va_arg(more, long);
    va_end(more);
    long answer = real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    if (number == SYS_cachestat && answer == 0) {
        struct cachestat *found = (struct cachestat *)a[2];
        size_t each = PAGE / small_page();
        found->cached = (found->cached + each - 1) / each;
    }
    return answer;
}
