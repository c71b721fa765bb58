/* Runs the threads of the native modules one at a time, in an order that a seed decides.
 *
 * `il_patch` replaces the thread functions that a loaded module imports (its GOT entries), so that
 * the module under test is the built one. A thread runs until it locks, unlocks, waits, signals,
 * sleeps, or calls the engine below. There the seed chooses the thread that runs next, whether a
 * wait is woken without a reason, and whether a short timeout expires first. Time is virtual: it
 * advances to the next timeout when no thread can run. A run of one seed is the same every time.
 *
 * The engine keeps the contract of engine.pxd. The seed decides when a read completes, in which
 * order, and with what: all bytes, some, none, an errno, a lost read. It writes to the memory of a
 * read at its completion, not before, and reports what breaks the protocol:
 *
 *   - a read into memory that another read still writes to, or that nobody permits
 *   - more reads than the depth; reads in flight when the engine is closed
 *   - a mutex or a condition that is destroyed while it is used; a deadlock
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "engine.h"

int PyGILState_Check(void);

enum { MOST_THREADS = 64, MOST_LOCKS = 64, MOST_READS = 512, MOST_RANGES = 64, BATCH = 64 };
enum { LOST = 1048576, DEADLOCK_STATUS = 70 };
static const int64_t EARLY_NS = 60000000; /* a longer timeout expires only if nothing can run */

/* --- the seed's decisions --------------------------------------------------------------------- */

static uint64_t seed, state, hash;
static int64_t now, steps;
static char said[4096];

static uint64_t chance(uint64_t below) {
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return (state * 2685821657736338717ULL >> 33) % below;
}

static void fault(const char *format, ...) {
    if (*said) return; /* the first says what is wrong; others follow from it */
    va_list args;
    va_start(args, format);
    vsnprintf(said, sizeof said, format, args);
    va_end(args);
}

/* --- threads: one runs, the others wait for their turn ----------------------------------------- */

enum state { ABSENT, RUNNABLE, LOCKING, WAITING, SLEEPING, JOINING, GATHERING, ENDED };
static const char *const NAMES[] = {
    "absent", "runnable", "locking", "waiting", "sleeping", "joining", "gathering", "ended",
};

struct thread {
    enum state state;
    const void *cond, *mutex;  /* that it waits for */
    int timed, result, has_gil;
    int64_t until;             /* virtual time */
    int priority, target;
    void *(*run)(void *);
    void *arg;
    pthread_t handle;
};
static struct thread threads[MOST_THREADS];
static pthread_cond_t turns[MOST_THREADS];
static int thread_count, client_count, current = -1, policy;
static __thread int me = -1;
static pthread_mutex_t big = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t arrived = PTHREAD_COND_INITIALIZER;
static struct { const void *mutex; int owner; } locks[MOST_LOCKS];

static int *owner_of(const void *mutex, int add) {
    int empty = -1;
    for (int i = 0; i < MOST_LOCKS; i++) {
        if (locks[i].mutex == mutex) return &locks[i].owner;
        if (!locks[i].mutex && empty < 0) empty = i;
    }
    if (!add) return NULL;
    if (empty < 0) abort();
    locks[empty].mutex = mutex;
    locks[empty].owner = -1;
    return &locks[empty].owner;
}

static int is_free(const void *mutex) {
    int *owner = owner_of(mutex, 0);
    return !owner || *owner < 0;
}

static int all_ended(int first, int last) {
    for (int i = first; i < last; i++)
        if (threads[i].state != ENDED) return 0;
    return 1;
}

static int can_run(int i) {
    struct thread *t = &threads[i];
    switch (t->state) {
    case RUNNABLE: return 1;
    case LOCKING: return is_free(t->mutex);
    case JOINING: return threads[t->target].state == ENDED;
    case GATHERING: return all_ended(1, t->target);
    default: return 0;
    }
}

static void wake(struct thread *t, int result) {
    t->result = result;
    t->state = t->state == WAITING ? LOCKING : RUNNABLE;
    t->cond = NULL;
}

static void deadlock(void) {
    fprintf(stderr, "seed %llu: deadlock at step %lld\n", (unsigned long long)seed, (long long)steps);
    for (int i = 0; i < thread_count; i++)
        fprintf(stderr, "  thread %d: %s\n", i, NAMES[threads[i].state]);
    _exit(DEADLOCK_STATUS);
}

