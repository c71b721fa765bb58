# POSIX threads, as far as the pump and its engines use them. Conditions are timed on the monotonic
# clock: a wall clock that jumps, or a suspended machine, must not end a wait.

from posix.time cimport timespec

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_t:
        pass
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct pthread_cond_t:
        pass
    int pthread_join(pthread_t, void **)
    int pthread_detach(pthread_t)
    int pthread_mutex_init(pthread_mutex_t *, void *)
    int pthread_mutex_destroy(pthread_mutex_t *)
    int pthread_mutex_lock(pthread_mutex_t *)
    int pthread_mutex_unlock(pthread_mutex_t *)
    int pthread_cond_destroy(pthread_cond_t *)
    int pthread_cond_signal(pthread_cond_t *)
    int pthread_cond_broadcast(pthread_cond_t *)
    int pthread_cond_wait(pthread_cond_t *, pthread_mutex_t *)
    int pthread_cond_timedwait(pthread_cond_t *, pthread_mutex_t *, const timespec *)

cdef extern from * nogil:
    """
    #include <pthread.h>
    #include <stdint.h>
    #include <signal.h>
    #include <time.h>
    static inline int monotonic_cond_init(pthread_cond_t *cond) {
        pthread_condattr_t attr;
        pthread_condattr_init(&attr);
        pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
        int error = pthread_cond_init(cond, &attr);
        pthread_condattr_destroy(&attr);
        return error;
    }
    /* A native thread must not take the process's signals: Python wants them on its main thread.
       It does not block the signals of its own faults: Python's faulthandler can print those. */
    static inline int start_quiet_thread(pthread_t *thread, void *(*run)(void *), void *arg) {
        sigset_t all, before;
        sigfillset(&all);
        const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};
        for (unsigned i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(&all, faults[i]);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        int error = pthread_create(thread, NULL, run, arg);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        return error;
    }
    static inline int64_t ns_of(clockid_t clock) {
        struct timespec t;
        clock_gettime(clock, &t);
        return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
    }
    static inline int64_t monotonic_ns(void) { return ns_of(CLOCK_MONOTONIC); }
    static inline int64_t cpu_ns(void) { return ns_of(CLOCK_THREAD_CPUTIME_ID); }
    static inline void deadline_in(struct timespec *until, int64_t wait_ns) {
        int64_t at = monotonic_ns() + wait_ns;
        until->tv_sec = at / 1000000000;
        until->tv_nsec = at % 1000000000;
    }
    static inline void sleep_ns(int64_t wait_ns) {
        struct timespec wait = {wait_ns / 1000000000, wait_ns % 1000000000};
        nanosleep(&wait, NULL);
    }
    """
    int monotonic_cond_init(pthread_cond_t *cond)
    int start_quiet_thread(pthread_t *, void *(*)(void *) noexcept nogil, void *)
    long long monotonic_ns()
    long long cpu_ns()  # of this thread
    void deadline_in(timespec *until, long long wait_ns)
    void sleep_ns(long long wait_ns)

cdef enum:
    SIGNAL_WAIT_NS = 100000000  # Ctrl-C waits this long at most
    MOST_THREADS = 64           # of `run_threads`

cdef inline void run_threads(
    void *(*work)(void *) noexcept nogil, void *arg, long long threads
) noexcept nogil:
    """Calls `work` in up to so many threads, this one among them, and waits for all of them."""
    cdef pthread_t[MOST_THREADS] others
    cdef int started = 0
    while started < min(threads, <long long>MOST_THREADS) - 1:
        if start_quiet_thread(&others[started], work, arg) != 0:
            break
        started += 1
    work(arg)
    while started > 0:
        started -= 1
        pthread_join(others[started], NULL)
