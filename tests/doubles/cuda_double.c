/* A CUDA driver whose device memory is host memory, for tests on machines without a GPU.
 *
 * It keeps the part of the driver's contract that gdsload uses. Memory is allocated and freed once.
 * Copies come from memory that is pinned or the device's own, and end inside an allocation. They run
 * later than they were queued, in the order of their stream, after the events that the stream waits
 * for. An event is done when all work before it in its stream is. Tests give a stream work of
 * others, which they end themselves: it writes or reads memory then. A copy runs when its event was
 * queried `patience` times, so that a slot that was used again too early shows as wrong bytes.
 * Contexts must be retained and current, streams and events of the current one. Nothing is recorded
 * in a stream that is captured. A call that would break the capture of a graph breaks the contract.
 * When the process ends, every call is refused, and everything that was not released is reported.
 * Built with names from the real libcufile (stubs.inc), it also carries that library's
 * compatibility mode.
 */
#include "double.h"
#include <sys/mman.h>

#define OUT_OF_MEMORY 2
#define INVALID 1
#define DEINITIALIZED 4
#define NO_CONTEXT 201
#define INVALID_HANDLE 400
#define NOT_FOUND 500
#define NOT_READY 600
#define ALREADY_REGISTERED 712
#define NOT_REGISTERED 713
#define NOT_SUPPORTED 801
#define CAPTURE_UNSUPPORTED 900
#define ROOM 4096

typedef struct { char *base; size_t length; char *raw; void *context; } range_t;
enum { COPY, WAIT, WORK };
enum { NOTHING, WRITES, READS };                 /* what WORK does to its bytes when it ends */
typedef struct stream stream_t;
typedef struct {
    int kind;
    char *to; const char *from; size_t length;   /* COPY; WORK has only `to` */
    int does; char value;                        /* WORK */
    stream_t *of; long after;                    /* WAIT: until so much of that stream is done */
} op_t;
typedef struct context context_t;
struct stream { context_t *context; op_t *ops; long room, asked_for, done; int captured, destroyed; };
struct context { int ordinal, retained, alive; stream_t own; };   /* its default stream */
typedef struct { int asked; stream_t *of; long after; int recorded; context_t *context; } event_t;

static context_t contexts[8];
static range_t device[ROOM], pinned[ROOM];
static int device_count = 1, ranges, pins, streams, events, retained;
static size_t used, kept, residue, capacity = (size_t)1 << 40;
static size_t cached;           /* page cache in memory that the host shares; 0: it does not */
static int patience, held, sticky, weightless;
static stream_t *all[ROOM];        /* streams that were created: never freed, but used again */
static int all_count, working;     /* whether work of others goes on */
static int64_t copies, copied, allocations, frees, batches;
static __thread context_t *stack[1024];  /* libcufile pushes one for each entry of a batch */
static __thread int depth, capture_mode;
static int capturing, over, reports;
enum { RELAXED = 2 };

static range_t *range_of(range_t *table, int count, const void *at, size_t length)
{
    for (int i = 0; i < count; i++)
        if ((const char *)at >= table[i].base && (const char *)at + length <= table[i].base + table[i].length)
            return &table[i];
    return NULL;
}
static void push(stream_t *stream, op_t op)
{
    if (stream->asked_for - stream->done == stream->room) {
        long room = stream->room ? 2 * stream->room : 64;
        op_t *ops = malloc(room * sizeof *ops);
        for (long at = stream->done; at < stream->asked_for; at++)
            ops[at % room] = stream->ops[at % stream->room];
        free(stream->ops);
        stream->ops = ops;
        stream->room = room;
    }
    stream->ops[stream->asked_for++ % stream->room] = op;
}
/* Runs the operations of a stream up to `end`; 1 if all have run. A call that waits for the device
 * itself (`wait`) waits until the work of others has ended. */