/* The timed waiter with the earliest timeout until `last`; -1: none. */
static int next_timeout(int64_t last) {
    int found = -1;
    for (int i = 0; i < thread_count; i++) {
        struct thread *t = &threads[i];
        if ((t->state != WAITING && t->state != SLEEPING) || !t->timed || t->until > last) continue;
        if (found < 0 || t->until < threads[found].until) found = i;
    }
    return found;
}

static void expire(int i) {
    if (threads[i].until > now) now = threads[i].until;
    wake(&threads[i], threads[i].state == WAITING ? ETIMEDOUT : 0);
}

/* A thread that waits for a mutex with the GIL must not wait for a thread that waits for the GIL. */
static int holds_up_python(void) {
    for (int i = 0; i < thread_count; i++) {
        if (threads[i].state != LOCKING || !threads[i].has_gil) continue;
        while (threads[i].state == LOCKING && !is_free(threads[i].mutex))
            i = *owner_of(threads[i].mutex, 0);
        if (can_run(i)) return i;
        abort();
    }
    return -1;
}

static int choose(void) {
    int found[MOST_THREADS], count, i = holds_up_python();
    if (i >= 0) return i;
    if (chance(32) == 0 && (i = next_timeout(now + EARLY_NS)) >= 0) expire(i);
    if (chance(128) == 0) {
        i = (int)chance(thread_count);
        if (threads[i].state == WAITING) wake(&threads[i], 0); /* as POSIX allows */
    }
    for (;;) {
        for (i = count = 0; i < thread_count; i++)
            if (can_run(i)) found[count++] = i;
        if (count) break;
        if ((i = next_timeout(INT64_MAX)) < 0) deadlock();
        expire(i);
    }
    if (policy == 0) return found[chance(count)];
    if (policy == 1) { /* mostly goes on */
        for (i = 0; i < count; i++)
            if (found[i] == current && chance(8)) return current;
        return found[chance(count)];
    }
    /* Priorities, which change now and then. */
    if (chance(24) == 0 && current >= 0) threads[current].priority = -(int)chance(1000);
    int best = found[0];
    for (i = 1; i < count; i++)
        if (threads[found[i]].priority > threads[best].priority) best = found[i];
    return best;
}

/* Under `big`, with the state of this thread set: passes the turn on, and waits for it unless this
 * thread has ended. */
static void hand_over(void) {
    int next, mine = me;
    if (threads[mine].state == ENDED && all_ended(0, thread_count)) {
        current = -1;
        return;
    }
    next = choose();
    steps++;
    now += 1000;
    hash = (hash ^ (uint64_t)next) * 1099511628211ULL;
    if (threads[next].state == LOCKING) *owner_of(threads[next].mutex, 1) = next;
    threads[next].state = RUNNABLE;
    current = next;
    if (next == mine) return;
    pthread_cond_signal(&turns[next]);
    if (threads[mine].state != ENDED)
        while (current != mine) pthread_cond_wait(&turns[mine], &big);
}

static void pass(enum state state) {
    threads[me].state = state;
    pthread_mutex_lock(&big);
    hand_over();
    pthread_mutex_unlock(&big);
}

/* Another thread may run here. Not with the GIL: the other one may need it. */
static void point(void) {
    if (!PyGILState_Check()) pass(RUNNABLE);
}

static void sleep_until(int64_t until) {
    threads[me].timed = 1;
    threads[me].until = until;
    pass(SLEEPING);
}

/* --- instead of the functions of libpthread ---------------------------------------------------- */

static int lock_mutex(pthread_mutex_t *mutex) {
    if (me < 0) return pthread_mutex_lock(mutex);
    threads[me].has_gil = PyGILState_Check();
    if (threads[me].has_gil && is_free(mutex)) {
        *owner_of(mutex, 1) = me;
        return 0;
    }
    threads[me].mutex = mutex;
    pass(LOCKING);
    return 0;
}

static int unlock_mutex(pthread_mutex_t *mutex) {
    if (me < 0) return pthread_mutex_unlock(mutex);
    int *owner = owner_of(mutex, 0);
    if (!owner || *owner != me) fault("a mutex was unlocked by a thread that had not locked it");
    else *owner = -1;
    point();
    return 0;
}

static int destroy_mutex(pthread_mutex_t *mutex) {
    for (int i = 0; i < MOST_LOCKS; i++)
        if (locks[i].mutex == mutex) {
            if (locks[i].owner >= 0) fault("a mutex was destroyed while it was locked");
            locks[i].mutex = NULL;
        }
    for (int i = 0; i < thread_count; i++)
        if ((threads[i].state == LOCKING || threads[i].state == WAITING) && threads[i].mutex == mutex)
            fault("a mutex was destroyed while a thread waited for it");
    return pthread_mutex_destroy(mutex);
}

