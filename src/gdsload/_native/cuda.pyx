"""The CUDA driver, opened at run time: devices, their memory, and tensors that view it.

`Cuda` finds the functions. `Device` owns a reference to a device's primary context, which torch
uses too. A call makes that context current only until it returns, so that the caller's current
device never changes. A `Block` is one allocation: the tensors of `Block.view` share its ownership,
and the last owner frees it, on any thread and without the GIL. Not responsible for copies:
stage.pyx.
"""

cimport cython
from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from posix.unistd cimport getpid

import os

from gdsload._native.atomics cimport gds_add, gds_load, gds_store
from gdsload._native.cuda cimport (
    CU_DEVICE_ATTRIBUTE_INTEGRATED, CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTREGISTER_PORTABLE,
    CU_STREAM_CAPTURE_MODE_RELAXED, CU_STREAM_CAPTURE_STATUS_ACTIVE, CUDA_SUCCESS, CudaApi,
    enter_context, leave_context,
)
from gdsload._native.dlpack cimport DL_CUDA, DLManagedTensor, View, new_view
from gdsload._native.dynamic cimport fill_table, open_library

# In the order of CudaApi.
_SYMBOLS = (
    "cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName",
    "cuDeviceGetPCIBusId", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2", "cuCtxSetCurrent",
    "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuThreadExchangeStreamCaptureMode",
    "cuMemGetInfo_v2", "cuMemAlloc_v2", "cuMemFree_v2", "cuMemHostRegister_v2",
    "cuMemHostUnregister", "cuMemHostAlloc", "cuMemFreeHost", "cuMemcpyAsync",
    "cuStreamCreate", "cuStreamDestroy_v2", "cuStreamSynchronize", "cuStreamWaitEvent",
    "cuEventCreate", "cuEventRecord", "cuEventQuery", "cuEventDestroy_v2",
    "cuMemGetAddressRange_v2",
    "cuGetErrorName", "cuGetErrorString",
)
# Missing in older drivers.
_OPTIONAL = ("cuStreamIsCapturing", "cuMemcpyBatchAsync")


class CudaFailure(RuntimeError):
    """A call of the driver failed: `code` is its CUresult."""

    def __init__(self, call, code, text):
        super().__init__(f"{call}: {text}")
        self.code = code


@cython.final
cdef class Cuda:
    """The driver's functions. They stay loaded until the process ends, as CUDA requires."""

    # Never freed: abandoned threads may use it after the object is gone.
    cdef CudaApi *api
    cdef readonly str path
    cdef readonly int pid

    def __cinit__(self, str path):
        """Opens the library at ``path`` (or by that soname) and starts CUDA.

        Raises OSError if it cannot be opened or lacks a function, CudaFailure if it does not start
        (no device, no kernel module).
        """
        cdef void *library
        cdef int code
        if sizeof(CudaApi) // sizeof(void *) != len(_SYMBOLS) + len(_OPTIONAL):
            raise ImportError("cuda.pxd and cuda.pyx name different functions")
        self.api = <CudaApi *>calloc(1, sizeof(CudaApi))
        if self.api == NULL:
            raise MemoryError("no memory for CUDA's functions")
        library = open_library(path)
        found = fill_table(library, <void **>self.api, _SYMBOLS + _OPTIONAL)
        for name in _SYMBOLS:
            if name not in found:
                raise OSError(f"{path} has no {name}: this CUDA driver is too old")
        self.path = path
        self.pid = getpid()
        with nogil:
            code = self.api.init(0)
        self.require("cuInit", code)

    cdef require(self, str call, int code):
        cdef const char *text = NULL
        if code == CUDA_SUCCESS:
            return
        message = f"CUDA error {code}"
        if self.api.error_name(code, &text) == CUDA_SUCCESS and text != NULL:
            message = text.decode(errors="replace")
        if self.api.error_text(code, &text) == CUDA_SUCCESS and text != NULL:
            message += f", {text.decode(errors='replace')}"
        raise CudaFailure(call, code, message)

    @property
    def version(self):
        """CUDA version of the driver: 13000 for CUDA 13.0."""
        cdef int version = 0
        self.require("cuDriverGetVersion", self.api.driver_version(&version))
        return version

    @property
    def device_count(self):
        """Number of visible devices."""
        cdef int count = 0
        self.require("cuDeviceGetCount", self.api.device_count(&count))
        return count


