/* An engine that keeps the contract of engine.pxd and reads nothing: what is asked for is there at
 * once, or at a rate, as if a disk that is never idle while it has something to read had read it.
 * What is left of a load is what its pipeline costs.
 *
 * The sleeping is part of the instrument. `instant_bare` does it alone, and says what it takes. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../tests/engine.h"

struct flying { struct completion done; int64_t at; };
struct engine { int depth, count; int64_t last; struct flying *reads; };

static int64_t rate; /* bytes a second; 0: as many as are asked for */

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static int64_t sleeps; /* of all engines, since they were last asked for */

/* Sleeps until `at`, once. */
static void sleep_until(int64_t at)
{
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME,
                    &(struct timespec){ at / 1000000000LL, at % 1000000000LL }, NULL);
    __atomic_add_fetch(&sleeps, 1, __ATOMIC_RELAXED);
}

static int open_engine(
    void **out, void *context, int depth, const struct buffer *buffers, int count)
{
    struct engine *self = calloc(1, sizeof *self);
    (void)buffers, (void)count;
    if (self) self->reads = calloc(depth, sizeof *self->reads);
    if (!self || !self->reads) { free(self); return -12; }
    self->depth = depth;
    *out = self;
    return 0;
}
static int submit(void *engine, const struct read *reads, int count)
{
    struct engine *self = engine;
    int64_t now = now_ns();
    int taken = 0;
    for (; taken < count && self->count < self->depth; taken++) {
        int64_t length = (int64_t)reads[taken].length;
        /* The disk has it when it has what was asked for before. */
        if (self->last < now) self->last = now;
        if (rate) self->last += length * 1000000000LL / rate;
        self->reads[self->count++] =
            (struct flying){ { reads[taken].cookie, length }, rate ? self->last : 0 };
    }
    return taken;
}
static int reap(void *engine, struct completion *out, int room, int wanted, int64_t wait_ns)
{
    struct engine *self = engine;
    int64_t now = now_ns(), until = now + wait_ns;
    int given = 0;
    if (wanted > self->count) wanted = self->count;
    if (wanted > 0 && self->reads[wanted - 1].at > now) {
        sleep_until(self->reads[wanted - 1].at < until ? self->reads[wanted - 1].at : until);
        now = now_ns();
    }
    while (given < self->count && given < room && self->reads[given].at <= now) {
        out[given] = self->reads[given].done;
        given++;
    }
    self->count -= given;
    memmove(self->reads, self->reads + given, self->count * sizeof *self->reads);
    return given;
}
static void cancel(void *engine) { (void)engine; }
static void close_engine(void *engine)
{
    free(((struct engine *)engine)->reads);
    free(engine);
}
static struct ops ops = { open_engine, submit, reap, cancel, close_engine, NULL };

__attribute__((visibility("default"))) void instant_rate(int64_t wanted) { rate = wanted; }
__attribute__((visibility("default"))) void *instant_engine(void) { return &ops; }
__attribute__((visibility("default"))) int64_t instant_sleeps(void)
{
    return __atomic_exchange_n(&sleeps, 0, __ATOMIC_RELAXED);
}
/* Sleeps `count` times for `gap_ns`, and nothing else: nanoseconds of this thread's processor. */
__attribute__((visibility("default"))) int64_t instant_bare(int64_t count, int64_t gap_ns)
{
    struct timespec began, ended;
    int64_t at = now_ns();
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &began);
    while (count-- > 0) sleep_until(at += gap_ns);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ended);
    return (ended.tv_sec - began.tv_sec) * 1000000000LL + ended.tv_nsec - began.tv_nsec;
}