static int destroy_cond(pthread_cond_t *cond) {
    for (int i = 0; i < thread_count; i++)
        if (threads[i].state == WAITING && threads[i].cond == cond)
            fault("a condition was destroyed while a thread waited for it");
    return pthread_cond_destroy(cond);
}

static int wait_cond(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *until) {
    struct thread *t = &threads[me];
    int *owner = owner_of(mutex, 0);
    if (!owner || *owner != me) fault("a wait without its mutex");
    else *owner = -1;
    t->cond = cond;
    t->mutex = mutex;
    t->has_gil = 0;
    t->timed = until != NULL;
    t->until = until ? (int64_t)until->tv_sec * 1000000000 + until->tv_nsec : 0;
    pass(WAITING);
    return t->result;
}

static int timedwait_cond(pthread_cond_t *c, pthread_mutex_t *m, const struct timespec *until) {
    return me < 0 ? pthread_cond_timedwait(c, m, until) : wait_cond(c, m, until);
}

static int untimed_wait_cond(pthread_cond_t *c, pthread_mutex_t *m) {
    return me < 0 ? pthread_cond_wait(c, m) : wait_cond(c, m, NULL);
}

static int signal_cond(pthread_cond_t *cond) {
    int found[MOST_THREADS], count = 0;
    if (me < 0) return pthread_cond_signal(cond);
    for (int i = 0; i < thread_count; i++)
        if (threads[i].state == WAITING && threads[i].cond == cond) found[count++] = i;
    if (count) wake(&threads[found[chance(count)]], 0);
    point();
    return 0;
}

static int broadcast_cond(pthread_cond_t *cond) {
    if (me < 0) return pthread_cond_broadcast(cond);
    for (int i = 0; i < thread_count; i++)
        if (threads[i].state == WAITING && threads[i].cond == cond) wake(&threads[i], 0);
    point();
    return 0;
}

static void *run_thread(void *arg) {
    struct thread *t = arg;
    me = (int)(t - threads);
    pthread_mutex_lock(&big);
    while (current != me) pthread_cond_wait(&turns[me], &big);
    pthread_mutex_unlock(&big);
    void *result = t->run(t->arg);
    pass(ENDED);
    return result;
}

static int create_thread(
    pthread_t *out, const pthread_attr_t *attr, void *(*run)(void *), void *arg) {
    if (me < 0) return pthread_create(out, attr, run, arg);
    if (thread_count == MOST_THREADS) abort();
    struct thread *t = &threads[thread_count];
    *t = (struct thread){.state = RUNNABLE, .run = run, .arg = arg, .priority = (int)chance(1000)};
    int error = pthread_create(&t->handle, attr, run_thread, t);
    if (error) return error;
    *out = t->handle;
    thread_count++;
    point();
    return 0;
}

static int join_thread(pthread_t handle, void **result) {
    for (int i = thread_count - 1; me >= 0 && i > 0; i--)
        if (threads[i].run && pthread_equal(threads[i].handle, handle)) {
            threads[me].target = i;
            pass(JOINING);
            break;
        }
    return pthread_join(handle, result);
}

static int read_clock(clockid_t clock, struct timespec *out) {
    if (me < 0 || clock != CLOCK_MONOTONIC) return clock_gettime(clock, out);
    *out = (struct timespec){now / 1000000000, now % 1000000000};
    return 0;
}

static int sleep_for(const struct timespec *wait, struct timespec *left) {
    if (me < 0) return nanosleep(wait, left);
    if (PyGILState_Check()) fault("a thread slept with the GIL");
    sleep_until(now + (int64_t)wait->tv_sec * 1000000000 + wait->tv_nsec);
    return 0;
}

static const struct { const char *name; void *ours; } REPLACED[] = {
    {"pthread_mutex_lock", lock_mutex},         {"pthread_mutex_unlock", unlock_mutex},
    {"pthread_mutex_destroy", destroy_mutex},   {"pthread_cond_destroy", destroy_cond},
    {"pthread_cond_timedwait", timedwait_cond}, {"pthread_cond_wait", untimed_wait_cond},
    {"pthread_cond_signal", signal_cond},       {"pthread_cond_broadcast", broadcast_cond},
    {"pthread_create", create_thread},          {"pthread_join", join_thread},
    {"clock_gettime", read_clock},              {"nanosleep", sleep_for},
};

