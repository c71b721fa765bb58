# The part of the CUDA driver that gdsload uses, as a table of functions found at run time: nothing
# is linked. `Cuda` fills the table; the stage and the cuFile engines call through it on threads of
# their own. A CUresult is an int, 0 for success; handles are plain pointers.

from libc.stdint cimport uint64_t

cdef enum:
    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_READY = 600
    CU_DEVICE_ATTRIBUTE_INTEGRATED = 18
    CU_STREAM_NON_BLOCKING = 1
    CU_EVENT_DISABLE_TIMING = 2
    CU_MEMHOSTREGISTER_PORTABLE = 1
    CU_MEMHOSTALLOC_PORTABLE = 1
    CU_STREAM_CAPTURE_MODE_RELAXED = 2
    CU_STREAM_CAPTURE_STATUS_ACTIVE = 1
    CU_MEMCPY_SRC_ACCESS_ORDER_STREAM = 1

# How a batch of copies reads its sources, and where memory without a place of its own is: hints.
cdef struct CopyAttributes:
    int source_order
    int source_kind
    int source_number
    int target_kind
    int target_number
    unsigned int flags

cdef struct CudaApi:
    int (*init)(unsigned int flags) noexcept nogil
    int (*driver_version)(int *version) noexcept nogil
    int (*device_count)(int *count) noexcept nogil
    int (*device_get)(int *device, int ordinal) noexcept nogil
    int (*device_name)(char *name, int length, int device) noexcept nogil
    int (*device_bus)(char *bus, int length, int device) noexcept nogil
    int (*device_attribute)(int *value, int attribute, int device) noexcept nogil
    int (*primary_retain)(void **context, int device) noexcept nogil
    int (*primary_release)(int device) noexcept nogil
    int (*set_current)(void *context) noexcept nogil
    int (*push_current)(void *context) noexcept nogil
    int (*pop_current)(void **context) noexcept nogil
    int (*exchange_capture_mode)(int *mode) noexcept nogil
    int (*memory_info)(size_t *free, size_t *total) noexcept nogil
    int (*allocate)(uint64_t *address, size_t nbytes) noexcept nogil
    int (*release)(uint64_t address) noexcept nogil
    int (*host_register)(void *address, size_t nbytes, unsigned int flags) noexcept nogil
    int (*host_unregister)(void *address) noexcept nogil
    int (*host_allocate)(void **address, size_t nbytes, unsigned int flags) noexcept nogil
    int (*host_release)(void *address) noexcept nogil
    int (*copy_async)(uint64_t to, uint64_t source, size_t nbytes, void *stream) noexcept nogil
    int (*stream_create)(void **stream, unsigned int flags) noexcept nogil
    int (*stream_destroy)(void *stream) noexcept nogil
    int (*stream_synchronize)(void *stream) noexcept nogil
    int (*stream_wait)(void *stream, void *event, unsigned int flags) noexcept nogil
    int (*event_create)(void **event, unsigned int flags) noexcept nogil
    int (*event_record)(void *event, void *stream) noexcept nogil
    int (*event_query)(void *event) noexcept nogil
    int (*event_destroy)(void *event) noexcept nogil
    int (*address_range)(uint64_t *base, size_t *nbytes, uint64_t address) noexcept nogil
    int (*error_name)(int error, const char **name) noexcept nogil
    int (*error_text)(int error, const char **text) noexcept nogil
    # NULL before CUDA 10.
    int (*stream_capturing)(void *stream, int *status) noexcept nogil
    # NULL before CUDA 12.8. `first` says from which copy on each of the attributes holds.
    int (*copy_batch)(
        uint64_t *to, uint64_t *sources, size_t *nbytes, size_t count, CopyAttributes *attributes,
        size_t *first, size_t attribute_count, size_t *failed, void *stream
    ) noexcept nogil

cdef inline int relax(CudaApi *cuda) noexcept nogil:
    """Keeps this thread's CUDA calls from invalidating a graph that another thread captures, which
    even an allocation or an event query of an unrelated stream would do. Returns the previous mode,
    for `leave_context`."""
    cdef int mode = CU_STREAM_CAPTURE_MODE_RELAXED
    cuda.exchange_capture_mode(&mode)
    return mode

cdef inline int enter_context(CudaApi *cuda, void *context, int *mode) noexcept nogil:
    """Makes a context current until `leave_context`. Returns a CUresult."""
    cdef int code = cuda.push_current(context)
    if code == CUDA_SUCCESS:
        mode[0] = relax(cuda)
    return code

cdef inline void leave_context(CudaApi *cuda, int mode) noexcept nogil:
    cdef void *popped
    cuda.exchange_capture_mode(&mode)
    cuda.pop_current(&popped)
