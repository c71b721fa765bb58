/* The yardstick: O_DIRECT reads of whole files into memory, and nothing else: by one thread with a
 * deep ring, or by several threads with pread. And the same with a cast of bfloat16 to float32, from
 * small buffers, or from a mapping of files that are cached.
 *
 * No header is parsed, nothing is planned. The caller (loaders.py) times it by the same clock as the
 * loaders, and sums the bytes in the same way afterwards.
 *
 *     cc -O3 -shared -fPIC -pthread -o bare.so bare.c -luring
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE /* in headers of 2021 and newer */
#define MADV_POPULATE_WRITE 23
#endif

#if defined(IORING_SETUP_SINGLE_ISSUER) && defined(IORING_SETUP_DEFER_TASKRUN)
#define RING_FLAGS (IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN)
#else
#define RING_FLAGS 0
#endif

enum { MAX_FILES = 4096, MAX_THREADS = 64, BLOCK = 4096, STEP = 1 << 16 };

static size_t rounded(size_t size) { return (size + BLOCK - 1) / BLOCK * BLOCK; }

/* Fresh memory of `size` bytes; `huge` asks for huge pages, `backed` touches it. 0 on failure. */
char *bare_memory(size_t size, int huge, int backed)
{
    const size_t whole = 2 << 20;
    char *base = mmap(0, rounded(size) + whole, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED)
        return 0;
    base = (char *)(((size_t)base + whole - 1) / whole * whole);
    madvise(base, rounded(size), huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    if (backed)
        memset(base, 1, rounded(size));
    return base;
}

/* What several threads read together; `next` is the number of the next request. */
struct work {
    const int *fds;
    const size_t *sizes;
    char **bases;
    int count, error, casts, maps;
    size_t request, next;
};

/* Casts to fresh memory, which is touched a little at a time: it stays in the processor's cache. */
static void cast(uint32_t *to, const uint16_t *from, size_t count)
{
    for (size_t done = 0; done < count; done += STEP) {
        size_t left = count - done, step = left < STEP ? left : STEP;
        madvise(to + done, rounded(step * sizeof *to), MADV_POPULATE_WRITE);
        for (size_t i = done; i < done + step; i++)
            to[i] = (uint32_t)from[i] << 16;
    }
}

/* One request: its bytes, or twice as many, which are cast. `buffer` is for a request. */
static int read_request(const struct work *work, int file, size_t offset, size_t length,
                        char *buffer)
{
    char *to = work->bases[file] + offset * (work->casts + 1), *from = work->casts ? buffer : to;
    if (work->maps) {
        from = mmap(0, length, PROT_READ, MAP_SHARED | MAP_POPULATE, work->fds[file], offset);
        if (from == MAP_FAILED)
            return -errno;
    } else {
        ssize_t got = pread(work->fds[file], from, rounded(length), offset);
        if (got != (ssize_t)length)
            return got < 0 ? -errno : -EIO;
    }
    if (work->casts)
        cast((uint32_t *)to, (const uint16_t *)from, length / 2);
    if (work->maps)
        munmap(from, length);
    return 0;
}

/* Reads requests of the files by pread, until none is left. */
static void *read_requests(void *argument)
{
    struct work *work = argument;
    /* A huge page: direct reads into small ones are slow on a virtual disk. Kept until the end. */
    char *buffer = work->casts && !work->maps ? bare_memory(work->request, 1, 1) : 0;
    for (;;) {
        size_t number = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED), many;
        int file = 0;
        for (; file < work->count; file++, number -= many)
            if (number < (many = (work->sizes[file] + work->request - 1) / work->request))
                break;
        if (file == work->count)
            return 0;
        size_t offset = number * work->request, left = work->sizes[file] - offset;
        size_t length = left < work->request ? left : work->request;
        int error = read_request(work, file, offset, length, buffer);
        if (error)
            work->error = error;
    }
}

/* The same files by `threads` threads. 0, or a negative errno. */
static int read_by_threads(struct work *work, int threads)
{
    pthread_t started[MAX_THREADS];
    int number = 0, error = 0;

    for (; number < threads; number++)
        if ((error = pthread_create(&started[number], 0, read_requests, work)))
            break;
    while (number--)
        pthread_join(started[number], 0);
    return error ? -error : work->error;
}

/* Reads `count` files of `sizes` bytes to `bases` by requests of `request` bytes: `depth` in flight
 * in a ring, or, unless `threads` is 0, by that many threads, which may cast: `bases` have twice the
 * bytes then, and `maps` tells to map the files. 0, or a negative errno. */
int bare_read(const char **paths, const size_t *sizes, char **bases, int count, size_t request,
              int depth, int threads, int casts, int maps)
{
    struct io_uring_params params = {.flags = RING_FLAGS};
    struct io_uring ring;
    int fds[MAX_FILES], flight = 0, error, file = 0;
    size_t offset = 0, wanted = 0, got = 0;

    if (count > MAX_FILES || request % BLOCK || threads > MAX_THREADS || (casts && !threads) ||
        (maps && !casts))
        return -EINVAL;
    for (int i = 0; i < count; i++) {
        if ((fds[i] = open(paths[i], O_RDONLY | (maps ? 0 : O_DIRECT) | O_CLOEXEC)) < 0)
            return -errno;
        wanted += sizes[i];
    }
    if (threads) {
        struct work work = {fds, sizes, bases, count, 0, casts, maps, request, 0};
        error = read_by_threads(&work, threads);
        for (int i = 0; i < count; i++)
            close(fds[i]);
        return error;
    }
    if ((error = io_uring_queue_init_params(depth, &ring, &params)) == -EINVAL) {
        params = (struct io_uring_params){.flags = 0}; /* before Linux 6.1 */
        error = io_uring_queue_init_params(depth, &ring, &params);
    }
    if (error)
        return error;
    if ((error = io_uring_register_files(&ring, fds, count)))
        return error;
    while (file < count || flight) {
        while (flight < depth && file < count) {
            struct io_uring_sqe *sqe = io_uring_get_sqe(&ring);
            size_t left = rounded(sizes[file]) - offset;
            size_t length = left < request ? left : request;
            io_uring_prep_read(sqe, file, bases[file] + offset, length, offset);
            sqe->flags |= IOSQE_FIXED_FILE;
            offset += length;
            flight++;
            if (offset >= sizes[file])
                file++, offset = 0;
        }
        if ((error = io_uring_submit_and_wait(&ring, 1)) < 0)
            return error;
        struct io_uring_cqe *cqe;
        unsigned head, seen = 0;
        io_uring_for_each_cqe(&ring, head, cqe) {
            if (cqe->res < 0)
                return cqe->res;
            got += cqe->res;
            seen++;
            flight--;
        }
        io_uring_cq_advance(&ring, seen);
    }
    io_uring_queue_exit(&ring);
    for (int i = 0; i < count; i++)
        close(fds[i]);
    return got == wanted ? 0 : -EIO;
}
