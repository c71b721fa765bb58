/* A libcufile over host memory: its bookkeeping, its contract, and its known faults by script.
 *
 * It fails a test that breaks the contract: reads with a base that was not registered, or past
 * its end, of files that are not known, after a close; registrations that are not balanced; a batch
 * handle that is used again after an error, or filled while it still has something in flight.
 */
#include "double.h"
#include <fcntl.h>

typedef struct { int err, cu_err; } answer_t;
typedef struct { int type; union { int fd; void *handle; } handle; const void *ops; } descr_t;
typedef struct { int fd, reader, direct; } handle_t;
typedef struct { void *base; int64_t file_offset, offset; size_t size; } io_t;
typedef struct { int mode; union { io_t batch; } u; handle_t *fh; int opcode; void *cookie; } params_t;
typedef struct { void *cookie; int status; size_t ret; } event_t;
typedef struct { unsigned major, minor; size_t poll, max_direct; unsigned status, control; } nvfs_t;
typedef struct { nvfs_t nvfs; unsigned features, cache, per_buffer, pinned, batch, timeout; } props_t;
typedef struct { char *base; size_t length; } buffer_t;
typedef struct batch {
    unsigned room, count;
    int poisoned, waits;
    params_t entries[256];
    int reported[256];
} batch_t;

#define ROOM 256
#define DONE(code) do { answer_t a = { code, 0 }; pthread_mutex_unlock(&lock); return a; } while (0)
#define ENTER() pthread_mutex_lock(&lock); fault_t *fault = entered(__func__); \
    if (fault && fault->kind == HANG) { hang(); fault = NULL; } \
    if (fault && fault->kind == CODE) DONE((int)fault->value)
#define OPENED() if (!is_open) { broken("%s with the driver closed", __func__); DONE(5001); }

static int version = 1170, is_open, failed_open, opens, files, buffers, batches, in_flight;
static int native = 1, compat_allowed = 1, compat;
static int switches[16];                 /* parameters that were set, by number; -1: not set */
static size_t sizes[16] = { 0, 128, 8, 1024, 4, 16384, 131072, 1024, 1 << 30, 128, 4, 5 };
static buffer_t known[ROOM];
static int64_t reads, read_bytes, by_p2p, by_nvfs, by_posix, unaligned;
static int level, started, reports;
static int destroying, together;
static char log_path[4096];
static params_t late[256];
static int late_count;
static int (*is_device)(const void *, size_t);

EXPORT void cufile_double_set(int wanted_version, int is_native, int (*device)(const void *, size_t))
{
    pthread_mutex_lock(&lock);
    version = wanted_version; native = is_native; is_device = device;
    is_open = failed_open = opens = files = buffers = batches = in_flight = late_count = 0;
    compat_allowed = 1; level = started = together = 0;
    memset(switches, -1, sizeof switches);
    reads = read_bytes = by_p2p = by_nvfs = by_posix = unaligned = 0;
    sizes[5] = 16384; sizes[6] = 131072; sizes[7] = 1024; sizes[9] = 128;
    log_path[0] = 0;
    pthread_mutex_unlock(&lock);
}
EXPORT void cufile_double_size(int parameter, size_t value)
{
    pthread_mutex_lock(&lock);
    sizes[parameter] = value;
    pthread_mutex_unlock(&lock);
}
EXPORT const char *cufile_double_log_path(void) { return log_path; }
EXPORT void cufile_double_log(int64_t *out)
{
    pthread_mutex_lock(&lock);
    int64_t values[] = { is_open, opens, files, buffers, batches, in_flight, reads, unaligned,
                         together };
    memcpy(out, values, sizeof values);
    pthread_mutex_unlock(&lock);
}

/* --- the driver ------------------------------------------------------------------------------ */

