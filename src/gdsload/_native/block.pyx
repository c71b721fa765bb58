"""Blocks: device memory that tensors view.

A `Block` is one allocation of the CUDA driver. `Block.view` returns a DLPack capsule: the tensor made
from it shares the ownership of the block. The last owner frees the memory, on any thread and without
the GIL.
"""

cimport cython
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from posix.unistd cimport getpid

from gdsload._native.atomics cimport gds_add, gds_load, gds_store
from gdsload._native.cuda cimport (
    CUDA_SUCCESS,
    CudaApi,
    enter_context,
    leave_context,
)
from gdsload._native.dlpack cimport DL_CUDA, DLManagedTensor, describe, drop_capsule

from gdsload._native.cuda import CudaFailure

cdef struct CBlock:
    CudaApi *cuda
    void *context       # a reference to the primary context: outlives the memory
    int device
    int ordinal
    int pid
    uint64_t address
    uint64_t length
    int64_t references  # the Python object and each tensor

cdef struct View:
    DLManagedTensor managed
    CBlock *block

# Set when the process ends. The driver then shuts down in an undefined order and frees all memory
# itself; a call into it could crash.
cdef int64_t exiting = 0


def end():
    """Stops freeing memory, because the process ends."""
    gds_store(&exiting, 1)


cdef void release_block(CBlock *block) noexcept nogil:
    cdef int mode
    if gds_add(&block.references, -1) > 0:
        return
    # After a fork the driver and its memory belong to the parent.
    if block.pid == getpid() and not gds_load(&exiting):
        if enter_context(block.cuda, block.context, &mode) == CUDA_SUCCESS:
            # The device may still work on the last tensor. cuMemFree waits for that work; torch's
            # allocator relies on it, too. Waiting for the whole device instead would break a CUDA
            # graph that is being captured.
            block.cuda.release(block.address)
            leave_context(block.cuda, mode)
        block.cuda.primary_release(block.device)
    free(block)


cdef void delete_view(DLManagedTensor *managed) noexcept nogil:
    cdef View *view = <View *>managed.manager_ctx
    release_block(view.block)
    free(view)


@cython.final
cdef class Block:
    """One allocation. It lives until this object and its last tensor are gone."""

    cdef CBlock *block

    def __cinit__(self, device, uint64_t length):
        """``length`` bytes on a `gdsload._native.cuda.Device`, aligned to 256 bytes at least.

        Raises CudaFailure if the device is out of memory, RuntimeError after a fork.
        """
        cdef int code, mode
        cdef CBlock *made
        if length == 0:
            raise ValueError("a block of no bytes cannot be")
        if device.cuda.pid != getpid():
            raise RuntimeError("CUDA was started before this process was forked from its parent")
        functions, _ = device.handles()
        made = <CBlock *>calloc(1, sizeof(CBlock))
        if made == NULL:
            raise MemoryError("no memory to track a block")
        made.cuda = <CudaApi *>PyCapsule_GetPointer(functions, b"gdsload.cuda")
        made.ordinal = device.ordinal
        made.pid = getpid()
        made.length = length
        made.references = 1
        call = "cuDevicePrimaryCtxRetain"
        with nogil:
            code = made.cuda.device_get(&made.device, made.ordinal)
            if code == CUDA_SUCCESS:
                code = made.cuda.primary_retain(&made.context, made.device)
        if code == CUDA_SUCCESS:
            call = "cuMemAlloc"
            with nogil:
                code = enter_context(made.cuda, made.context, &mode)
                if code == CUDA_SUCCESS:
                    code = made.cuda.allocate(&made.address, length)
                    leave_context(made.cuda, mode)
                if code != CUDA_SUCCESS:
                    made.cuda.primary_release(made.device)
        if code != CUDA_SUCCESS:
            free(made)
            raise CudaFailure(call, code, device.cuda.describe(code))
        self.block = made

    def __dealloc__(self):
        cdef CBlock *block = self.block
        if block != NULL:
            # Freeing waits for the device: without the GIL.
            with nogil:
                release_block(block)

    @property
    def address(self):
        """First address, on the device."""
        return self.block.address

    @property
    def length(self):
        """Size in bytes."""
        return self.block.length

    @property
    def ordinal(self):
        """Number of its device."""
        return self.block.ordinal

    @property
    def references(self):
        """Number of owners: this object and its tensors."""
        return gds_load(&self.block.references)

    def view(self, uint64_t offset, uint64_t nbytes, tuple shape, int code, int bits):
        """A DLPack capsule over ``nbytes`` bytes at ``offset``: a tensor of the device.

        ``code`` and ``bits`` are DLPack's, as for `gdsload._native.memory.Region.view`.
        """
        cdef View *view
        if offset > self.block.length or nbytes > self.block.length - offset:
            raise ValueError(
                f"a view of {nbytes} bytes at {offset} leaves a block of {self.block.length}"
            )
        view = <View *>malloc(sizeof(View) + len(shape) * sizeof(int64_t))
        if view == NULL:
            raise MemoryError("no memory for a view")
        try:
            describe(
                &view.managed, <void *><uintptr_t>(self.block.address + offset),
                <int64_t *>(view + 1), shape, code, bits,
            )
        except BaseException:
            free(view)
            raise
        view.managed.dl_tensor.device_type = DL_CUDA
        view.managed.dl_tensor.device_id = self.block.ordinal
        view.managed.manager_ctx = view
        view.managed.deleter = delete_view
        view.block = self.block
        gds_add(&self.block.references, 1)
        return PyCapsule_New(view, b"dltensor", drop_capsule)