static int run_until(stream_t *stream, long end, int wait)
{
    for (; stream->done < end; stream->done++) {
        op_t *op = &stream->ops[stream->done % stream->room];
        if (op->kind == WORK && working && !wait) return 0;
        if (op->kind == WORK && op->does == WRITES) memset(op->to, op->value, op->length);
        for (size_t i = 0; op->kind == WORK && op->does == READS && i < op->length; i++)
            if (op->to[i] != op->value) { broken("bytes changed before work had read them"); break; }
        if (op->kind == WAIT && !run_until(op->of, op->after, wait)) return 0;
        if (op->kind != COPY) continue;
        if (!range_of(device, ranges, op->to, op->length))
            broken("a copy of %zu bytes ran after its memory was freed", op->length);
        else
            memmove(op->to, op->from, op->length);
    }
    return 1;
}
static void run_all(void)
{
    for (int i = 0; i < all_count; i++) run_until(all[i], all[i]->asked_for, 1);
    for (int i = 0; i < 8; i++) run_until(&contexts[i].own, contexts[i].own.asked_for, 1);
}
static int enter(const char *call, int needs_context)
{
    pthread_mutex_lock(&lock);
    fault_t *fault = entered(call);
    if (fault && fault->kind == HANG) { hang(); fault = NULL; }
    if (needs_context && depth == 0) {
        broken("%s without a current context", call);
        return NO_CONTEXT;
    }
    if (over) return DEINITIALIZED;
    if (sticky) return sticky;
    return fault ? (int)fault->value : 0;
}
static int leave(int code) { pthread_mutex_unlock(&lock); return code; }
#define ENTER(needs) int code = enter(__func__, needs); if (code) return leave(code)
/* What CUDA calls potentially unsafe, in a thread that did not say that it knows. */
static int breaks_capture(const char *call)
{
    if (!capturing || capture_mode == RELAXED) return 0;
    broken("%s broke a graph that another thread was capturing", call);
    return CAPTURE_UNSUPPORTED;
}
#define UNSAFE() if ((code = breaks_capture(__func__))) return leave(code)
static int usable(const char *call, context_t *context)
{
    if (context && !context->retained) broken("%s of a context that is not retained", call);
    return !context || context->retained;
}
/* Stream 0 is the current context's own. */
static int of_this_context(const char *call, context_t *context)
{
    if (context == stack[depth - 1]) return 1;
    broken("%s with a stream or an event of another context", call);
    return 0;
}
static stream_t *stream_of(stream_t *handle)
{
    return handle > (stream_t *)2 ? handle : &stack[depth - 1]->own;
}
static context_t *context_of(stream_t *stream)
{
    return stream > (stream_t *)2 ? stream->context : stack[depth - 1];
}
static void at_exit(void)
{
    over = 1;
    if (reports)
        fprintf(stderr, "left: %d streams, %d events, %d pins, %d contexts\n", streams, events, pins,
                retained);
}

/* --- what tests set and see ------------------------------------------------------------------ */

EXPORT void cuda_double_set(int devices, size_t bytes, int wanted_patience)
{
    pthread_mutex_lock(&lock);
    device_count = devices; capacity = bytes; patience = wanted_patience;
    held = sticky = capturing = working = 0; cached = 0;
    for (int i = 0; i < 8; i++) contexts[i].own.captured = 0;
    used -= kept; kept = residue = 0;
    pthread_mutex_unlock(&lock);
}
EXPORT void cuda_double_cached(size_t bytes)
{
    pthread_mutex_lock(&lock);
    cached = bytes;
    pthread_mutex_unlock(&lock);
}
EXPORT void cuda_double_hold(int hold)
{
    pthread_mutex_lock(&lock);
    held = hold;
    pthread_mutex_unlock(&lock);
}
/* Gives the default stream of a device work that goes on until it is ended. At its end it writes
 * `value` to all bytes of a range, or reads it from them. */