static void at_exit(void)
{
    if (is_open && reports) fprintf(stderr, "left: cuFile open, %d files, %d buffers\n", files, buffers);
    if (is_open && started && level && reports) fprintf(stderr, "left: cuFile counts\n");
    if (batches && reports) fprintf(stderr, "left: %d batches\n", batches);
}
/* At the end of the process: what is left goes to stderr. */
EXPORT void cufile_double_report(void) { reports = 1; }
EXPORT answer_t cuFileDriverOpen(void)
{
    ENTER();
    opens++;
    const char *log = getenv("CUFILE_LOGFILE_PATH");
    snprintf(log_path, sizeof log_path, "%s", log ? log : "cufile.log");
    if (failed_open) broken("the driver was opened again after it failed");
    if (is_open) DONE(5026);
    if (!native && !compat_allowed) { failed_open = 1; DONE(5001); }
    compat = !native;
    is_open = 1;
    if (fault && fault->kind == CLOSES_INPUT) close(0);
    if (opens == 1) atexit(at_exit);
    DONE(0);
}
EXPORT answer_t cuFileDriverClose_v2(void)
{
    ENTER();
    OPENED();
    if (!is_device(NULL, 0)) broken("closed without a current context");
    if (files || buffers) broken("closed with %d files and %d buffers known", files, buffers);
    is_open = started = 0;
    DONE(0);
}
EXPORT answer_t cuFileGetVersion(int *out) { ENTER(); *out = version; DONE(0); }
EXPORT answer_t cuFileDriverGetProperties(props_t *props)
{
    ENTER();
    OPENED();
    if (version >= 1140 && version < 1170) { compat_allowed = 1; sizes[5] = 1024; }  /* it forgets */
    memset(props, 0, sizeof *props);
    props->nvfs.major = native == 1 ? 2 : 0;
    props->nvfs.status = native ? 1 << 4 : 0;
    props->nvfs.control = compat_allowed ? 2 : 0;
    props->nvfs.max_direct = sizes[5];
    props->features = native == 2 ? 1 << 4 : 0;
    props->cache = sizes[6];
    props->per_buffer = sizes[7];
    props->batch = sizes[9];
    DONE(0);
}
EXPORT answer_t cuFileGetParameterSizeT(int parameter, size_t *value)
{
    ENTER();
    *value = sizes[parameter];
    DONE(0);
}
EXPORT answer_t cuFileSetParameterSizeT(int parameter, size_t value)
{
    ENTER();
    if (is_open) DONE(5026);
    sizes[parameter] = value;
    DONE(0);
}
EXPORT answer_t cuFileGetParameterBool(int parameter, unsigned char *value)
{
    ENTER();
    *value = parameter == 1 ? compat_allowed : 0;
    DONE(0);
}
EXPORT answer_t cuFileSetParameterBool(int parameter, int value)
{
    ENTER();
    if (is_open) DONE(5026);
    if (parameter == 1) compat_allowed = value & 1;
    switches[parameter] = value & 1;
    DONE(0);
}
EXPORT int cufile_double_switch(int parameter) { return switches[parameter]; }
EXPORT answer_t cuFileSetParameterString(int parameter, const char *value)
{
    ENTER();
    if (is_open) DONE(5026);
    (void)parameter, (void)value;   /* the real one takes where to log, too, and does not care */
    DONE(0);
}
EXPORT answer_t cuFileDriverGetP2PFlags(int target, int *flags)
{
    ENTER();
    *flags = native == 2 && target == 4 ? 1 : 0;
    DONE(0);
}
EXPORT answer_t cuFileSetStatsLevel(int wanted) { ENTER(); level = wanted; DONE(0); }
EXPORT answer_t cuFileStatsStart(void) { ENTER(); started = level > 0; DONE(started ? 0 : 5022); }
EXPORT answer_t cuFileStatsStop(void)
{
    ENTER();
    broken("cuFileStatsStop unmaps what a thread of libcufile 1.15 writes to");
    DONE(0);
}
EXPORT answer_t cuFileGetStatsL3(char *out)
{
    ENTER();
    if (!started || level < 3) DONE(5022);
    size_t base = (version >= 1190 ? 624 : 512) + 512;
    memset(out, 0, version >= 1190 ? 5112 : 5000);
    *(uint32_t *)(out + base) = 1;
    int64_t *gpu = (int64_t *)(out + base + 8 + 16);
    gpu[0] = read_bytes; gpu[4] = reads; gpu[5] = by_p2p; gpu[6] = by_nvfs; gpu[7] = by_posix;
    gpu[8] = unaligned;
    DONE(0);
}

/* --- files and memory ------------------------------------------------------------------------ */

