"""The CUDA driver, opened at run time: devices, their memory, and blocking copies.

`Cuda` finds the functions. `Device` owns a reference to a device's primary context, which torch
uses too. A call makes that context current only until it returns, so that the caller's current
device never changes. Not responsible for asynchronous copies: stage.pyx.
"""

cimport cython
from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport calloc
from posix.unistd cimport getpid

import os

from gdsload._native.cuda cimport (
    CU_MEMHOSTALLOC_PORTABLE,
    CU_MEMHOSTREGISTER_PORTABLE,
    CU_STREAM_CAPTURE_STATUS_ACTIVE,
    CUDA_SUCCESS,
    CudaApi,
    enter_context,
    leave_context,
)
from gdsload._native.dynamic cimport fill_table, open_library

# In the order of CudaApi.
_SYMBOLS = (
    "cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName",
    "cuDeviceGetAttribute", "cuDeviceTotalMem_v2", "cuDeviceGetPCIBusId",
    "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2", "cuCtxSetCurrent",
    "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuThreadExchangeStreamCaptureMode",
    "cuMemGetInfo_v2", "cuMemAlloc_v2", "cuMemFree_v2", "cuMemHostRegister_v2",
    "cuMemHostUnregister", "cuMemHostAlloc", "cuMemFreeHost", "cuMemcpy", "cuMemcpyAsync",
    "cuStreamCreate", "cuStreamDestroy_v2", "cuStreamWaitEvent", "cuEventCreate", "cuEventRecord",
    "cuEventQuery", "cuEventDestroy_v2", "cuMemGetAddressRange_v2",
    "cuGetErrorName", "cuGetErrorString",
)
# Missing in older drivers.
_OPTIONAL = ("cuStreamIsCapturing",)


class CudaFailure(RuntimeError):
    """A call of the driver failed: `call` is the function, `code` its CUresult."""

    def __init__(self, call, code, text):
        super().__init__(f"{call}: {text}")
        self.call = call
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
        message = self.describe(code)
        if self.api.error_text(code, &text) == CUDA_SUCCESS and text != NULL:
            message += f", {text.decode(errors='replace')}"
        raise CudaFailure(call, code, message)

    def describe(self, int code):
        """The driver's name for one of its codes."""
        cdef const char *text = NULL
        if self.api.error_name(code, &text) == CUDA_SUCCESS and text != NULL:
            return text.decode(errors="replace")
        return f"CUDA error {code}"

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
    """One device, with a reference to its primary context. Close it, or let it be collected."""

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

    cdef int enter(self) except -1:
        """Makes its context current. Returns the argument for `leave`."""
        cdef int mode = 0
        if self.context == NULL:
            raise RuntimeError(f"device {self.ordinal} is closed")
        if self.cuda.pid != getpid():
            raise RuntimeError("CUDA was started before this process was forked from its parent")
        self.cuda.require(
            "cuCtxPushCurrent", enter_context(self.cuda.api, self.context, &mode)
        )
        return mode

    cdef leave(self, str call, int code, int mode):
        leave_context(self.cuda.api, mode)
        self.cuda.require(call, code)

    def handles(self):
        """(the driver's functions, the context): capsules for the native threads."""
        if self.context == NULL:
            raise RuntimeError(f"device {self.ordinal} is closed")
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
    def total_bytes(self):
        """Bytes of device memory."""
        cdef size_t nbytes = 0
        self.cuda.require("cuDeviceTotalMem", self.cuda.api.device_memory(&nbytes, self.handle))
        return nbytes

    def attribute(self, int number):
        """One of CUdevice_attribute."""
        cdef int value = 0
        self.cuda.require(
            "cuDeviceGetAttribute",
            self.cuda.api.device_attribute(&value, number, self.handle),
        )
        return value

    def memory(self):
        """(free bytes, total bytes) of device memory, now."""
        cdef size_t free_bytes = 0, total = 0
        cdef int code, mode
        mode = self.enter()
        with nogil:
            code = self.cuda.api.memory_info(&free_bytes, &total)
        self.leave("cuMemGetInfo", code, mode)
        return free_bytes, total

    def allocate(self, size_t nbytes):
        """Address of new device memory, aligned to 256 bytes. Raises CudaFailure."""
        cdef uint64_t address = 0
        cdef int code, mode
        mode = self.enter()
        with nogil:
            code = self.cuda.api.allocate(&address, nbytes)
        self.leave("cuMemAlloc", code, mode)
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

    def allocate_host(self, size_t nbytes):
        """Address of new host memory that is page-locked, for every device to copy from. Raises
        CudaFailure."""
        cdef void *address = NULL
        cdef int code, mode
        mode = self.enter()
        with nogil:
            code = self.cuda.api.host_allocate(&address, nbytes, CU_MEMHOSTALLOC_PORTABLE)
        self.leave("cuMemHostAlloc", code, mode)
        return <uintptr_t>address

    def release_host(self, uint64_t address):
        """Frees memory of `allocate_host`."""
        cdef int code, mode
        mode = self.enter()
        with nogil:
            code = self.cuda.api.host_release(<void *><uintptr_t>address)
        self.leave("cuMemFreeHost", code, mode)

    def copy(self, uint64_t to, uint64_t source, size_t nbytes):
        """Copies between any two addresses that CUDA knows, and returns when it is done."""
        cdef int code, mode
        mode = self.enter()
        with nogil:
            code = self.cuda.api.copy(to, source, nbytes)
        self.leave("cuMemcpy", code, mode)

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

    def close(self):
        """Releases the context. Idempotent."""
        if self.context == NULL:
            return
        self.context = NULL
        if self.cuda.pid == getpid():
            with nogil:
                self.cuda.api.primary_release(self.handle)

    def __dealloc__(self):
        # In C: at the end of the process the modules are gone before their objects.
        if self.context != NULL and self.cuda is not None and self.cuda.pid == getpid():
            self.cuda.api.primary_release(self.handle)
