"""libcufile, opened at run time: the driver's life, files and buffers made known to it, what it was
told and what it did.

Calls that have been seen to hang run on a thread of their own with a time limit. Codes are handed
up as `CuFileFailure`; what they mean for a load is said in `gdsload.backends.cufile`.
"""

cimport cython
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy, memset
from posix.unistd cimport getpid

import os

from gdsload._native.cuda cimport CUDA_SUCCESS, CudaApi, enter_context, leave_context
from gdsload._native.cufile cimport (
    CU_FILE_CUDA_DRIVER_ERROR,
    GPU_BYTES,
    HISTOGRAM_BYTES,
    LEVEL_1_BYTES,
    LEVEL_1_BYTES_1190,
    MOST_GPUS,
    STATS_BYTES,
    CFiles,
    CUfileDrvProps,
    CUfileError,
    CuFileApi,
    release_files,
)
from gdsload._native.dynamic cimport fill_table, open_library
from gdsload._native.errand cimport (
    CLOSE_DRIVER,
    OPEN_DRIVER,
    REGISTER_BUFFER,
    REGISTER_FILE,
    Errand,
    new_errand,
    start_errand,
    wait_for_errand,
)
from gdsload._native.pthreads cimport (
    pthread_mutex_init,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)

# In the order of CuFileApi: the functions without which there is no cuFile, then the others.
_NEEDED = (
    "cuFileDriverOpen", "cuFileHandleRegister", "cuFileHandleDeregister", "cuFileBufRegister",
    "cuFileBufDeregister", "cuFileRead", "cuFileDriverGetProperties",
)
_BETTER = (
    "cuFileDriverClose_v2|cuFileDriverClose", "cuFileGetVersion",
    "cuFileBatchIOSetUp", "cuFileBatchIOSubmit", "cuFileBatchIOGetStatus",
    "cuFileBatchIOCancel", "cuFileBatchIODestroy",
    "cuFileGetParameterSizeT", "cuFileSetParameterSizeT", "cuFileGetParameterBool",
    "cuFileSetParameterBool", "cuFileSetParameterString", "cuFileDriverGetP2PFlags",
    "cuFileSetStatsLevel", "cuFileStatsStart", "cuFileGetStatsL3", "cuFileStatsStop",
)

class CuFileFailure(RuntimeError):
    """cuFile said no: `call` is the function, `code` its CUfileOpError, `cuda_code` CUDA's."""

    def __init__(self, call, code, cuda_code=0):
        super().__init__(f"{call} answered {code}" + (f" (CUDA {cuda_code})" if cuda_code else ""))
        self.call = call
        self.code = code
        self.cuda_code = cuda_code


