# DLPack 0.8, which every torch since 1.10 reads: how memory becomes a tensor that shares its
# ownership. Not responsible for the memory itself and its release: memory.pyx, cuda.pyx.

from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint64_t
from libc.stdlib cimport free, malloc

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

# A tensor that shares the ownership of `owner`.
cdef struct View:
    DLManagedTensor managed
    void *owner
    uint64_t nbytes

cdef inline void drop_capsule(object capsule) noexcept:
    """Runs when a capsule is freed; a consumer that took the tensor has renamed it."""
    cdef DLManagedTensor *managed
    if PyCapsule_IsValid(capsule, b"dltensor"):
        managed = <DLManagedTensor *>PyCapsule_GetPointer(capsule, b"dltensor")
        managed.deleter(managed)

cdef inline object new_view(
    void *owner, void (*deleter)(DLManagedTensor *) noexcept nogil, int device_type, int device_id,
    uint64_t address, uint64_t nbytes, tuple shape, int code, int bits,
):
    """A capsule of a tensor over ``nbytes`` bytes at an address. `deleter` frees the view and
    releases `owner`, which the caller must have retained when this returns."""
    cdef int64_t *dims
    cdef View *view = <View *>malloc(sizeof(View) + len(shape) * sizeof(int64_t))
    if view == NULL:
        raise MemoryError("no memory for a view")
    dims = <int64_t *>(view + 1)
    try:
        for i, size in enumerate(shape):
            dims[i] = size
        view.managed.dl_tensor = DLTensor(
            <void *>address, device_type, device_id, <int>len(shape), <uint8_t>code, <uint8_t>bits,
            1, dims, NULL, 0,
        )
        view.managed.manager_ctx = view
        view.managed.deleter = deleter
        view.owner = owner
        view.nbytes = nbytes
        return PyCapsule_New(view, b"dltensor", drop_capsule)
    except BaseException:
        free(view)
        raise