static int patch_table(const struct link_map *map, const ElfW(Rela) *table, size_t bytes,
                       const ElfW(Sym) *symbols, const char *strings) {
    int replaced = 0;
    long page = sysconf(_SC_PAGESIZE);
    for (const ElfW(Rela) *r = table; (const char *)r < (const char *)table + bytes; r++) {
        const char *name = strings + symbols[ELF64_R_SYM(r->r_info)].st_name;
        for (size_t i = 0; i < sizeof REPLACED / sizeof *REPLACED; i++) {
            if (strcmp(name, REPLACED[i].name)) continue;
            void **entry = (void **)(map->l_addr + r->r_offset);
            void *start = (void *)((uintptr_t)entry & -(uintptr_t)page);
            if (mprotect(start, (size_t)page, PROT_READ | PROT_WRITE)) return -errno;
            *entry = REPLACED[i].ours;
            replaced++;
        }
    }
    return replaced;
}

/* Replaces the functions in a library, by its handle of dlopen: how many, or -errno. */
int il_patch(void *handle) {
    const struct link_map *map = handle;
    const ElfW(Rela) *jumps = NULL, *data = NULL;
    const ElfW(Sym) *symbols = NULL;
    const char *strings = NULL;
    size_t jump_bytes = 0, data_bytes = 0;
    for (const ElfW(Dyn) *d = map->l_ld; d->d_tag != DT_NULL; d++) {
        if (d->d_tag == DT_JMPREL) jumps = (void *)d->d_un.d_ptr;
        if (d->d_tag == DT_PLTRELSZ) jump_bytes = d->d_un.d_val;
        if (d->d_tag == DT_RELA) data = (void *)d->d_un.d_ptr;
        if (d->d_tag == DT_RELASZ) data_bytes = d->d_un.d_val;
        if (d->d_tag == DT_SYMTAB) symbols = (void *)d->d_un.d_ptr;
        if (d->d_tag == DT_STRTAB) strings = (void *)d->d_un.d_ptr;
    }
    int first = patch_table(map, jumps, jump_bytes, symbols, strings);
    int second = first < 0 ? first : patch_table(map, data, data_bytes, symbols, strings);
    return second < 0 ? second : first + second;
}

/* --- a run, as Python sees it ------------------------------------------------------------------ */

static void reset_engines(void);

/* Begins a run. This thread is the first, and has the turn; `clients` others enter. */
void il_begin(uint64_t run_seed, int clients) {
    seed = run_seed;
    state = (run_seed + 1) * 0x9E3779B97F4A7C15ULL;
    for (int i = 0; i < 8; i++) chance(2);
    hash = 14695981039346656037ULL;
    now = 1000000000;
    steps = 0;
    *said = 0;
    policy = (int)(run_seed % 3);
    memset(threads, 0, sizeof threads);
    memset(locks, 0, sizeof locks);
    static int made;
    for (; made < MOST_THREADS; made++) pthread_cond_init(&turns[made], NULL);
    client_count = clients;
    thread_count = clients + 1;
    for (int i = 0; i < thread_count; i++) threads[i].priority = (int)chance(1000);
    threads[0].state = RUNNABLE;
    current = me = 0;
    reset_engines();
}

/* In a client: waits for its first turn. */
void il_enter(int number) {
    pthread_mutex_lock(&big);
    me = number;
    threads[me].state = RUNNABLE;
    pthread_cond_signal(&arrived);
    while (current != me) pthread_cond_wait(&turns[me], &big);
    pthread_mutex_unlock(&big);
}

/* In the first thread: waits until all clients have entered. */
void il_await_clients(void) {
    pthread_mutex_lock(&big);
    for (int i = 1; i <= client_count; i++)
        while (threads[i].state == ABSENT) pthread_cond_wait(&arrived, &big);
    pthread_mutex_unlock(&big);
}

void il_leave(void) {
    pass(ENDED);
    me = -1;
}

/* In the first thread: lets the others run until the clients, or all of them, have ended. */
void il_gather(int all) {
    /* New threads may start meanwhile. */
    do {
        threads[0].target = all ? thread_count : client_count + 1;
        pass(GATHERING);
    } while (all && !all_ended(1, thread_count));
}

void il_pause(int64_t wait_ns) { sleep_until(now + wait_ns); }

struct outcome { int64_t steps, virtual_ns, threads; uint64_t hash; };