EXPORT void cuda_double_work(int ordinal, int does, char *at, size_t length, int value)
{
    pthread_mutex_lock(&lock);
    working = 1;
    push(&contexts[ordinal].own,
         (op_t){ .kind = WORK, .to = at, .length = length, .does = does, .value = (char)value });
    pthread_mutex_unlock(&lock);
}
/* It has ended, and with it all that waited for it. */
EXPORT void cuda_double_end_work(void)
{
    pthread_mutex_lock(&lock);
    working = 0;
    run_all();
    pthread_mutex_unlock(&lock);
}
/* A graph is being captured on the default stream of a device. */
EXPORT void cuda_double_capture_stream(int ordinal, int wanted) { contexts[ordinal].own.captured = wanted; }
/* Device memory that a driver takes for itself with the first stream, and keeps. */
EXPORT void cuda_double_residue(size_t bytes) { residue = bytes; }
EXPORT void cuda_double_break(int code) { sticky = code; }
/* Copies are counted and not made: to measure only the code that requests them. */
EXPORT void cuda_double_weightless(int wanted) { weightless = wanted; }
/* Another thread captures a graph meanwhile, in the default mode. */
EXPORT void cuda_double_capture(int wanted) { capturing = wanted; }
/* At the end of the process: what is left goes to stderr. */
EXPORT void cuda_double_report(void) { reports = 1; }
EXPORT int cuda_double_is_device(const void *at, size_t length)
{
    pthread_mutex_lock(&lock);
    int found = range_of(device, ranges, at, length) != NULL;
    pthread_mutex_unlock(&lock);
    return found;
}
/* The same, and it is of the context that is current in this thread: for cuFile. NULL: is there one? */
EXPORT int cuda_double_reaches(const void *at, size_t length)
{
    pthread_mutex_lock(&lock);
    breaks_capture("cuFile");
    range_t *found = range_of(device, ranges, at, length);
    int reached = at == NULL ? depth > 0 : found && depth && found->context == stack[depth - 1];
    pthread_mutex_unlock(&lock);
    return reached;
}
EXPORT void cuda_double_log(int64_t *out)
{
    pthread_mutex_lock(&lock);
    int64_t values[] = { ranges, pins, streams, events, retained, copies, copied, (int64_t)used,
                         allocations, frees, batches };
    memcpy(out, values, sizeof values);
    pthread_mutex_unlock(&lock);
}

/* --- the driver ------------------------------------------------------------------------------ */

