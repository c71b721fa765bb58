"""libcufile, opened at run time: its driver, registered files and buffers, settings and statistics.

Calls that are known to hang run on a thread of their own with a time limit. Error codes are raised
as `CuFileFailure`; `gdsload.backends.cufile` decides what they mean for a load.
"""

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy, memset
from posix.time cimport timespec
from posix.unistd cimport getpid

import os

from gdsload._native.atomics cimport gds_add
from gdsload._native.cuda cimport CUDA_SUCCESS, CudaApi, enter_context, leave_context, relax
from gdsload._native.cufile cimport (
    CU_FILE_CUDA_DRIVER_ERROR, CU_FILE_HANDLE_TYPE_OPAQUE_FD, GPU_BYTES, HISTOGRAM_BYTES,
    LEVEL_1_BYTES, LEVEL_1_BYTES_1190, MOST_GPUS, STATS_BYTES, CFiles, CUfileDescr, CUfileDrvProps,
    CUfileError, CuFileApi, release_files,
)
from gdsload._native.dynamic cimport fill_table, open_library
from gdsload._native.pthreads cimport (
    SIGNAL_WAIT_NS, deadline_in, monotonic_cond_init, monotonic_ns, pthread_cond_destroy,
    pthread_cond_signal, pthread_cond_t, pthread_cond_timedwait, pthread_detach,
    pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t,
    pthread_mutex_unlock, pthread_t, start_quiet_thread,
)

# In the order of CuFileApi: the required functions, then the optional ones.
_REQUIRED = (
    "cuFileDriverOpen", "cuFileHandleRegister", "cuFileHandleDeregister", "cuFileBufRegister",
    "cuFileBufDeregister", "cuFileRead", "cuFileDriverGetProperties",
)
_OPTIONAL = (
    "cuFileDriverClose_v2|cuFileDriverClose", "cuFileGetVersion",
    "cuFileBatchIOSetUp", "cuFileBatchIOSubmit", "cuFileBatchIOGetStatus", "cuFileBatchIODestroy",
    "cuFileGetParameterSizeT", "cuFileSetParameterSizeT", "cuFileSetParameterBool",
    "cuFileDriverGetP2PFlags",
    "cuFileSetStatsLevel", "cuFileStatsStart", "cuFileGetStatsL3",
)

cdef enum:
    OPEN_DRIVER
    CLOSE_DRIVER
    REGISTER_FILE
    REGISTER_BUFFER
    END_STATISTICS

# A call that may never return. It owns everything it needs, so that it can be left to its thread.
cdef struct TimedCall:
    int64_t references          # the waiting thread and the calling one
    int what
    CuFileApi *api
    CudaApi *cuda
    void *context               # made current around the call; NULL: none is needed
    int fd                      # of REGISTER_FILE, and the handle that it makes
    void *handle
    void *base                  # of REGISTER_BUFFER
    size_t length
    CUfileError answer
    int done
    pthread_mutex_t lock
    pthread_cond_t ended


cdef void release_call(TimedCall *self) noexcept nogil:
    if gds_add(&self.references, -1) > 0:
        return
    pthread_cond_destroy(&self.ended)
    pthread_mutex_destroy(&self.lock)
    free(self)


cdef void *run_call(void *arg) noexcept nogil:
    cdef TimedCall *self = <TimedCall *>arg
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
    elif self.what == END_STATISTICS:
        answer = self.api.stats_level(0)
    else:
        # Not after cuFileStatsStop: that unmaps the memory to which a thread of libcufile 1.15 and
        # 1.16 writes statistics every millisecond. cuFileDriverClose ends that thread before.
        answer = self.api.driver_close()
    pthread_mutex_lock(&self.lock)
    self.answer = answer
    self.done = 1
    pthread_cond_signal(&self.ended)
    pthread_mutex_unlock(&self.lock)
    release_call(self)
    return NULL


class CuFileFailure(RuntimeError):
    """A call of cuFile failed: `code` is its CUfileOpError. The text also has `cuda_code`, the
    error of CUDA."""

    def __init__(self, call, code, cuda_code=0):
        super().__init__(f"{call} answered {code}" + (f" (CUDA {cuda_code})" if cuda_code else ""))
        self.code = code