static void end_engines(void);

/* Ends a run: what broke the protocol, or "". */
const char *il_end(struct outcome *out) {
    end_engines();
    *out = (struct outcome){steps, now - 1000000000, thread_count, hash};
    me = current = -1;
    return said;
}

/* --- the engine -------------------------------------------------------------------------------- */

enum { DIRECT_FD = 1 }; /* added to the number of a file: 2 * file */

struct flight { struct read read; int64_t ready; int cancelled; const void *engine; };
struct engine { int depth, flying, broken; };

/* What the seed may do in a run. */
struct script {
    int64_t faults;      /* results other than all bytes, at most */
    int64_t fault_every; /* one of so many completions */
    int64_t loses;       /* whether a read may be lost */
    int64_t breaks;      /* completions after which an engine fails for good; -1: never */
    int64_t guarded;     /* whether memory must be permitted */
    int64_t real;        /* whether descriptors are those of files */
};
struct engine_log { int64_t opens, closes, reads, nbytes, struck, lost, broken, cancels; };

static const char *files[4];
static uint64_t sizes[4];
static struct script script;
static struct engine_log counted;
static struct flight flights[MOST_READS], given_up[MOST_READS];
static int flight_count, given_up_count;
static struct { const char *address; uint64_t length; int permitted; } ranges[MOST_RANGES];
static int range_count;

static int overlap(const char *a, uint64_t n, const char *b, uint64_t m) {
    return a < b + m && b < a + n;
}

static void reset_engines(void) {
    memset(&counted, 0, sizeof counted);
    flight_count = given_up_count = range_count = 0;
}

static int is_permitted(const char *address, uint64_t length) {
    if (!script.guarded) return 1;
    for (int i = 0; i < range_count; i++)
        if (ranges[i].permitted && address >= ranges[i].address &&
            address + length <= ranges[i].address + ranges[i].length)
            return 1;
    return 0;
}

static int explore_open(
    void **engine, void *context, int depth, const struct buffer *b, int count) {
    (void)context, (void)b, (void)count;
    struct engine *self = calloc(1, sizeof *self);
    self->depth = depth;
    counted.opens++;
    *engine = self;
    return 0;
}

static int explore_submit(void *engine, const struct read *reads, int count) {
    struct engine *self = engine;
    static const int REFUSALS[] = {EAGAIN, EBUSY, EIO};
    point();
    if (count < 1 || count > BATCH) fault("a submission of %d reads", count);
    if (script.faults > 0 && chance(script.fault_every) == 0) {
        script.faults--;
        counted.struck++;
        if (chance(2)) return -REFUSALS[chance(3)];
        count = (int)chance(count + 1);
    }
    if (count > self->depth - self->flying) fault("more reads than the depth of %d", self->depth);
    for (int i = 0; i < count; i++) {
        const struct read *r = &reads[i];
        int64_t wait = chance(4) ? 0 : (int64_t)chance(chance(8) ? 3000000 : 200000000);
        if (flight_count == MOST_READS) abort();
        if (r->length == 0) fault("a read of no bytes");
        if (!script.real && (r->io_mode == 0) != (r->fd % 2 == DIRECT_FD)) fault("a read by the wrong descriptor");
        if (!is_permitted(r->address, r->length)) fault("a read into memory of a request that ended");
        for (int j = 0; j < flight_count; j++)
            if (overlap(r->address, r->length, flights[j].read.address, flights[j].read.length))
                fault("two reads in flight write to the same memory");
        for (int j = 0; j < given_up_count; j++)
            if (overlap(r->address, r->length, given_up[j].read.address, given_up[j].read.length))
                fault("a read into memory that a lost read may still write to");
        counted.nbytes += (int64_t)r->length;
        flights[flight_count++] = (struct flight){*r, now + wait, 0, engine};
        self->flying++;
    }
    point();
    return count;
}

/* Bytes that arrive, or -errno. */
static int64_t bytes_of(const struct read *r, uint64_t length) {
    if (script.real) {
        ssize_t got = pread(r->fd, r->address, length, (off_t)r->offset);
        return got < 0 ? -errno : got;
    }
    uint64_t size = sizes[r->fd / 2];
    if (r->offset >= size) return 0;
    if (length > size - r->offset) length = size - r->offset;
    memcpy(r->address, files[r->fd / 2] + r->offset, length);
    return (int64_t)length;
}

