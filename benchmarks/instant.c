/* An engine that keeps the contract of engine.pxd and reads nothing: what is asked for is there at
 * once, or at a rate as if a disk had read it. What is left of a load is what its pipeline costs. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct read {
    int fd, slot, buffer;
    char *address;
    uint64_t length, offset, cookie;
};
struct completion { uint64_t cookie; int64_t result; };
struct engine { int depth, count; int64_t due; struct completion *done; };

static int64_t rate; /* bytes a second; 0: as many as are asked for */

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static int open_engine(void **out, int depth, const void *buffers, int count, int *fixed)
{
    struct engine *self = calloc(1, sizeof *self);
    (void)buffers;
    if (self) self->done = calloc(depth, sizeof *self->done);
    if (!self || !self->done) { free(self); return -12; }
    self->depth = depth;
    *fixed = count > 0;
    *out = self;
    return 0;
}
static int submit(void *engine, const struct read *reads, int count)
{
    struct engine *self = engine;
    int taken = 0;
    while (taken < count && self->count < self->depth) {
        self->done[self->count++] = (struct completion){ reads[taken].cookie,
                                                         (int64_t)reads[taken].length };
        taken++;
    }
    return taken;
}
static int reap(void *engine, struct completion *out, int room, int64_t wait_ns)
{
    struct engine *self = engine;
    int given = self->count < room ? self->count : room;
    if (rate && given) {
        int64_t now = now_ns(), until = now + wait_ns, took = self->done[0].result * 1000000000LL / rate;
        if (self->due < now - took) self->due = now - took; /* it was idle: no time is made up for */
        if (self->due + took > now) {
            int64_t left = (self->due + took < until ? self->due + took : until) - now;
            if (left <= 0) return 0;
            nanosleep(&(struct timespec){ left / 1000000000LL, left % 1000000000LL }, NULL);
            if (self->due + took > now_ns()) return 0;
        }
        self->due += took;
        given = 1;
    }
    memcpy(out, self->done, given * sizeof *out);
    self->count -= given;
    memmove(self->done, self->done + given, self->count * sizeof *out);
    return given;
}
static void cancel(void *engine) { (void)engine; }
static void close_engine(void *engine)
{
    free(((struct engine *)engine)->done);
    free(engine);
}
static struct {
    const char *name;
    int (*open)(void **, int, const void *, int, int *);
    int (*submit)(void *, const struct read *, int);
    int (*reap)(void *, struct completion *, int, int64_t);
    void (*cancel)(void *);
    void (*close)(void *);
} ops = { "instant", open_engine, submit, reap, cancel, close_engine };

__attribute__((visibility("default"))) void instant_rate(int64_t wanted) { rate = wanted; }
__attribute__((visibility("default"))) void *instant_engine(void) { return &ops; }