EXPORT answer_t cuFileHandleRegister(handle_t **out, descr_t *descr)
{
    ENTER();
    OPENED();
    if (descr->type != 1 || descr->ops) { broken("a file of an odd kind"); DONE(5022); }
    int flags = fcntl(descr->handle.fd, F_GETFL);
    char path[64];
    if (flags < 0) DONE(5022);
    handle_t *made = calloc(1, sizeof *made);
    made->fd = made->reader = descr->handle.fd;
    made->direct = (flags & O_DIRECT) != 0;
    snprintf(path, sizeof path, "/proc/self/fd/%d", descr->handle.fd);
    if (made->direct) made->reader = open(path, O_RDONLY | O_CLOEXEC);
    *out = made;
    files++;
    DONE(0);
}
EXPORT void cuFileHandleDeregister(handle_t *handle)
{
    pthread_mutex_lock(&lock);
    entered(__func__);
    if (--files < 0) broken("a file was given back twice");
    for (int i = 0; i < late_count; i++)
        if (late[i].fh == handle) broken("a file was given back that a read still uses");
    if (handle->reader != handle->fd) close(handle->reader);
    free(handle);
    pthread_mutex_unlock(&lock);
}
EXPORT answer_t cuFileBufRegister(const void *base, size_t length, int flags)
{
    ENTER();
    OPENED();
    if (flags || !is_device(base, length)) { broken("a buffer that is not of the current device"); DONE(5013); }
    for (int i = 0; i < buffers; i++) if (known[i].base == base) DONE(5023);
    known[buffers++] = (buffer_t){ (char *)base, length };
    DONE(0);
}
EXPORT answer_t cuFileBufDeregister(const void *base)
{
    ENTER();
    for (int i = 0; i < buffers; i++)
        if (known[i].base == base) { known[i] = known[--buffers]; DONE(0); }
    broken("a buffer was given back that was not known");
    DONE(5024);
}

/* Under the lock, which is let go while bytes move. */
static int64_t move(handle_t *file, char *base, int64_t offset, size_t size, int64_t at)
{
    int64_t got = 0, more;
    buffer_t *buffer = NULL;
    for (int i = 0; i < buffers; i++) if (known[i].base == base) buffer = &known[i];
    if (!buffer && buffers) broken("a base that is not the registered one");
    if (buffer && (offset < 0 || offset + size > buffer->length)) {
        broken("a read past the end of its buffer");
        return -5017;
    }
    pthread_mutex_unlock(&lock);
    if (!is_device(base + offset, size)) {
        pthread_mutex_lock(&lock);
        broken("a read to what is no device memory");
        return -5013;
    }
    while ((size_t)got < size) {
        more = pread(file->reader, base + offset + got, size - got, at + got);
        if (more < 0) { got = got ? got : -errno; break; }
        if (more == 0) break;
        got += more;
    }
    pthread_mutex_lock(&lock);
    reads++;
    if (got > 0) read_bytes += got;
    if (file->direct && (at % 4096 || (int64_t)(base + offset) % 4096)) unaligned++;
    if (compat) by_posix++; else if (native == 2) by_p2p++; else by_nvfs++;
    /* In native mode too, what is no whole block, such as the end of a file, is read by POSIX. */
    if (!compat && got > 0 && (at + got) % 4096) by_posix++;
    return got;
}
EXPORT ssize_t cuFileRead(handle_t *file, void *base, size_t size, off_t at, off_t offset)
{
    pthread_mutex_lock(&lock);
    fault_t *fault = entered(__func__);
    char at_offset[64];
    if (!fault) {               /* or a fault at this offset of every file */
        snprintf(at_offset, sizeof at_offset, "cuFileRead at %lld", (long long)at);
        fault = entered(at_offset);
    }
    int64_t got = 0;
    if (fault && fault->kind == HANG) { hang(); fault = NULL; }
    if (!is_open) broken("a read with the driver closed");
    if (size == 0 || !file || !base || at < 0) broken("a read that cannot be");
    if (fault && fault->kind == SHORT && (size_t)fault->value < size) size = fault->value;
    if (fault && (fault->kind == ERRNO || fault->kind == CODE || fault->kind == NEGATIVE))
        got = -fault->value;
    else
        got = move(file, base, offset, size, at);
    if (fault && fault->kind == STRANGE && !compat) {          /* it says native, and is not */
        if (native == 2) by_p2p--; else by_nvfs--;
        by_posix++;
    }
    pthread_mutex_unlock(&lock);
    if (fault && fault->kind == NEGATIVE) return got;          /* a code, as it is */
    if (got < 0) { errno = (int)-got; return -1; }             /* an errno, or a code in errno */
    return got;
}