EXPORT int cuInit(unsigned flags)
{
    static int started;
    ENTER(0);
    if (!started) started = !atexit(at_exit);
    return leave(flags ? INVALID : 0);
}
EXPORT int cuDriverGetVersion(int *version) { ENTER(0); *version = 13000; return leave(0); }
EXPORT int cuDeviceGetCount(int *count) { ENTER(0); *count = device_count; return leave(0); }
EXPORT int cuDeviceGet(int *out, int ordinal)
{
    ENTER(0);
    if (ordinal < 0 || ordinal >= device_count) return leave(101);
    *out = ordinal;
    return leave(0);
}
EXPORT int cuDeviceGetName(char *name, int length, int ordinal)
{
    ENTER(0);
    snprintf(name, length, "Double %d", ordinal);
    return leave(0);
}
EXPORT int cuDeviceGetUuid(char *uuid, int ordinal)
{
    ENTER(0);
    memset(uuid, 0x40 + ordinal, 16);
    return leave(0);
}
EXPORT int cuDeviceGetUuid_v2(char *uuid, int ordinal) { return cuDeviceGetUuid(uuid, ordinal); }
EXPORT int cuDeviceGetAttribute(int *value, int attribute, int ordinal)
{
    ENTER(0);
    (void)ordinal;
    switch (attribute) {
    case 18: *value = cached > 0; break;              /* memory shared with the host */
    case 83: *value = 1; break;                       /* managed memory */
    case 75: *value = 9; break;                       /* compute capability */
    case 33: *value = ordinal + 1; break;             /* PCI bus */
    case 41: case 99: case 116: *value = 1; break;    /* unified addresses, host register, RDMA */
    case 16: *value = 1; break;                       /* multiprocessors */
    default: *value = 0;
    }
    return leave(0);
}
EXPORT int cuDeviceGetPCIBusId(char *bus, int length, int ordinal)
{
    ENTER(0);
    snprintf(bus, length, "0000:%02X:00.0", ordinal + 1);
    return leave(0);
}
EXPORT int cuDevicePrimaryCtxGetState(int ordinal, unsigned *flags, int *active)
{
    ENTER(0);
    (void)ordinal;
    *flags = 0;
    *active = retained > 0;
    return leave(0);
}
EXPORT int cuDevicePrimaryCtxRetain(void **context, int ordinal)
{
    ENTER(0);
    if (ordinal < 0 || ordinal >= device_count) return leave(101);
    contexts[ordinal].ordinal = ordinal;
    contexts[ordinal].retained++;
    *context = &contexts[ordinal];
    retained++;
    return leave(0);
}
EXPORT int cuDevicePrimaryCtxRelease_v2(int ordinal)
{
    ENTER(0);
    context_t *context = &contexts[ordinal];
    if (context->retained == 0) {
        broken("a primary context was released more often than retained");
        return leave(NO_CONTEXT);
    }
    retained--;
    if (--context->retained == 0 && context->alive)
        broken("a context went with %d streams and events in it", context->alive);
    return leave(0);
}
EXPORT int cuCtxSetCurrent(void *context)
{
    ENTER(0);
    if (!usable(__func__, context)) return leave(NO_CONTEXT);
    if (depth == 0) depth = 1;
    stack[depth - 1] = context;
    if (!context) depth--;
    return leave(0);
}
EXPORT int cuCtxGetCurrent(void **context)
{
    ENTER(0);
    *context = depth ? stack[depth - 1] : NULL;
    return leave(0);
}
EXPORT int cuCtxGetDevice(int *ordinal)
{
    ENTER(1);
    *ordinal = stack[depth - 1]->ordinal;
    return leave(0);
}
EXPORT int cuCtxPushCurrent_v2(void *context)
{
    ENTER(0);
    if (depth == sizeof stack / sizeof *stack || !context) return leave(INVALID);
    if (!usable(__func__, context)) return leave(NO_CONTEXT);
    stack[depth++] = context;
    return leave(0);
}
EXPORT int cuCtxPopCurrent_v2(void **context)
{
    pthread_mutex_lock(&lock);   /* no fault here: no caller could handle it */
    if (depth == 0) { broken("a context was popped that was not there"); return leave(NO_CONTEXT); }
    *context = stack[--depth];
    return leave(0);
}
EXPORT int cuThreadExchangeStreamCaptureMode(int *mode)
{
    ENTER(0);
    int before = capture_mode;
    if (*mode < 0 || *mode > RELAXED) return leave(INVALID);
    capture_mode = *mode;
    *mode = before;
    return leave(0);
}
EXPORT int cuCtxSynchronize(void)
{
    ENTER(1);
    if (capturing) { broken("a device was waited for while a graph was captured"); return leave(CAPTURE_UNSUPPORTED); }
    run_all();
    return leave(0);
}
EXPORT int cuMemGetInfo_v2(size_t *available, size_t *total)
{
    ENTER(1);
    *total = capacity;
    *available = capacity - used - cached;
    return leave(0);
}
/* 256 bytes past a page: aligned as CUDA promises, and no better. */
static int allocated(uint64_t *address, size_t bytes)
{
    char *raw;
    if (bytes == 0) return INVALID;
    if (ranges == ROOM || used + bytes > capacity || posix_memalign((void **)&raw, 4096, bytes + 8192))
        return OUT_OF_MEMORY;
    if (!weightless) memset(raw, 0xA5, bytes + 8192);
    device[ranges++] = (range_t){ raw + 256, bytes, raw, stack[depth - 1] };
    used += bytes;
    allocations++;
    *address = (uint64_t)(raw + 256);
    return 0;
}
EXPORT int cuMemAlloc_v2(uint64_t *address, size_t bytes)
{
    ENTER(1);
    UNSAFE();
    return leave(allocated(address, bytes));
}
EXPORT int cuMemFree_v2(uint64_t address)
{
    ENTER(1);
    UNSAFE();
    for (int i = 0; i < ranges; i++) {
        range_t found = device[i];
        if (found.base != (char *)address) continue;
        run_all();                /* as cuMemFree does */
        for (char *at = found.base + found.length; !weightless && at < found.raw + found.length + 8192; at++)
            if (*at != (char)0xA5) { broken("bytes were written past an allocation"); break; }
        used -= found.length;
        frees++;
        device[i] = device[--ranges];
        free(found.raw);
        return leave(0);
    }
    broken("memory was freed that was not allocated");
    return leave(INVALID);
}
static int is_mapped(const char *at, size_t bytes)
{
    const char *first = (const char *)((uintptr_t)at & -(uintptr_t)4096);
    size_t pages = (at + bytes - first + 4095) / 4096;
    unsigned char *seen = malloc(pages);
    int mapped = seen && mincore((void *)first, pages * 4096, seen) == 0;
    free(seen);
    return mapped;
}
static int pin(char *at, size_t bytes, void *raw)
{
    if (bytes == 0 || !at) return INVALID;
    for (int i = 0; i < pins; i++)
        if (at < pinned[i].base + pinned[i].length && pinned[i].base < at + bytes) {
            broken("memory was pinned twice");
            return ALREADY_REGISTERED;
        }
    if (pins == ROOM) return OUT_OF_MEMORY;
    if (!is_mapped(at, bytes)) { broken("memory was pinned that is not mapped"); return INVALID; }
    pinned[pins++] = (range_t){ at, bytes, raw, NULL };
    return 0;
}
static int unpin(char *at, int ours)
{
    for (int i = 0; i < pins; i++)
        if (pinned[i].base == at && !pinned[i].raw == !ours) {
            run_all();
            if (!is_mapped(at, pinned[i].length)) broken("memory was unmapped while it was pinned");
            pinned[i] = pinned[--pins];
            return 0;
        }
    broken("memory was unpinned that was not pinned");
    return NOT_REGISTERED;
}
EXPORT int cuMemHostRegister_v2(void *at, size_t bytes, unsigned flags)
{
    ENTER(1);
    UNSAFE();
    if (flags & ~15u) return leave(INVALID);
    if (flags & 8) return leave(NOT_SUPPORTED);   /* read-only: many GPUs cannot */
    return leave(pin(at, bytes, NULL));
}
EXPORT int cuMemHostUnregister(void *at)
{
    ENTER(1);
    UNSAFE();
    return leave(unpin(at, 0));
}
EXPORT int cuMemHostAlloc(void **at, size_t bytes, unsigned flags)
{
    ENTER(1);
    UNSAFE();
    if (flags & ~7u) return leave(INVALID);
    if (posix_memalign(at, 4096, bytes)) return leave(OUT_OF_MEMORY);
    if ((code = pin(*at, bytes, *at))) free(*at);
    return leave(code);
}
EXPORT int cuMemAllocHost_v2(void **at, size_t bytes) { return cuMemHostAlloc(at, bytes, 0); }
EXPORT int cuMemFreeHost(void *at)
{
    ENTER(1);
    UNSAFE();
    if (!(code = unpin(at, 1))) free(at);
    return leave(code);
}
EXPORT int cuMemHostGetDevicePointer_v2(uint64_t *out, void *at, unsigned flags)
{
    ENTER(1);
    (void)flags;
    *out = (uint64_t)at;
    return leave(0);
}
EXPORT int cuMemcpy(uint64_t to, uint64_t from, size_t bytes)
{
    ENTER(1);
    UNSAFE();
    run_all();
    memmove((void *)to, (void *)from, bytes);
    return leave(0);
}
EXPORT int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes)
{
    return cuMemcpy(to, (uint64_t)from, bytes);
}
EXPORT int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes)
{
    return cuMemcpy((uint64_t)to, from, bytes);
}
EXPORT int cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, void *stream)
{
    if (weightless) {   /* without the lock, and the system call that every other call makes */
        __atomic_add_fetch(&copies, 1, __ATOMIC_RELAXED);
        __atomic_add_fetch(&copied, bytes, __ATOMIC_RELAXED);
        return 0;
    }
    ENTER(1);
    if (!stream) broken("a copy on the default stream");
    if (!of_this_context(__func__, context_of(stream))) return leave(INVALID_HANDLE);
    if (!range_of(device, ranges, (void *)to, bytes)) {
        broken("a copy of %zu bytes to memory that is no device's", bytes);
        return leave(INVALID);
    }
    if (!range_of(pinned, pins, (void *)from, bytes) && !range_of(device, ranges, (void *)from, bytes))
        broken("a copy of %zu bytes from memory that is not pinned", bytes);
    stream_t *queue = stream_of(stream);
    push(queue, (op_t){ .kind = COPY, .to = (char *)to, .from = (char *)from, .length = bytes });
    copies++;
    copied += bytes;
    if (patience == 0 && !held) run_until(queue, queue->asked_for, 0);
    return leave(0);
}
#ifndef OLD_DRIVER
typedef struct { int source_order, source[2], target[2]; unsigned flags; } attributes_t;
/* The copies of a batch have no order: here the last one is made first. */
EXPORT int cuMemcpyBatchAsync(uint64_t *to, uint64_t *from, size_t *bytes, size_t count,
                              attributes_t *attributes, size_t *first, size_t attribute_count,
                              size_t *failed, void *stream)
{
    if (!weightless) {
        ENTER(1);
        if (!stream) broken("a batch of copies on the default stream");
        if (count == 0) broken("a batch without copies");
        batches++;
        leave(0);
    }
    if (attribute_count != 1 || first[0] != 0 || attributes->source_order != 1) return INVALID;
    for (size_t i = count; i-- > 0;) {
        int code = cuMemcpyAsync(to[i], from[i], bytes[i], stream);
        if (code) { *failed = i; return code; }
    }
    return 0;
}
#endif
EXPORT int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream)
{
    (void)stream;
    return cuMemcpy(to, (uint64_t)from, bytes);
}
EXPORT int cuStreamCreate(void **stream, unsigned flags)
{
    ENTER(1);
    if (flags != 1) broken("a stream that waits for the default one");
    int place = 0;
    while (place < all_count && !(all[place]->destroyed && all[place]->done == all[place]->asked_for))
        place++;
    if (place == ROOM) return leave(OUT_OF_MEMORY);
    if (place == all_count) all[all_count++] = calloc(1, sizeof(stream_t));
    all[place]->context = stack[depth - 1];
    all[place]->destroyed = 0;
    *stream = all[place];
    stack[depth - 1]->alive++;
    used += residue; kept += residue; residue = 0;
    streams++;
    return leave(0);
}
EXPORT int cuStreamDestroy_v2(void *stream)
{
    ENTER(1);
    run_until(stream, ((stream_t *)stream)->asked_for, 0);   /* the rest goes on without it */
    ((stream_t *)stream)->context->alive--;
    ((stream_t *)stream)->destroyed = 1;
    if (--streams < 0) broken("a stream was destroyed twice");
    return leave(0);
}
EXPORT int cuStreamSynchronize(void *stream)
{
    ENTER(1);
    run_until(stream_of(stream), stream_of(stream)->asked_for, 1);
    return leave(0);
}
#ifndef OLD_DRIVER
EXPORT int cuStreamIsCapturing(void *stream, int *status)
{
    ENTER(1);
    *status = stream_of(stream)->captured;
    return leave(0);
}
#endif
EXPORT int cuStreamWaitEvent(void *stream, event_t *event, unsigned flags)
{
    ENTER(1);
    if (flags) return leave(INVALID);
    if (!of_this_context(__func__, context_of(stream))) return leave(INVALID_HANDLE);
    if (!event->recorded) broken("a stream waits for an event that was never recorded");
    else push(stream_of(stream), (op_t){ .kind = WAIT, .of = event->of, .after = event->after });
    return leave(0);
}
EXPORT int cuEventCreate(event_t **event, unsigned flags)
{
    ENTER(1);
    if (flags & ~7u) return leave(INVALID);
    *event = calloc(1, sizeof **event);
    (*event)->context = stack[depth - 1];
    stack[depth - 1]->alive++;
    events++;
    return leave(0);
}
EXPORT int cuEventRecord(event_t *event, void *stream)
{
    ENTER(1);
    if (context_of(stream) != event->context) {
        broken("an event of one context was recorded in a stream of another");
        return leave(INVALID_HANDLE);
    }
    if (stream_of(stream)->captured) broken("an event became part of a graph that is captured");
    *event = (event_t){ 0, stream_of(stream), stream_of(stream)->asked_for, 1, event->context };
    return leave(0);
}
EXPORT int cuEventQuery(event_t *event)
{
    ENTER(0);
    UNSAFE();
    if (!event->of || event->of->done >= event->after) return leave(0);
    if (held || event->asked++ < patience) return leave(NOT_READY);
    return leave(run_until(event->of, event->after, 0) ? 0 : NOT_READY);
}
EXPORT int cuEventSynchronize(event_t *event)
{
    ENTER(0);
    if (event->of) run_until(event->of, event->after, 1);
    return leave(0);
}
EXPORT int cuEventDestroy_v2(event_t *event)
{
    ENTER(0);
    if (--events < 0) broken("an event was destroyed twice");
    event->context->alive--;
    free(event);
    return leave(0);
}
EXPORT int cuPointerGetAttribute(void *value, int attribute, uint64_t at)
{
    ENTER(0);
    range_t *found = range_of(device, ranges, (void *)at, 1);
    range_t *host = range_of(pinned, pins, (void *)at, 1);
    if (!found && !host) return leave(INVALID);
    if (!found) found = host;
    switch (attribute) {
    case 1: *(void **)value = &contexts[0]; break;
    case 2: *(unsigned *)value = found == host ? 1 : 2; break;
    case 3: case 4: *(uint64_t *)value = at; break;
    case 7: *(uint64_t *)value = (uint64_t)found->base; break;
    case 9: *(int *)value = 0; break;
    case 11: *(uint64_t *)value = (uint64_t)found->base; break;
    case 12: *(size_t *)value = found->length; break;
    default: *(int *)value = 0;
    }
    return leave(0);
}
EXPORT int cuPointerGetAttributes(unsigned count, int *attributes, void **values, uint64_t at)
{
    for (unsigned i = 0; i < count; i++)
        if (cuPointerGetAttribute(values[i], attributes[i], at)) memset(values[i], 0, 4);
    return 0;
}
EXPORT int cuMemGetAddressRange_v2(uint64_t *base, size_t *length, uint64_t at)
{
    ENTER(0);
    range_t *found = range_of(device, ranges, (void *)at, 1);
    if (!found) return leave(NOT_FOUND);
    if (base) *base = (uint64_t)found->base;
    if (length) *length = found->length;
    return leave(0);
}
EXPORT int cuGetErrorName(int error, const char **name)
{
    *name = error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_OF_THE_DOUBLE";
    return 0;
}
EXPORT int cuGetErrorString(int error, const char **text)
{
    *text = error == OUT_OF_MEMORY ? "out of memory" : "the double fails by script";
    return 0;
}

