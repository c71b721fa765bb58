/* Shared by both doubles: a script of faults, a log of contract violations, and a gate to hang at.
 *
 * A fault strikes calls of one function: it lets `skip` pass, then strikes `times` of them. Each
 * function gives a kind its meaning. Nothing hangs for longer than HANG_SECONDS.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MOST_FAULTS 32
#define HANG_SECONDS 20
#define AFTER_FORK 77

enum { NO_FAULT = 0, CODE = 1, HANG = 2, SHORT = 3, ERRNO = 4, NEGATIVE = 5, LOST = 6, TWICE = 7,
       STRANGE = 8, STATUS = 9, HALF = 10, LATE = 11, CLOSES_INPUT = 12, DELAY = 13 };

typedef struct { const char *call; int kind; int64_t value; int skip; int times; } fault_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t gate = PTHREAD_COND_INITIALIZER;
static fault_t faults[MOST_FAULTS];
static int fault_count, struck, hung, gate_open, violations, total_calls;
static char said[4096];
static pid_t owner;

static void broken(const char *format, ...)
{
    va_list args;
    size_t used = strlen(said);
    va_start(args, format);
    vsnprintf(said + used, sizeof said - used, format, args);
    va_end(args);
    used = strlen(said);
    if (used + 2 < sizeof said) strcpy(said + used, "\n");
    violations++;
}

/* Under the lock. A process that was forked has no business here: its parent's test sees the exit
 * status. */
static fault_t *entered(const char *call)
{
    total_calls++;
    if (owner == 0) owner = getpid();
    if (owner != getpid()) _exit(AFTER_FORK);
    for (int i = 0; i < fault_count; i++) {
        if (strcmp(faults[i].call, call) || faults[i].times == 0) continue;
        if (faults[i].skip > 0) { faults[i].skip--; continue; }
        if (faults[i].times > 0) faults[i].times--;
        struck++;
        if (faults[i].kind == DELAY) {   /* a call that takes time, and no lock: others go on */
            struct timespec pause = { faults[i].value / 1000000000, faults[i].value % 1000000000 };
            pthread_mutex_unlock(&lock);
            nanosleep(&pause, NULL);
            pthread_mutex_lock(&lock);
            continue;
        }
        return &faults[i];
    }
    return NULL;
}

static void hang(void)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += HANG_SECONDS;
    hung++;
    while (!gate_open)
        if (pthread_cond_timedwait(&gate, &lock, &until)) break;
    hung--;
}

EXPORT void double_fault(const char *call, int kind, int64_t value, int skip, int times)
{
    pthread_mutex_lock(&lock);
    if (fault_count < MOST_FAULTS)
        faults[fault_count++] = (fault_t){ strdup(call), kind, value, skip, times };
    pthread_mutex_unlock(&lock);
}
EXPORT void double_let_go(void)
{
    pthread_mutex_lock(&lock);
    gate_open = 1;
    pthread_cond_broadcast(&gate);
    /* Returns when the calls that hung have ended: none of them acts on the next test. */
    for (int i = 0; hung && i < 10000; i++) {
        pthread_mutex_unlock(&lock);
        usleep(1000);
        pthread_mutex_lock(&lock);
    }
    pthread_mutex_unlock(&lock);
}
static void clear_script(void)
{
    for (int i = 0; i < fault_count; i++) free((char *)faults[i].call);
    fault_count = struck = violations = gate_open = 0;
    said[0] = 0;
}
static int counted(const int *word)
{
    pthread_mutex_lock(&lock);
    int value = *word;
    pthread_mutex_unlock(&lock);
    return value;
}
EXPORT int double_struck(void) { return counted(&struck); }
EXPORT int double_hung(void) { return counted(&hung); }
EXPORT int double_calls(void) { return counted(&total_calls); }
EXPORT int double_violations(void) { return counted(&violations); }
EXPORT const char *double_said(void) { return said; }
EXPORT void double_clear(void)
{
    pthread_mutex_lock(&lock);
    clear_script();
    pthread_mutex_unlock(&lock);
}