/* --- batches --------------------------------------------------------------------------------- */

static void write_late(void)
{
    for (int i = 0; i < late_count; i++) {
        io_t *io = &late[i].u.batch;
        move(late[i].fh, io->base, io->offset, io->size, io->file_offset);
    }
    late_count = 0;
}
EXPORT answer_t cuFileBatchIOSetUp(batch_t **out, unsigned nr)
{
    ENTER();
    OPENED();
    if (nr == 0 || nr > sizes[9]) DONE(5022);
    *out = calloc(1, sizeof **out);
    (*out)->room = nr;
    batches++;
    DONE(0);
}
EXPORT answer_t cuFileBatchIOSubmit(batch_t *batch, unsigned nr, params_t *params, unsigned flags)
{
    ENTER();
    OPENED();
    if (batch->poisoned) broken("a batch handle was used again after an error");
    if (batch->count) broken("a batch was filled while it had something in flight");
    if (nr > batch->room || flags) { batch->poisoned = 1; DONE(5040); }
    for (unsigned i = 0; i < nr; i++) {
        io_t *io = &params[i].u.batch;
        if (params[i].mode != 1 || params[i].opcode || !io->base || !io->size || !params[i].fh)
            broken("an entry that would never be heard of");
    }
    if (fault && fault->kind == HALF) {
        batch->poisoned = 1;
        for (unsigned i = 0; i < nr / 2; i++) late[late_count++] = params[i];
        DONE((int)fault->value);
    }
    in_flight += nr;
    if (compat && in_flight > 64) { broken("more than 64 in flight: this would hang"); hang(); }
    memcpy(batch->entries, params, nr * sizeof *params);
    memset(batch->reported, 0, sizeof batch->reported);
    batch->count = nr;
    batch->waits = fault && fault->kind == LATE ? (int)fault->value : 0;
    DONE(0);
}
EXPORT answer_t cuFileBatchIOGetStatus(batch_t *batch, unsigned least, unsigned *nr, event_t *events,
                                       struct timespec *timeout)
{
    ENTER();
    OPENED();
    if (batch->poisoned) broken("a batch handle was asked after an error");
    if (!timeout) broken("a wait without an end");
    (void)least;
    unsigned room = *nr, given = 0;
    *nr = 0;
    if (batch->waits > 0) { batch->waits--; DONE(0); }
    write_late();
    for (unsigned k = 0; k < batch->count && given < room; k++) {
        unsigned i = batch->count - 1 - k;      /* the last comes first */
        params_t *entry = &batch->entries[i];
        io_t *io = &entry->u.batch;
        size_t size = io->size;
        if (batch->reported[i]) continue;
        fault_t *event = entered("event");
        if (event && event->kind == LOST) {     /* and written to later, if it says so */
            if (event->value) late[late_count++] = *entry;
            batch->reported[i] = 1;
            continue;
        }
        if (event && event->kind == SHORT && (size_t)event->value < size) size = event->value;
        if (size > sizes[7] << 10) size = sizes[7] << 10;   /* and no word about it */
        int64_t got = event && (event->kind == CODE || event->kind == STATUS)
            ? (event->kind == CODE ? -event->value : 0)
            : move(entry->fh, io->base, io->offset, size, io->file_offset);
        events[given] = (event_t){ entry->cookie, got < 0 ? 0x40 : 0x10, (size_t)got };
        if (event && event->kind == STATUS) events[given].status = (int)event->value;
        if (event && event->kind == STRANGE) events[given].cookie = (void *)event->value;
        given++;
        batch->reported[i] = 1;
        in_flight--;
        if (event && event->kind == TWICE && given < room) { events[given] = events[given - 1]; given++; }
    }
    unsigned left = 0;
    for (unsigned i = 0; i < batch->count; i++) left += !batch->reported[i];
    if (!left) batch->count = 0;
    *nr = given;
    DONE(0);
}
EXPORT void cuFileBatchIODestroy(batch_t *batch)
{
    pthread_mutex_lock(&lock);
    if (++destroying > together) together = destroying;
    entered(__func__);
    destroying--;
    if (is_device) is_device(batch, 1);  /* a call of CUDA */
    if (batch->count) broken("a batch was destroyed with something in flight");
    batches--;
    free(batch);
    pthread_mutex_unlock(&lock);
}