/* What the real libcufile takes besides, in its compatibility mode, and stubs for whatever else it
 * looks up. */
#include <dlfcn.h>

typedef void (*callback_t)(void *);
typedef void (*stream_callback_t)(void *, int, void *);
EXPORT int cuCtxGetStreamPriorityRange(int *least, int *greatest) { *least = *greatest = 0; return 0; }
EXPORT int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority)
{
    (void)flags; (void)priority;
    return cuStreamCreate(stream, 1);
}
EXPORT int cuStreamGetPriority(void *stream, int *priority) { (void)stream; *priority = 0; return 0; }
EXPORT int cuStreamGetCtx(void *stream, void **context)
{
    *context = ((stream_t *)stream)->context;
    return 0;
}
EXPORT int cuStreamQuery(void *stream) { return cuStreamSynchronize(stream); }
EXPORT int cuPointerSetAttribute(const void *value, int attribute, uint64_t at)
{
    (void)value; (void)attribute; (void)at;
    return 0;
}
EXPORT int cuMemHostGetFlags(unsigned *flags, void *at) { (void)at; *flags = 0; return 0; }
EXPORT int cuMemcpyDtoD_v2(uint64_t to, uint64_t from, size_t bytes) { return cuMemcpy(to, from, bytes); }
EXPORT int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void *stream)
{
    (void)stream;
    return cuMemcpy(to, from, bytes);
}
EXPORT int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream)
{
    (void)stream;
    return cuMemcpy((uint64_t)to, from, bytes);
}
EXPORT int cuMemsetD8_v2(uint64_t to, unsigned char value, size_t bytes)
{
    memset((void *)to, value, bytes);
    return 0;
}
EXPORT int cuLaunchHostFunc(void *stream, callback_t call, void *argument)
{
    cuStreamSynchronize(stream);
    call(argument);
    return 0;
}
EXPORT int cuStreamAddCallback(void *stream, stream_callback_t call, void *argument, unsigned flags)
{
    (void)flags;
    cuStreamSynchronize(stream);
    call(stream, 0, argument);
    return 0;
}

#ifdef STUBS
#define STUB(name) EXPORT int name(void) { return NOT_SUPPORTED; }
#include STUBS
EXPORT int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status)
{
    char newer[128];
    Dl_info self;
    (void)version; (void)flags;
    dladdr((void *)cuGetProcAddress_v2, &self);
    void *library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    snprintf(newer, sizeof newer, "%s_v2", name);
    *found = dlsym(library, newer);
    if (!*found) *found = dlsym(library, name);
    if (status) *status = *found ? 0 : 1;
    return *found ? 0 : NOT_FOUND;
}
EXPORT int cuGetProcAddress(const char *name, void **found, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(name, found, version, flags, NULL);
}
EXPORT int cuGetExportTable(const void **table, const void *id)
{
    (void)id;
    *table = NULL;
    return NOT_FOUND;
}
#endif
