# DLPack 0.8, which every torch since 1.10 reads: how memory becomes a tensor that shares its
# ownership. Not responsible for the memory itself and its release: memory.pyx, block.pyx.

from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint64_t

cdef enum:
    DL_CPU = 1
    DL_CUDA = 2

cdef struct DLTensor:
    void *data
    int32_t device_type
    int32_t device_id
    int32_t ndim
    uint8_t code
    uint8_t bits
    uint16_t lanes
    int64_t *shape
    int64_t *strides
    uint64_t byte_offset

cdef struct DLManagedTensor:
    DLTensor dl_tensor
    void *manager_ctx
    void (*deleter)(DLManagedTensor *) noexcept nogil

cdef inline int describe(
    DLManagedTensor *managed, void *data, int64_t *dims, tuple shape, int code, int bits
) except -1:
    """Describes a CPU tensor; ``dims`` is room for its shape. The caller of a device tensor changes
    `device_type` and `device_id`."""
    cdef DLTensor *tensor = &managed.dl_tensor
    cdef int i
    cdef int ndim = <int>len(shape)
    for i in range(ndim):
        dims[i] = shape[i]
    tensor.data = data
    tensor.device_type = DL_CPU
    tensor.device_id = 0
    tensor.ndim = ndim
    tensor.code = <uint8_t>code
    tensor.bits = <uint8_t>bits
    tensor.lanes = 1
    tensor.shape = dims
    tensor.strides = NULL
    tensor.byte_offset = 0
    return 0

cdef inline void drop_capsule(object capsule) noexcept:
    """Runs when a capsule is freed; a consumer that took the tensor has renamed it."""
    cdef DLManagedTensor *managed
    if PyCapsule_IsValid(capsule, b"dltensor"):
        managed = <DLManagedTensor *>PyCapsule_GetPointer(capsule, b"dltensor")
        managed.deleter(managed)
