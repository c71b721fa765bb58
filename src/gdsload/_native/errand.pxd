# Calls of cuFile that may never come back: each runs on a thread of its own, which is left to
# itself when its time is up, with what it needs.

from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free
from posix.time cimport timespec

from gdsload._native.atomics cimport gds_add
from gdsload._native.cuda cimport CudaApi, relax
from gdsload._native.cufile cimport (
    CU_FILE_HANDLE_TYPE_OPAQUE_FD,
    CUfileDescr,
    CuFileApi,
    CUfileError,
)
from gdsload._native.pthreads cimport (
    deadline_in,
    monotonic_cond_init,
    pthread_cond_broadcast,
    pthread_cond_destroy,
    pthread_cond_t,
    pthread_cond_timedwait,
    pthread_detach,
    pthread_mutex_destroy,
    pthread_mutex_init,
    pthread_mutex_lock,
    pthread_mutex_t,
    pthread_mutex_unlock,
    pthread_t,
    start_quiet_thread,
)

cdef enum:
    OPEN_DRIVER = 1
    CLOSE_DRIVER = 2
    REGISTER_FILE = 3
    REGISTER_BUFFER = 4

cdef struct Errand:
    int64_t references          # who waits, and who runs
    int what
    CuFileApi *api
    CudaApi *cuda
    void *context               # made current around the call; NULL: none is needed
    int fd                      # of REGISTER_FILE, and the handle that it makes
    void *handle
    void *base                  # of REGISTER_BUFFER
    size_t length
    int err                     # the two halves of what it answered
    int cu_err
    int done
    pthread_mutex_t lock
    pthread_cond_t told


cdef inline void release_errand(Errand *self) noexcept nogil:
    if gds_add(&self.references, -1) > 0:
        return
    pthread_cond_destroy(&self.told)
    pthread_mutex_destroy(&self.lock)
    free(self)


cdef inline void *run_errand(void *arg) noexcept nogil:
    cdef Errand *self = <Errand *>arg
    cdef CUfileDescr descr
    cdef CUfileError answer
    if self.context != NULL:
        self.cuda.set_current(self.context)
        relax(self.cuda)
    if self.what == OPEN_DRIVER:
        answer = self.api.driver_open()
    elif self.what == REGISTER_FILE:
        descr.type = CU_FILE_HANDLE_TYPE_OPAQUE_FD
        descr.handle.handle = NULL
        descr.handle.fd = self.fd
        descr.fs_ops = NULL
        answer = self.api.handle_register(&self.handle, &descr)
    elif self.what == REGISTER_BUFFER:
        answer = self.api.buf_register(self.base, self.length, 0)
    else:
        # With statistics on, libcufile has been seen to crash in its exit handlers.
        if self.api.stats_stop != NULL:
            self.api.stats_stop()
        answer = self.api.driver_close()
    pthread_mutex_lock(&self.lock)
    self.err, self.cu_err = answer.err, answer.cu_err
    self.done = 1
    pthread_cond_broadcast(&self.told)
    pthread_mutex_unlock(&self.lock)
    release_errand(self)
    return NULL


cdef inline Errand *new_errand(int what, CuFileApi *api) noexcept nogil:
    """One to fill in and to start; NULL where there is no memory."""
    cdef Errand *self = <Errand *>calloc(1, sizeof(Errand))
    if self != NULL:
        self.references = 2
        self.what = what
        self.api = api
        pthread_mutex_init(&self.lock, NULL)
        monotonic_cond_init(&self.told)
    return self


cdef inline int start_errand(Errand *self) noexcept nogil:
    """Starts it: 0 or an errno, and then it is gone."""
    cdef pthread_t thread
    cdef int error = start_quiet_thread(&thread, run_errand, self)
    if error != 0:
        self.references = 1
        release_errand(self)
        return error
    pthread_detach(thread)
    return 0


cdef inline int wait_for_errand(
    Errand *self, int64_t wait_ns, CUfileError *answer, void **handle
) noexcept nogil:
    """Whether it came back in time; it must not be looked at afterwards."""
    cdef timespec until
    cdef int done
    deadline_in(&until, wait_ns)
    pthread_mutex_lock(&self.lock)
    while not self.done:
        if pthread_cond_timedwait(&self.told, &self.lock, &until) != 0:
            break
    done = self.done
    answer.err, answer.cu_err = self.err, self.cu_err
    handle[0] = self.handle if done else NULL
    pthread_mutex_unlock(&self.lock)
    release_errand(self)
    return done