/* The result of a read that completes, and its bytes. */
static int64_t completed(struct flight *f) {
    static const int ERRORS[] = {EIO, EAGAIN, EINTR, EBUSY, ECANCELED, ENODATA};
    static const int REFUSALS[] = {EINVAL, EFAULT, EOPNOTSUPP};
    struct read *r = &f->read;
    counted.reads++;
    if (!is_permitted(r->address, r->length)) fault("memory of a request that ended was written to");
    if (f->cancelled && chance(2)) return -ECANCELED;
    if (script.faults > 0 && chance(script.fault_every) == 0) {
        script.faults--;
        counted.struck++;
        switch (chance(6)) {
        case 0: return -ERRORS[chance(6)];
        case 1: return r->io_mode == 0 ? -REFUSALS[chance(3)] : -EIO;
        case 2: return 0;
        case 3:
            if (!script.loses) return -EIO;
            given_up[given_up_count++] = *f;
            counted.lost++;
            return -LOST - EIO;
        default: { /* short: less is reported than was read, as by a device that stops in a block */
            int64_t got = bytes_of(r, r->length);
            return got > 1 ? 1 + (int64_t)chance((uint64_t)got) : got;
        }
        }
    }
    return bytes_of(r, r->length);
}

static int explore_reap(
    void *engine, struct completion *out, int room, int wanted, int64_t wait_ns) {
    struct engine *self = engine;
    int64_t until = now + wait_ns;
    int taken = 0, ready, i;
    if (self->flying == 0) fault("a wait for completions with no read in flight");
    for (;;) {
        int64_t next = until;
        point();
        for (i = ready = 0; i < flight_count; i++) {
            if (flights[i].engine != engine) continue;
            ready += flights[i].ready <= now;
            if (flights[i].ready > now && flights[i].ready < next) next = flights[i].ready;
        }
        if (ready >= wanted || now >= until) break;
        sleep_until(next);
    }
    if (script.breaks >= 0 && counted.reads >= script.breaks) {
        if (!self->broken) counted.broken++;
        self->broken = 1;
        return -EIO;
    }
    if (chance(8) == 0) room = (int)chance(room + 1);
    while (ready-- > 0 && taken < room) {
        int at = (int)chance(flight_count);
        while (flights[at].engine != engine || flights[at].ready > now) at = (at + 1) % flight_count;
        struct flight f = flights[at];
        flights[at] = flights[--flight_count];
        self->flying--;
        int64_t result = completed(&f);
        out[taken++] = (struct completion){f.read.cookie, result};
    }
    return taken;
}

static void explore_cancel(void *engine) {
    counted.cancels++;
    for (int i = 0; i < flight_count; i++)
        if (flights[i].engine == engine && chance(2)) {
            flights[i].cancelled = 1;
            if (flights[i].ready > now) flights[i].ready = now;
        }
}

static void explore_close(void *engine) {
    struct engine *self = engine;
    if (self->flying && !self->broken) fault("%d reads in flight at the close", self->flying);
    /* Those of an engine that failed may still write to their memory. */
    for (int i = 0; i < flight_count;)
        if (flights[i].engine == engine) {
            given_up[given_up_count++] = flights[i];
            flights[i] = flights[--flight_count];
        } else i++;
    counted.closes++;
    free(self);
}

struct ops explore_ops = {
    explore_open, explore_submit, explore_reap, explore_cancel, explore_close, NULL,
};

static void end_engines(void) {
    if (counted.opens != counted.closes) fault("%d engines open", (int)(counted.opens - counted.closes));
    /* Memory that was freed crashes here. */
    for (int i = 0; i < given_up_count; i++) memset(given_up[i].read.address, 0xEE, 1);
}

void il_file(int number, const char *data, uint64_t size) { files[number] = data, sizes[number] = size; }
void il_script(const struct script *wanted) { script = *wanted; }
void il_log(struct engine_log *out) { *out = counted; }

/* Whether reads may write to a range from now on. */
void il_permit(const char *address, uint64_t length, int permitted) {
    for (int i = 0; !permitted && i < flight_count; i++)
        if (overlap(address, length, flights[i].read.address, flights[i].read.length))
            fault("a read is in flight, and its request has ended");
    for (int i = 0; i < range_count; i++)
        if (ranges[i].address == address) {
            ranges[i].length = length;
            ranges[i].permitted = permitted;
            return;
        }
    if (range_count == MOST_RANGES) abort();
    ranges[range_count].address = address;
    ranges[range_count].length = length;
    ranges[range_count++].permitted = permitted;
}