@cython.final
cdef class CuFile:
    """One libcufile. It stays loaded until the process ends; its driver is opened at most once."""

    # Never freed: abandoned threads may use it after the object is gone.
    cdef CuFileApi *api
    cdef readonly str path
    cdef readonly int pid
    cdef readonly frozenset functions

    def __cinit__(self, str path):
        """Opens the library at ``path``, or by that soname, without starting its driver.

        Raises OSError if it cannot be opened, or is too old to read a file.
        """
        cdef void *library
        if len(_REQUIRED) + len(_OPTIONAL) != sizeof(CuFileApi) // sizeof(void *) - 1:
            raise ImportError("cufile.pxd and cufile.pyx name different functions")
        self.api = <CuFileApi *>calloc(1, sizeof(CuFileApi))
        if self.api == NULL:
            raise MemoryError("no memory for cuFile's functions")
        library = open_library(path)
        self.functions = fill_table(library, <void **>self.api, _REQUIRED + _OPTIONAL)
        for name in _REQUIRED:
            if name not in self.functions:
                raise OSError(f"{path} has no {name}")
        self.path = path
        self.pid = getpid()

    cdef own(self):
        # Its threads, locks and device descriptors stayed in the parent.
        if self.pid != getpid():
            raise RuntimeError("libcufile was opened before this process was forked")

    cdef TimedCall *new_call(self, int what, object device) except NULL:
        """A call in the context of `device` (None: in none), to be completed and passed to
        `call_within`."""
        cdef TimedCall *call
        self.own()
        if device is not None:
            cuda, context = device.handles()
        call = <TimedCall *>calloc(1, sizeof(TimedCall))
        if call == NULL:
            raise MemoryError("no memory to call cuFile")
        call.references = 2
        call.what = what
        call.api = self.api
        pthread_mutex_init(&call.lock, NULL)
        monotonic_cond_init(&call.ended)
        if device is not None:
            call.cuda = <CudaApi *>PyCapsule_GetPointer(cuda, b"gdsload.cuda")
            call.context = PyCapsule_GetPointer(context, b"gdsload.context")
        return call

    cdef void *call_within(self, str name, TimedCall *call, double seconds) except? NULL:
        """The handle that the call made, if it makes one. Raises CuFileFailure, and TimeoutError if
        it does not return in time."""
        cdef pthread_t thread
        cdef timespec until
        cdef CUfileError answer
        cdef void *handle
        cdef int64_t end = monotonic_ns() + <int64_t>(seconds * 1e9)
        cdef int done = 0, error = start_quiet_thread(&thread, run_call, call)
        if error != 0:
            call.references = 1
            release_call(call)
            raise OSError(error, f"no thread to call cuFile: {os.strerror(error)}")
        pthread_detach(thread)
        try:
            while not done and monotonic_ns() < end:
                if call.what != CLOSE_DRIVER:  # it could be opened again while it is being closed
                    PyErr_CheckSignals()
                with nogil:
                    deadline_in(&until, min(end - monotonic_ns(), <int64_t>SIGNAL_WAIT_NS))
                    pthread_mutex_lock(&call.lock)
                    if not call.done:
                        pthread_cond_timedwait(&call.ended, &call.lock, &until)
                    done, answer, handle = call.done, call.answer, call.handle
                    pthread_mutex_unlock(&call.lock)
        finally:
            release_call(call)
        if not done:
            raise TimeoutError(f"{name} has not returned in {seconds:g} s")
        self.require(name, answer)
        return handle

    def open_driver(self, object device, double seconds):
        """Opens cuFile's driver, in the context of ``device``.

        Raises CuFileFailure, and TimeoutError after ``seconds``: the call then continues in a thread
        that cannot be ended, and no other function of this library may be called.
        """
        self.call_within("cuFileDriverOpen", self.new_call(OPEN_DRIVER, device), seconds)

    def close_driver(self, object device, double seconds):
        """Closes the driver, which ends its statistics, in the context of ``device``: without one,
        its buffers would stay registered with CUDA. False if that takes longer than ``seconds``.
        Raises CuFileFailure."""
        self.own()
        if self.api.driver_close == NULL:
            return False
        try:
            self.call_within("cuFileDriverClose", self.new_call(CLOSE_DRIVER, device), seconds)
        except TimeoutError:
            return False
        return True

    @property
    def engines(self):
        """How many engines over it are open. A pump that is closed ends its engine soon after."""
        return gds_add(&self.api.engines, 0)

    cdef require(self, str call, CUfileError answer):
        if answer.err != 0:
            raise CuFileFailure(call, answer.err, answer.cu_err)

    @property
    def version(self):
        """1150 for 1.15; 0 if unknown."""
        cdef int version = 0
        self.own()
        if self.api.get_version == NULL or self.api.get_version(&version).err != 0:
            return 0
        return version

    def properties(self):
        """Some of CUfileDrvProps, flat: sizes in KiB, except max_batch_io_size (entries)."""
        cdef CUfileDrvProps props
        cdef CUfileError answer
        self.own()
        memset(&props, 0, sizeof(props))
        with nogil:
            answer = self.api.get_properties(&props)
        self.require("cuFileDriverGetProperties", answer)
        return {
            "nvfs_major": props.nvfs.major_version,
            "filesystems": props.nvfs.dstatusflags,
            "control": props.nvfs.dcontrolflags,
            "max_direct_io_kb": props.nvfs.max_direct_io_size,
            "features": props.fflags,
            "max_device_cache_kb": props.max_device_cache_size,
            "per_buffer_cache_kb": props.per_buffer_cache_size,
            "max_batch": props.max_batch_io_size,
        }

    def get_size(self, int parameter):
        """A CUFileSizeTConfigParameter_t, or None if this libcufile does not report it."""
        cdef size_t value = 0
        self.own()
        if self.api.get_size == NULL or self.api.get_size(parameter, &value).err != 0:
            return None
        return value

    def set_size(self, int parameter, size_t value):
        """Before the driver is opened. False if this libcufile does not accept it."""
        self.own()
        return self.api.set_size != NULL and self.api.set_size(parameter, value).err == 0

    def set_bool(self, int parameter, bint value):
        """Before the driver is opened. False if this libcufile does not accept it."""
        self.own()
        return self.api.set_bool != NULL and self.api.set_bool(parameter, value).err == 0

    def p2p_flags(self, int target):
        """CUfileP2PFlags of a kind of storage (CUfileDriverStatusFlags), or None."""
        cdef int flags = 0
        self.own()
        if self.api.get_p2p == NULL or self.api.get_p2p(target, &flags).err != 0:
            return None
        return flags

    def register_file(self, int fd, double seconds):
        """The CUfileHandle_t of an open file. The descriptor must outlive it.

        Raises CuFileFailure, and TimeoutError after ``seconds``: the call then continues, and the
        descriptor must stay open.
        """
        cdef TimedCall *call = self.new_call(REGISTER_FILE, None)
        call.fd = fd
        return <uintptr_t>self.call_within("cuFileHandleRegister", call, seconds)

    def deregister_file(self, uint64_t handle):
        """Releases a file's handle. No read of it may be in flight."""
        self.own()
        with nogil:
            self.api.handle_deregister(<void *><uintptr_t>handle)

    def register_buffer(self, uint64_t address, size_t nbytes, object device, double seconds):
        """Registers device memory, so that reads go into it directly.

        Raises CuFileFailure, and TimeoutError after ``seconds``: the call then continues, and the
        memory must not be freed.
        """
        cdef TimedCall *call = self.new_call(REGISTER_BUFFER, device)
        call.base, call.length = <void *><uintptr_t>address, nbytes
        self.call_within("cuFileBufRegister", call, seconds)

    def deregister_buffer(self, uint64_t address, object device):
        """Undoes `register_buffer`."""
        # cuFile looks the memory up in the context of the calling thread, which has none, or that of
        # another device.
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
        """Starts counting (1.15 and later). True if it does."""
        self.own()
        if self.api.stats_level == NULL or self.api.stats_start == NULL:
            return False
        return self.api.stats_level(3).err == 0 and self.api.stats_start().err == 0

    def end_statistics(self, double seconds):
        """Ends counting, for a driver that is never closed: libcufile 1.15 crashes in its exit
        handlers if one of its threads writes statistics then.

        Raises CuFileFailure, and TimeoutError after ``seconds``.
        """
        self.call_within("cuFileSetStatsLevel", self.new_call(END_STATISTICS, None), seconds)

    def statistics(self):
        """Reads of each GPU so far, by I/O path; None if this libcufile has no statistics.

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
        """A table of file handles for an engine that reads into memory of ``device``. A read counts
        as lost after ``patience_seconds`` without an event."""
        return Files(self, device, patience_seconds)


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

    def put(self, int number, uint64_t handle):
        """Sets the handle of ``number``; 0: none."""
        cdef void **grown
        cdef int room
        if number < 0:
            raise IndexError(f"number {number}")
        pthread_mutex_lock(&self.table.lock)
        if number >= self.table.room:
            room = 2 * number + 16
            grown = <void **>realloc(self.table.handles, room * sizeof(void *))
            if grown != NULL:
                memset(grown + self.table.room, 0, (room - self.table.room) * sizeof(void *))
                self.table.handles = grown
                self.table.room = room
        if number < self.table.room:
            self.table.handles[number] = <void *><uintptr_t>handle
        room = self.table.room
        pthread_mutex_unlock(&self.table.lock)
        if number >= room:
            raise MemoryError("no memory for a table of files")

    @property
    def address(self):
        """Address of the table: the context of an engine over cuFile."""
        return <uintptr_t>self.table

    def __dealloc__(self):
        if self.table != NULL:
            release_files(self.table)
