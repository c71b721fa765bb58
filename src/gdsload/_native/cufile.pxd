# cuFile's own types, as its header declares them in every release from 1.11 to 1.20 (a test
# compares them with the headers of the nvidia-cufile packages), and its functions as a table that is filled
# at run time. A function that this libcufile lacks is NULL.

from libc.stdint cimport int64_t
from libc.stdlib cimport free
from posix.time cimport timespec

from gdsload._native.atomics cimport gds_add
from gdsload._native.cuda cimport CudaApi
from gdsload._native.pthreads cimport (
    pthread_mutex_destroy,
    pthread_mutex_lock,
    pthread_mutex_t,
    pthread_mutex_unlock,
)

cdef enum:
    CU_FILE_CUDA_DRIVER_ERROR = 5011
    CU_FILE_HANDLE_TYPE_OPAQUE_FD = 1
    CUFILE_READ = 0
    CUFILE_BATCH = 1
    CUFILE_INVALID = 0x04
    CUFILE_CANCELED = 0x08
    CUFILE_COMPLETE = 0x10
    CUFILE_TIMEOUT = 0x20
    CUFILE_FAILED = 0x40

cdef enum:
    # The statistics grew with 1.19; STATS_BYTES leaves room for a newer libcufile.
    STATS_BYTES = 131072
    LEVEL_1_BYTES = 512
    LEVEL_1_BYTES_1190 = 624
    HISTOGRAM_BYTES = 512
    GPU_BYTES = 248
    MOST_GPUS = 16

cdef struct CUfileError:
    int err                    # CUfileOpError
    int cu_err                 # CUresult, where err is CU_FILE_CUDA_DRIVER_ERROR

cdef union CUfileDescrHandle:
    int fd
    void *handle

cdef struct CUfileDescr:
    int type
    CUfileDescrHandle handle
    const void *fs_ops

cdef struct CUfileNvfsProps:
    unsigned int major_version
    unsigned int minor_version
    size_t poll_thresh_size
    size_t max_direct_io_size
    unsigned int dstatusflags
    unsigned int dcontrolflags

cdef struct CUfileDrvProps:
    CUfileNvfsProps nvfs
    unsigned int fflags
    unsigned int max_device_cache_size
    unsigned int per_buffer_cache_size
    unsigned int max_device_pinned_mem_size
    unsigned int max_batch_io_size
    unsigned int max_batch_io_timeout_msecs

cdef struct CUfileBatch:
    void *devPtr_base
    int64_t file_offset
    int64_t devPtr_offset
    size_t size

cdef union CUfileIOParamsU:
    CUfileBatch batch

cdef struct CUfileIOParams:
    int mode
    CUfileIOParamsU u
    void *fh
    int opcode
    void *cookie

cdef struct CUfileIOEvents:
    void *cookie
    int status
    size_t ret                 # bytes, or a negative error in an unsigned field

cdef struct CuFileApi:
    # Required.
    CUfileError (*driver_open)() noexcept nogil
    CUfileError (*handle_register)(void **handle, CUfileDescr *descr) noexcept nogil
    void (*handle_deregister)(void *handle) noexcept nogil
    CUfileError (*buf_register)(const void *base, size_t length, int flags) noexcept nogil
    CUfileError (*buf_deregister)(const void *base) noexcept nogil
    int64_t (*read)(
        void *handle, void *base, size_t size, int64_t file_offset, int64_t offset
    ) noexcept nogil
    CUfileError (*get_properties)(CUfileDrvProps *props) noexcept nogil
    # Optional.
    CUfileError (*driver_close)() noexcept nogil
    CUfileError (*get_version)(int *version) noexcept nogil
    CUfileError (*batch_setup)(void **batch, unsigned int nr) noexcept nogil
    CUfileError (*batch_submit)(
        void *batch, unsigned int nr, CUfileIOParams *entries, unsigned int flags
    ) noexcept nogil
    CUfileError (*batch_status)(
        void *batch, unsigned int min_nr, unsigned int *nr, CUfileIOEvents *events,
        timespec *timeout
    ) noexcept nogil
    void (*batch_destroy)(void *batch) noexcept nogil
    CUfileError (*get_size)(int parameter, size_t *value) noexcept nogil
    CUfileError (*set_size)(int parameter, size_t value) noexcept nogil
    CUfileError (*set_bool)(int parameter, unsigned char value) noexcept nogil
    CUfileError (*get_p2p)(int target, int *flags) noexcept nogil
    CUfileError (*stats_level)(int level) noexcept nogil
    CUfileError (*stats_start)() noexcept nogil
    CUfileError (*stats_l3)(void *stats) noexcept nogil
    # Not a function: the engines that are open, whose threads may call these functions.
    int64_t engines

# Context of an engine over cuFile: the functions, the device's context, and the handle of each file
# by the pump's number for its descriptor.
cdef struct CFiles:
    int64_t references
    CuFileApi *api
    CudaApi *cuda
    void *context
    int64_t patience_ns        # longest wait for an event of a batch
    pthread_mutex_t lock
    void **handles
    int room

cdef inline void *file_handle(CFiles *files, int number) noexcept nogil:
    """NULL if the number stands for no registered file."""
    cdef void *found = NULL
    pthread_mutex_lock(&files.lock)
    if 0 <= number < files.room:
        found = files.handles[number]
    pthread_mutex_unlock(&files.lock)
    return found

cdef inline void retain_files(CFiles *files) noexcept nogil:
    """For an engine."""
    gds_add(&files.references, 1)
    gds_add(&files.api.engines, 1)

cdef inline void release_files(CFiles *files) noexcept nogil:
    if gds_add(&files.references, -1) > 0:
        return
    pthread_mutex_destroy(&files.lock)
    free(files.handles)
    free(files)

cdef inline void leave_files(CFiles *files) noexcept nogil:
    """The last call of an engine: it calls cuFile no more."""
    cdef CuFileApi *api = files.api
    release_files(files)
    gds_add(&api.engines, -1)