@cython.final
cdef class CuFile:
    """One libcufile. It stays loaded until the process ends; its driver is opened at most once."""

    # Not part of the object: threads that were left behind may use it when that has gone.
    cdef CuFileApi *api
    cdef readonly str path
    cdef readonly int pid
    cdef readonly frozenset functions

    def __cinit__(self, str path):
        """Opens the library at ``path``, or by that soname; nothing in it runs yet.

        Raises OSError where it cannot be opened, or is too old to read a file.
        """
        cdef void *library
        if len(_NEEDED) + len(_BETTER) != sizeof(CuFileApi) // sizeof(void *):
            raise ImportError("cufile.pxd and cufile.pyx name different functions")
        self.api = <CuFileApi *>calloc(1, sizeof(CuFileApi))
        if self.api == NULL:
            raise MemoryError("no memory for cuFile's functions")
        library = open_library(path)
        self.functions = fill_table(library, <void **>self.api, _NEEDED + _BETTER)
        for name in _NEEDED:
            if name not in self.functions:
                raise OSError(f"{path} has no {name}")
        self.path = path
        self.pid = getpid()

    cdef own(self):
        # Its threads, locks and device descriptors stayed in the parent.
        if self.pid != getpid():
            raise RuntimeError("libcufile was opened before this process was forked")

    cdef lacks(self, str name):
        return NotSupported(f"{self.path} has no {name}")

    cdef Errand *new_call(self, int what, object device) except NULL:
        cdef Errand *call
        cuda = context = None
        self.own()
        if device is not None:
            cuda, context = device.handles()
        call = new_errand(what, self.api)
        if call == NULL:
            raise MemoryError("no memory to call cuFile")
        if device is not None:
            call.cuda = <CudaApi *>PyCapsule_GetPointer(cuda, b"gdsload.cuda")
            call.context = PyCapsule_GetPointer(context, b"gdsload.context")
        return call

    cdef void *call_within(self, str name, Errand *call, double seconds) except? NULL:
        """The handle that the call made, if it makes one. Raises CuFileFailure, and TimeoutError
        where it has not come back in time."""
        cdef CUfileError answer
        cdef void *handle = NULL
        cdef int error, in_time
        error = start_errand(call)
        if error != 0:
            raise OSError(error, f"no thread to call cuFile: {os.strerror(error)}")
        with nogil:
            in_time = wait_for_errand(call, <int64_t>(seconds * 1e9), &answer, &handle)
        if not in_time:
            raise TimeoutError(f"{name} has not come back in {seconds:g} s")
        self.require(name, answer)
        return handle

    def open_driver(self, object device, double seconds):
        """Opens cuFile's driver, in the context of ``device``.

        Raises CuFileFailure, and TimeoutError after ``seconds``: the call then goes on in a thread
        that cannot be ended, and nothing else of this library may be called.
        """
        self.call_within("cuFileDriverOpen", self.new_call(OPEN_DRIVER, device), seconds)

    def close_driver(self, double seconds):
        """Stops the statistics and closes the driver; False where it had not come back after
        ``seconds``. Raises CuFileFailure."""
        self.own()
        if self.api.driver_close == NULL:
            return False
        try:
            self.call_within("cuFileDriverClose", self.new_call(CLOSE_DRIVER, None), seconds)
        except TimeoutError:
            return False
        return True

    cdef require(self, str call, CUfileError answer):
        if answer.err != 0:
            raise CuFileFailure(call, answer.err, answer.cu_err)

    @property
    def version(self):
        """1150 for 1.15; 0 where it does not say."""
        cdef int version = 0
        self.own()
        if self.api.get_version == NULL or self.api.get_version(&version).err != 0:
            return 0
        return version

    def properties(self):
        """CUfileDrvProps, flat: sizes in KiB, except max_batch_io_size (entries)."""
        cdef CUfileDrvProps props
        cdef CUfileError answer
        self.own()
        memset(&props, 0, sizeof(props))
        with nogil:
            answer = self.api.get_properties(&props)
        self.require("cuFileDriverGetProperties", answer)
        return {
            "nvfs_major": props.nvfs.major_version,
            "nvfs_minor": props.nvfs.minor_version,
            "max_direct_io_kb": props.nvfs.max_direct_io_size,
            "filesystems": props.nvfs.dstatusflags,
            "control": props.nvfs.dcontrolflags,
            "features": props.fflags,
            "max_device_cache_kb": props.max_device_cache_size,
            "per_buffer_cache_kb": props.per_buffer_cache_size,
            "max_batch": props.max_batch_io_size,
        }

    def get_size(self, int parameter):
        """A CUFileSizeTConfigParameter_t, or None where this libcufile does not tell."""
        cdef size_t value = 0
        self.own()
        if self.api.get_size == NULL or self.api.get_size(parameter, &value).err != 0:
            return None
        return value

    def set_size(self, int parameter, size_t value):
        """Before the driver is opened. Raises CuFileFailure, NotSupported before 1.14."""
        self.own()
        if self.api.set_size == NULL:
            raise self.lacks("cuFileSetParameterSizeT")
        self.require("cuFileSetParameterSizeT", self.api.set_size(parameter, value))

    def get_bool(self, int parameter):
        """A CUFileBoolConfigParameter_t, or None where this libcufile does not tell."""
        cdef uint8_t value = 0
        self.own()
        if self.api.get_bool == NULL or self.api.get_bool(parameter, &value).err != 0:
            return None
        return bool(value)

    def set_bool(self, int parameter, bint value):
        """Before the driver is opened. Raises CuFileFailure."""
        self.own()
        if self.api.set_bool == NULL:
            raise self.lacks("cuFileSetParameterBool")
        self.require("cuFileSetParameterBool", self.api.set_bool(parameter, value))

    def set_string(self, int parameter, str value):
        """Before the driver is opened. Raises CuFileFailure."""
        self.own()
        if self.api.set_string == NULL:
            raise self.lacks("cuFileSetParameterString")
        encoded = os.fsencode(value)
        self.require("cuFileSetParameterString", self.api.set_string(parameter, encoded))

    def p2p_flags(self, int target):
        """CUfileP2PFlags of a kind of storage (CUfileDriverStatusFlags), or None."""
        cdef int flags = 0
        self.own()
        if self.api.get_p2p == NULL or self.api.get_p2p(target, &flags).err != 0:
            return None
        return flags

    def register_file(self, int fd, double seconds):
        """The CUfileHandle_t of an open file. The descriptor must outlive it.

        Raises CuFileFailure, and TimeoutError after ``seconds``: the call then goes on, and the
        descriptor must stay open.
        """
        cdef Errand *call = self.new_call(REGISTER_FILE, None)
        call.fd = fd
        return <uintptr_t>self.call_within("cuFileHandleRegister", call, seconds)

    def deregister_file(self, uint64_t handle):
        """Gives a file's handle back. No read of it may be under way."""
        self.own()
        with nogil:
            self.api.handle_deregister(<void *><uintptr_t>handle)

    def register_buffer(self, uint64_t address, size_t nbytes, object device, double seconds):
        """Makes memory of a device known, so that reads go into it without a detour.

        Raises CuFileFailure, and TimeoutError after ``seconds``: the call then goes on, and the
        memory must stay.
        """
        cdef Errand *call = self.new_call(REGISTER_BUFFER, device)
        call.base, call.length = <void *><uintptr_t>address, nbytes
        self.call_within("cuFileBufRegister", call, seconds)

    def deregister_buffer(self, uint64_t address, object device):
        """Undoes `register_buffer`."""
        # cuFile asks the context of the calling thread about the memory, which has none, or that
        # of another device.
        cdef CUfileError answer
        cdef CudaApi *cuda
        cdef void *context
        cdef int code, mode
        self.own()
        functions, owned = device.handles()
        cuda = <CudaApi *>PyCapsule_GetPointer(functions, b"gdsload.cuda")
        context = PyCapsule_GetPointer(owned, b"gdsload.context")
        with nogil:
            code = enter_context(cuda, context, &mode)
            if code != CUDA_SUCCESS:
                answer.err, answer.cu_err = CU_FILE_CUDA_DRIVER_ERROR, code
            else:
                answer = self.api.buf_deregister(<void *><uintptr_t>address)
                leave_context(cuda, mode)
        self.require("cuFileBufDeregister", answer)

    def start_statistics(self):
        """Counts from now on (1.15 and later). True where it does."""
        self.own()
        if self.api.stats_level == NULL or self.api.stats_start == NULL:
            return False
        return self.api.stats_level(3).err == 0 and self.api.stats_start().err == 0

    def statistics(self):
        """What each GPU has read so far, and by which road; None where this libcufile cannot say.

        Keys: read_bytes, reads, p2p, nvfs, posix, unaligned, errors (all but the first count
        reads).
        """
        cdef uint8_t *raw
        cdef uint64_t word
        cdef uint32_t gpus = 0
        cdef CUfileError answer
        self.own()
        if self.api.stats_l3 == NULL:
            return None
        level_2 = (LEVEL_1_BYTES_1190 if self.version >= 1190 else LEVEL_1_BYTES) + HISTOGRAM_BYTES
        raw = <uint8_t *>calloc(1, STATS_BYTES)
        if raw == NULL:
            raise MemoryError("no memory for cuFile's statistics")
        try:
            with nogil:
                answer = self.api.stats_l3(raw)
            if answer.err != 0:
                return None
            memcpy(&gpus, raw + <size_t>level_2, 4)
            found = []
            for gpu in range(min(gpus, MOST_GPUS)):
                facts = {}
                for name, place in GPU_FIELDS:
                    memcpy(&word, raw + <size_t>(level_2 + 8 + gpu * GPU_BYTES + place), 8)
                    facts[name] = word
                found.append(facts)
            return found
        finally:
            free(raw)

    def files(self, object device, double patience_seconds):
        """A table of file handles for an engine that reads into memory of ``device``, and that
        takes a read for lost when it has not been heard of for so long."""
        return Files(self, device, patience_seconds)

    def handle(self):
        """Its functions, as a capsule for native code."""
        return PyCapsule_New(self.api, b"gdsload.cufile", NULL)