@cython.final
cdef class Device:
    """One device, with a reference to its primary context."""

    cdef readonly Cuda cuda
    cdef readonly int ordinal
    cdef int handle
    cdef void *context

    def __cinit__(self, Cuda cuda, int ordinal):
        """Raises CudaFailure if the device does not exist or cannot be used."""
        cdef int code
        self.cuda = cuda
        self.ordinal = ordinal
        cuda.require("cuDeviceGet", cuda.api.device_get(&self.handle, ordinal))
        with nogil:
            code = cuda.api.primary_retain(&self.context, self.handle)
        if code != CUDA_SUCCESS:
            self.context = NULL
        cuda.require("cuDevicePrimaryCtxRetain", code)

    cdef own(self):
        if self.cuda.pid != getpid():
            raise RuntimeError("CUDA was started before this process was forked from its parent")

    cdef int enter(self) except -1:
        """Makes its context current. Returns the argument for `leave`."""
        cdef int mode = 0
        self.own()
        self.cuda.require(
            "cuCtxPushCurrent", enter_context(self.cuda.api, self.context, &mode)
        )
        return mode

    cdef leave(self, str call, int code, int mode):
        leave_context(self.cuda.api, mode)
        self.cuda.require(call, code)

    def handles(self):
        """(the driver's functions, the context): capsules for the native threads."""
        return (
            PyCapsule_New(self.cuda.api, b"gdsload.cuda", NULL),
            PyCapsule_New(self.context, b"gdsload.context", NULL),
        )

    @property
    def name(self):
        """Product name of the device."""
        cdef char text[256]
        self.cuda.require("cuDeviceGetName", self.cuda.api.device_name(text, 256, self.handle))
        return (<char *>text).decode(errors="replace")

    @property
    def bus(self):
        """PCI address, as Linux writes it: 0000:3b:00.0."""
        cdef char text[64]
        self.cuda.require("cuDeviceGetPCIBusId", self.cuda.api.device_bus(text, 64, self.handle))
        return (<char *>text).decode(errors="replace").lower()

    @property
    def integrated(self):
        """Whether its memory is that of the host."""
        cdef int value = 0
        self.cuda.require("cuDeviceGetAttribute", self.cuda.api.device_attribute(
            &value, CU_DEVICE_ATTRIBUTE_INTEGRATED, self.handle
        ))
        return value != 0

    def memory(self):
        """(free bytes, total bytes) of device memory, now."""
        cdef size_t free_bytes = 0, total = 0
        cdef int code, mode
        mode = self.enter()
        with nogil:
            code = self.cuda.api.memory_info(&free_bytes, &total)
        self.leave("cuMemGetInfo", code, mode)
        return free_bytes, total

    def allocate(self, size_t nbytes, list found=None):
        """Address of new device memory, aligned to 256 bytes, which is also put into ``found``: as
        a call returns, Ctrl-C may end the caller. Raises CudaFailure."""
        cdef uint64_t address = 0
        cdef int code, mode
        mode = self.enter()
        with nogil:
            code = self.cuda.api.allocate(&address, nbytes)
        self.leave("cuMemAlloc", code, mode)
        if found is not None:
            found.append(address)
        return address

    def release(self, uint64_t address):
        """Frees memory of `allocate`."""
        cdef int code, mode
        mode = self.enter()
        with nogil:
            code = self.cuda.api.release(address)
        self.leave("cuMemFree", code, mode)

    def pin(self, uint64_t address, size_t nbytes):
        """Locks host memory and lets every device copy from it."""
        cdef int code, mode
        mode = self.enter()
        with nogil:
            code = self.cuda.api.host_register(
                <void *><uintptr_t>address, nbytes, CU_MEMHOSTREGISTER_PORTABLE
            )
        self.leave("cuMemHostRegister", code, mode)

    def unpin(self, uint64_t address):
        """Undoes `pin`."""
        cdef int code, mode
        mode = self.enter()
        with nogil:
            code = self.cuda.api.host_unregister(<void *><uintptr_t>address)
        self.leave("cuMemHostUnregister", code, mode)

    def allocate_host(self, size_t nbytes, list found=None):
        """Address of new host memory that is page-locked, for every device to copy from. It is also
        put into ``found``, as by `allocate`. Raises CudaFailure."""
        cdef void *address = NULL
        cdef int code, mode
        mode = self.enter()
        with nogil:
            code = self.cuda.api.host_allocate(&address, nbytes, CU_MEMHOSTALLOC_PORTABLE)
        self.leave("cuMemHostAlloc", code, mode)
        if found is not None:
            found.append(<uintptr_t>address)
        return <uintptr_t>address

    def release_host(self, uint64_t address):
        """Frees memory of `allocate_host`."""
        cdef int code, mode
        mode = self.enter()
        with nogil:
            code = self.cuda.api.host_release(<void *><uintptr_t>address)
        self.leave("cuMemFreeHost", code, mode)

    def range_of(self, uint64_t address):
        """(first address, bytes) of the allocation that contains an address; (address, 0) if the
        driver does not know it."""
        cdef uint64_t base = 0
        cdef size_t nbytes = 0
        cdef int code, mode
        mode = self.enter()
        code = self.cuda.api.address_range(&base, &nbytes, address)
        leave_context(self.cuda.api, mode)
        if code != CUDA_SUCCESS:
            return address, 0
        return base, nbytes

    def captures(self, uint64_t stream):
        """Whether a CUDA graph is being captured on a stream (a CUstream of this device, 0: the
        default one). False if the driver cannot report it."""
        cdef int status = 0
        cdef int code, mode
        if self.cuda.api.stream_capturing == NULL:
            return False
        mode = self.enter()
        code = self.cuda.api.stream_capturing(<void *><uintptr_t>stream, &status)
        leave_context(self.cuda.api, mode)
        return code == CUDA_SUCCESS and status == CU_STREAM_CAPTURE_STATUS_ACTIVE

    def relax(self):
        """Keeps CUDA calls of this thread, also those of other libraries, from invalidating a graph
        that another thread captures, until `restore`. Returns the argument for it. Raises
        CudaFailure."""
        cdef int mode = self.enter()
        leave_context(self.cuda.api, CU_STREAM_CAPTURE_MODE_RELAXED)
        return mode

    def restore(self, int mode):
        """Undoes `relax`, in the same thread. A device that fails reports that in its next call."""
        cdef int relaxed = 0
        self.own()
        if enter_context(self.cuda.api, self.context, &relaxed) == CUDA_SUCCESS:
            leave_context(self.cuda.api, mode)

    def synchronize(self, uint64_t stream):
        """Waits for the work that a stream has (a CUstream of this device, 0: the default one).
        Raises CudaFailure."""
        cdef int code, mode
        mode = self.enter()
        with nogil:
            code = self.cuda.api.stream_synchronize(<void *><uintptr_t>stream)
        self.leave("cuStreamSynchronize", code, mode)

    def __dealloc__(self):
        # In C: at the end of the process the modules are gone before their objects.
        if self.context != NULL and self.cuda is not None and self.cuda.pid == getpid():
            self.cuda.api.primary_release(self.handle)


