/* An engine that keeps the contract of engine.pxd over pread, and breaks it as a script says.
 *
 * It lets the tests see how the pump handles results that a healthy machine never gives: short
 * reads of any length, errnos once or always, reads that never complete, submissions that are
 * taken in part or not at all. One script and one log serve all engines of the process.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine.h"

enum { SHORT = 1, ERRNO, ZERO, HANG };
enum { ANY = 0, DIRECT, BUFFERED };

struct rule {
    int64_t kind, io_mode, value, times; /* times: how often it strikes; -1: always */
    int64_t first, last;              /* bytes of the file; a read that touches them is struck */
    int64_t skip;                     /* reads that it would strike, and lets pass first */
};
struct script {
    int64_t open_errno;
    int64_t accept;                      /* reads taken by one submission at most; 0: all */
    int64_t refuse_errno, refuse_times;  /* submissions refused; -1 times: always */
    int64_t reap_errno, reap_after;      /* reap fails for good after so many completions */
    int64_t reversed;                    /* the last submitted completes first */
    int64_t one_by_one;                  /* one completion from each reap */
    int64_t open_hangs;                  /* opening waits until reads are let go */
};
struct log { int64_t opens, closes, reads, struck, cancels, hung, in_flight_at_close, wanted, reaps; };

enum { RULES = 8, ROOM = 4096 };
struct engine { int depth, waiting, hung; struct read *reads, *stuck; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t news = PTHREAD_COND_INITIALIZER;
static struct rule rules[RULES];
static int rule_count;
static struct script script;
static struct log counted;
static int let_go, live; /* let_go: reads; -1: all */

static void until(struct timespec *at, int64_t wait_ns) {
    clock_gettime(CLOCK_REALTIME, at);
    at->tv_nsec += wait_ns % 1000000000;
    at->tv_sec += wait_ns / 1000000000 + at->tv_nsec / 1000000000;
    at->tv_nsec %= 1000000000;
}

static struct rule *rule_for(const struct read *r) {
    int direct = (fcntl(r->fd, F_GETFL) & O_DIRECT) != 0;
    for (int i = 0; i < rule_count; i++) {
        struct rule *rule = &rules[i];
        if (rule->io_mode && (rule->io_mode == DIRECT) != direct) continue;
        if ((int64_t)(r->offset + r->length) <= rule->first || (int64_t)r->offset >= rule->last)
            continue;
        if (rule->times == 0) continue;
        if (rule->skip > 0) { rule->skip--; continue; }
        if (rule->times > 0) rule->times--;
        counted.struck++;
        return rule;
    }
    return NULL;
}

static int64_t real_read(const struct read *r, uint64_t length) {
    ssize_t got = pread(r->fd, r->address, length, (off_t)r->offset);
    return got < 0 ? -errno : got;
}

/* 0 where the read hangs. */
static int answer(struct engine *self, const struct read *r, struct completion *out) {
    struct rule *rule = rule_for(r);
    out->cookie = r->cookie;
    counted.reads++;
    if (!rule) out->result = real_read(r, r->length);
    else if (rule->kind == ERRNO) out->result = -rule->value;
    else if (rule->kind == ZERO) out->result = 0;
    else if (rule->kind == SHORT) {
        /* Read whole but reported short, like a device that stops in the middle of a block. */
        int64_t got = real_read(r, r->length);
        out->result = got > rule->value ? rule->value : got;
    } else {
        self->stuck[self->hung++] = *r;
        counted.hung++;
        pthread_cond_broadcast(&news);
        return 0;
    }
    return 1;
}

static int fault_open(
    void **engine, void *context, int depth, const struct buffer *b, int count) {
    (void)context, (void)b, (void)count;
    pthread_mutex_lock(&lock);
    if (script.open_hangs) {
        counted.hung++;
        pthread_cond_broadcast(&news);
    }
    while (script.open_hangs && !let_go) pthread_cond_wait(&news, &lock);
    pthread_mutex_unlock(&lock);
    if (script.open_errno) return (int)-script.open_errno;
    struct engine *self = calloc(1, sizeof *self);
    self->depth = depth;
    self->reads = calloc(depth, sizeof *self->reads);
    self->stuck = calloc(depth, sizeof *self->stuck);
    pthread_mutex_lock(&lock);
    counted.opens++;
    live++;
    pthread_mutex_unlock(&lock);
    *engine = self;
    return 0;
}

static int fault_submit(void *engine, const struct read *reads, int count) {
    struct engine *self = engine;
    int taken = 0;
    pthread_mutex_lock(&lock);
    if (script.refuse_times) {
        if (script.refuse_times > 0) script.refuse_times--;
        counted.struck++;
        pthread_mutex_unlock(&lock);
        return (int)-script.refuse_errno;
    }
    if (script.accept && count > script.accept) count = (int)script.accept;
    while (taken < count && self->waiting + self->hung < self->depth)
        self->reads[self->waiting++] = reads[taken++];
    pthread_mutex_unlock(&lock);
    return taken;
}

static int fault_reap(
    void *engine, struct completion *out, int room, int wanted, int64_t wait_ns) {
    struct engine *self = engine;
    int taken = 0;
    pthread_mutex_lock(&lock);
    counted.reaps++;
    if (counted.wanted != wanted) {
        counted.wanted = wanted;
        pthread_cond_broadcast(&news);
    }
    if (script.reap_errno && counted.reads >= script.reap_after) {
        self->waiting = 0;
        pthread_mutex_unlock(&lock);
        return (int)-script.reap_errno;
    }
    if (self->waiting == 0 && !let_go) {
        struct timespec at;
        until(&at, wait_ns);
        pthread_cond_timedwait(&news, &lock, &at);
    }
    while (let_go && self->hung && taken < room) {
        struct read *r = &self->stuck[--self->hung];
        out[taken].cookie = r->cookie;
        out[taken++].result = real_read(r, r->length);
        let_go -= let_go > 0;
    }
    if (script.one_by_one) room = taken + 1 < room ? taken + 1 : room;
    while (self->waiting && taken < room) {
        struct read next;
        if (script.reversed) {
            next = self->reads[--self->waiting];
        } else {
            next = self->reads[0];
            memmove(self->reads, self->reads + 1, --self->waiting * sizeof next);
        }
        taken += answer(self, &next, &out[taken]);
    }
    pthread_mutex_unlock(&lock);
    return taken;
}

static void fault_cancel(void *engine) {
    (void)engine;
    pthread_mutex_lock(&lock);
    counted.cancels++;
    pthread_mutex_unlock(&lock);
}

static void fault_close(void *engine) {
    struct engine *self = engine;
    pthread_mutex_lock(&lock);
    counted.in_flight_at_close += self->waiting + self->hung;
    counted.closes++;
    live--;
    pthread_cond_broadcast(&news);
    pthread_mutex_unlock(&lock);
    free(self->reads);
    free(self->stuck);
    free(self);
}

struct ops fault_ops = {
    fault_open, fault_submit, fault_reap, fault_cancel, fault_close, NULL,
};

/* Functions that the tests call. */

void fault_set(const struct script *s, const struct rule *r, int count) {
    pthread_mutex_lock(&lock);
    script = *s;
    rule_count = count > RULES ? RULES : count;
    memcpy(rules, r, rule_count * sizeof *r);
    memset(&counted, 0, sizeof counted);
    let_go = 0;
    pthread_mutex_unlock(&lock);
}

void fault_log(struct log *out) {
    pthread_mutex_lock(&lock);
    *out = counted;
    pthread_mutex_unlock(&lock);
}

/* Lets so many hanging reads complete, into their own buffers; -1: all, now and later. */
void fault_let_go(int count) {
    pthread_mutex_lock(&lock);
    let_go = count;
    pthread_cond_broadcast(&news);
    pthread_mutex_unlock(&lock);
}

/* Waits until so many reads or openings hang, or all engines are closed (hung < 0); 0 at the end
 * of the time. */
int fault_wait(int64_t hung, int64_t wait_ns) {
    struct timespec at;
    int there, late = 0;
    until(&at, wait_ns);
    pthread_mutex_lock(&lock);
    for (;;) {
        there = hung < 0 ? live == 0 : counted.hung >= hung;
        if (there || late) break;
        late = pthread_cond_timedwait(&news, &lock, &at) != 0;
    }
    pthread_mutex_unlock(&lock);
    return there;
}

/* Waits until a pump sleeps through so many completions; 0 at the end of the time. */
int fault_wait_wanted(int64_t wanted, int64_t wait_ns) {
    struct timespec at;
    int there, late = 0;
    until(&at, wait_ns);
    pthread_mutex_lock(&lock);
    while (!(there = counted.wanted == wanted) && !late)
        late = pthread_cond_timedwait(&news, &lock, &at) != 0;
    pthread_mutex_unlock(&lock);
    return there;
}