class NotSupported(RuntimeError):
    """This libcufile is too old for what was asked."""


# Bytes from the start of a GPU's statistics (CUfilePerGpuStats).
GPU_FIELDS = (
    ("read_bytes", 16), ("reads", 48), ("p2p", 56), ("nvfs", 64), ("posix", 72),
    ("unaligned", 80), ("errors", 112),
)


@cython.final
cdef class Files:
    """The handles of registered files, by the pump's number for each descriptor."""

    cdef CFiles *table
    cdef readonly CuFile cufile
    cdef readonly object device

    def __cinit__(self, CuFile cufile, object device, double patience_seconds):
        cdef CFiles *made = <CFiles *>calloc(1, sizeof(CFiles))
        if made == NULL:
            raise MemoryError("no memory for a table of files")
        made.references = 1
        pthread_mutex_init(&made.lock, NULL)
        self.table = made
        self.cufile = cufile
        self.device = device
        cuda, context = device.handles()
        made.patience_ns = <int64_t>(patience_seconds * 1e9)
        made.api = cufile.api
        made.cuda = <CudaApi *>PyCapsule_GetPointer(cuda, b"gdsload.cuda")
        made.context = PyCapsule_GetPointer(context, b"gdsload.context")

    def put(self, int slot, uint64_t handle):
        """From now on ``slot`` stands for this handle; 0: for none."""
        cdef void **grown
        cdef int room
        if slot < 0:
            raise IndexError(f"slot {slot}")
        pthread_mutex_lock(&self.table.lock)
        if slot >= self.table.room:
            room = 2 * slot + 16
            grown = <void **>realloc(self.table.handles, room * sizeof(void *))
            if grown != NULL:
                memset(grown + self.table.room, 0, (room - self.table.room) * sizeof(void *))
                self.table.handles = grown
                self.table.room = room
        if slot < self.table.room:
            self.table.handles[slot] = <void *><uintptr_t>handle
        room = self.table.room
        pthread_mutex_unlock(&self.table.lock)
        if slot >= room:
            raise MemoryError("no memory for a table of files")

    @property
    def address(self):
        """Where the table is: an engine over cuFile is handed this."""
        return <uintptr_t>self.table

    def __dealloc__(self):
        if self.table != NULL:
            release_files(self.table)