# --- blocks: device memory that tensors view ----------------------------------------------------

cdef struct CBlock:
    CudaApi *cuda
    void *context       # a reference to the primary context: outlives the memory
    int device
    int pid
    uint64_t address    # 0: nothing is allocated
    int64_t references  # the Python object and each tensor

# Set when the process ends. The driver then shuts down in an undefined order and frees all memory
# itself; a call into it could crash.
cdef int64_t exiting = 0


def end():
    """Stops freeing blocks, because the process ends."""
    gds_store(&exiting, 1)


cdef void release_block(CBlock *block) noexcept nogil:
    cdef int mode
    if gds_add(&block.references, -1) > 0:
        return
    # After a fork the driver and its memory belong to the parent.
    if block.context != NULL and block.pid == getpid() and not gds_load(&exiting):
        if block.address and enter_context(block.cuda, block.context, &mode) == CUDA_SUCCESS:
            # The device may still work on the last tensor. cuMemFree waits for that work; torch's
            # allocator relies on it, too. Waiting for the whole device instead would break a CUDA
            # graph that is being captured.
            block.cuda.release(block.address)
            leave_context(block.cuda, mode)
        block.cuda.primary_release(block.device)
    free(block)


cdef void delete_view(DLManagedTensor *managed) noexcept nogil:
    cdef View *view = <View *>managed.manager_ctx
    release_block(<CBlock *>view.owner)
    free(view)


@cython.final
cdef class Block:
    """One allocation. It lives until this object and its last tensor are gone."""

    cdef CBlock *block
    cdef readonly uint64_t address
    cdef readonly uint64_t length
    cdef readonly int ordinal

    def __cinit__(self, Device device, uint64_t length):
        """``length`` bytes on a device, aligned to 256 bytes at least.

        Raises CudaFailure if the device is out of memory, RuntimeError after a fork.
        """
        cdef int code
        cdef CBlock *made
        if length == 0:
            raise ValueError("a block of no bytes cannot be")
        device.own()
        made = <CBlock *>calloc(1, sizeof(CBlock))
        if made == NULL:
            raise MemoryError("no memory to track a block")
        self.block = made
        self.length, self.ordinal = length, device.ordinal
        made.cuda, made.device = device.cuda.api, device.handle
        made.pid = getpid()
        made.references = 1
        with nogil:
            code = made.cuda.primary_retain(&made.context, made.device)
        if code != CUDA_SUCCESS:
            made.context = NULL
        device.cuda.require("cuDevicePrimaryCtxRetain", code)
        self.address = made.address = device.allocate(length)

    def __dealloc__(self):
        cdef CBlock *block = self.block
        if block != NULL:
            # Freeing waits for the device: without the GIL.
            with nogil:
                release_block(block)

    @property
    def references(self):
        """Number of owners: this object and its tensors."""
        return gds_load(&self.block.references)

    def view(self, uint64_t offset, uint64_t nbytes, tuple shape, int code, int bits):
        """A DLPack capsule over ``nbytes`` bytes at ``offset``: a tensor of the device.

        ``code`` and ``bits`` are DLPack's, as for `gdsload._native.memory.Region.view`.
        """
        if offset > self.length or nbytes > self.length - offset:
            raise ValueError(
                f"a view of {nbytes} bytes at {offset} leaves a block of {self.length}"
            )
        view = new_view(
            self.block, delete_view, DL_CUDA, self.ordinal, self.address + offset, nbytes,
            shape, code, bits,
        )
        gds_add(&self.block.references, 1)
        return view
