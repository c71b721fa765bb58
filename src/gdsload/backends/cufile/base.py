"""The common part of ``gds`` and ``gds_mt``: files registered with cuFile, a ring of VRAM that is
registered with it, and the I/O path that the bytes really took. Not responsible for handing reads
to cuFile: the two backends differ in that.
"""

from __future__ import annotations

import fcntl
import os
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, ClassVar

from gdsload._native.cuda import Device
from gdsload._native.cufile import CuFileFailure, Files
from gdsload.backends.base import (
    Memory,
    OpenFile,
    Option,
    Registration,
    Support,
    require_own_process,
)
from gdsload.backends.cufile import library
from gdsload.backends.pump_request import PumpBackend, PumpedRequest
from gdsload.backends.staging import StagingPipeline
from gdsload.checkpoint.file_io import close_files
from gdsload.errors import BackendUnavailable, CuFileError, ReadError
from gdsload.memory import VRAM, late_copies
from gdsload.memory.staging_ring import Register, ring_for
from gdsload.system import gpu
from gdsload.system.device_name import device_kind

MOST_RING_BYTES = 512 << 20  # of GPU memory, if the user does not set it
# A completion that has not arrived after this time is lost.
EVENT_SECONDS = 30.0


class CuFileBackend(PumpBackend):
    """Reads files into VRAM through cuFile and a registered staging ring."""

    memory_kinds: ClassVar[frozenset[str]] = frozenset({VRAM})
    counted: ClassVar[bool] = True  # whether cuFile counts its reads, if it counts any

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._require("ring_bytes", least=0)
        self._device = ""  # known when reads are prepared
        self._driver: library.Driver | None = None
        self._handles: dict[int, int] = {}  # file number -> CUfileHandle_t
        self._files: list[tuple[int, int, bool]] = []  # (CUfileHandle_t, our descriptor, distant)
        self._counted: dict[str, int] = {}  # reads by I/O path, at the last look
        self._counted_first: dict[str, int] = {}  # the same, when it was opened

    @classmethod
    def options(cls) -> tuple[Option, ...]:
        return (
            Option(
                "allow_compat",
                False,
                "use cuFile's compatibility mode if there is no native path; not with auto",
            ),
            Option(
                "ring_bytes",
                0,
                "bytes of VRAM that reads pass through; 0: one slot a read, up to 512 MiB",
            ),
        )

    @classmethod
    def probe(cls, device: str = "cpu") -> Support:
        """Whether cuFile has a native path to this device."""
        return cls.probe_with(device, {})

    @classmethod
    def probe_with(cls, device: str, options: Mapping[str, Any]) -> Support:
        if device_kind(device) != "cuda":
            return Support(False, (f"it reaches CUDA devices, not {device}",))
        return library.support(device, options.get("allow_compat") is True, cls.counted)

    def _open(self, device: str) -> library.Driver:
        if device_kind(device) == "cuda":
            self._device = device
        if self._driver is None:
            allow_compat = self.settings["allow_compat"]
            self._driver = library.opened(self._known_device(), allow_compat, self.counted)
            self.engine = self._driver.mode
            if self._driver.mode == library.COMPAT:
                self.refusals[f"{self.name}/native"] = (
                    "cuFile has no native path here; its compatibility mode was allowed"
                )
            if kb := self._driver.split_kb:
                self.refusals[f"{self.name}/large reads"] = (
                    f"cuFile reads parts of {kb} KiB, one after the other: set"
                    f" max_direct_io_size_kb to {library.DIRECT_IO_KB} in cufile.json"
                )
            self._counted = self._counted_first = self._driver.paths()
        require_own_process(self._driver.pid, self.name)
        return self._driver

    def _known_device(self) -> str:
        """Where its reads go; before the first one, which files are registered before, the device
        that the load has opened."""
        opened = gpu.any_open()
        return self._device or f"cuda:{opened.ordinal if opened is not None else 0}"

    def register(self, what: OpenFile | Memory) -> Registration:
        """Raises CuFileError if cuFile refuses the file."""
        if isinstance(what, Memory):
            if what.kind != VRAM:
                raise BackendUnavailable(f"backend {self.name!r} does not reach {what.kind}")
            return Registration(what, -1)
        driver, distant = self._open(self._device), what.storage.has_round_trips
        try:
            fd = own_descriptor(what)
        except OSError as error:
            raise ReadError(
                f"{what.path}: no descriptor for cuFile: {error.strerror}",
                path=what.path,
                errno=error.errno,
            ) from error
        try:
            handle = driver.register_file(fd)
        except TimeoutError as error:  # the call goes on: its descriptor must stay open
            raise BackendUnavailable(
                f"backend {self.name!r}: {what.path}: {error}", {self.name: str(error)}
            ) from error
        except CuFileFailure as error:
            close_files([fd], may_hang=distant)
            raise CuFileError(
                f"{what.path}: cuFile does not take it: {library.explain(error.code) or error}",
                code=error.code,
                path=what.path,
            ) from error
        except OSError as error:  # no thread for the call
            close_files([fd], may_hang=distant)
            raise BackendUnavailable(
                f"backend {self.name!r}: {error.strerror}", {self.name: str(error.strerror)}
            ) from error
        # After any other error, of a signal, the descriptor stays: the call may still succeed.
        self._files.append((handle, fd, distant))
        numbers = self._new_file_numbers()
        for number in numbers:
            self._handles[number] = handle
            for table in self._tables():
                table.put(number, handle)
        return Registration(what, numbers)

    def deregister(self, registration: Registration) -> None:
        """Nothing to do: `close` ends handles, since an abandoned read may still use one."""

    def _tables(self) -> list[Files]:
        """The handles of files in each pipeline."""
        return [each.files for each in self._pipelines.values() if each.files is not None]

    @abstractmethod
    def _new_engine(self) -> object:
        """The capsule of the engine that calls cuFile."""

    @abstractmethod
    def _depth(self) -> int:
        """Reads in flight."""

    def _open_pipeline(self, device: str) -> StagingPipeline:
        driver, owner = self._open(device), gpu.device(gpu.ordinal_of(device))
        event_seconds = float(self.settings.get("event_seconds", EVENT_SECONDS))
        slot_bytes, depth = self.limits(device).max_request, self._depth()
        register = _registrar(driver, owner)
        handles = driver.library.files(owner, event_seconds)
        # Registering takes time in proportion to the ring: it has no slot more than is used.
        most = max(min(depth * slot_bytes, MOST_RING_BYTES), 2 * slot_bytes)
        ring_bytes = self.settings["ring_bytes"] or most
        with ring_for(VRAM, owner.ordinal, slot_bytes, ring_bytes, register) as ring:
            if ring.notes:
                self.refusals[f"{self.name}/registered ring"] = "; ".join(ring.notes)
            pipeline = StagingPipeline(self.name, ring, self._new_engine(), depth, files=handles)
        for number, handle in self._handles.items():
            handles.put(number, handle)
        return pipeline

    def paths(self, request: PumpedRequest) -> dict[str, int]:
        """Bytes by I/O path, according to cuFile's own counters since the last call."""
        direct, buffered, _, _ = request.native.counts()
        total, driver = direct + buffered, self._driver
        if driver is None:
            return {}
        counts = driver.paths()
        reads, all_reads = (
            {path: counts[path] - before.get(path, 0) for path in counts}
            for before in (self._counted, self._counted_first)
        )
        self._counted = counts
        # Another request of this load may have got its counts. Without any (before 1.15, or of
        # batches) only the mode of the driver is known, which is that of all files only if
        # compatibility mode is refused.
        parts = bytes_by_path(total, reads) or bytes_by_path(total, all_reads)
        parts = parts or {driver.uncounted_path: total}
        return {f"{self.name}/{path}": nbytes for path, nbytes in parts.items()}

    def close(self) -> None:
        """Ends the threads and deregisters the files: when the last read that was given up has
        ended, or never if it hangs. If a call of cuFile hangs, or a read is lost, whose end cuFile
        does not report, the files stay registered and open."""
        for table in self._tables():
            for number in self._handles:
                table.put(number, 0)
        pipelines = list(self._pipelines.values())
        super().close()
        files, self._files = self._files, []
        self._handles.clear()
        driver, self._driver = self._driver, None
        if driver is None or driver.pid != os.getpid():
            return

        def finish() -> bool:
            if not all(pipeline.pump.finished for pipeline in pipelines):
                return False
            lost = any(pipeline.stage.lost for pipeline in pipelines)
            while files and not lost and not driver.stuck:
                handle, fd, distant = files.pop()
                driver.deregister_file(handle)
                close_files([fd], may_hang=distant)
            for pipeline in pipelines:
                pipeline.ring.free_when_idle()
            return True

        if not finish():  # a read that was given up may still use them
            late_copies.keep(pipelines, finish)


def _registrar(driver: library.Driver, device: Device) -> Register:
    def register(address: int, nbytes: int, notes: list[str]) -> Callable[[], None]:
        try:
            driver.register_buffer(address, nbytes, device)
        except CuFileFailure as error:
            # cuFile then uses bounce buffers of its own, which is slower.
            notes.append(library.explain(error.code) or str(error))
            return lambda: None
        return lambda: driver.deregister_buffer(address, device)

    return register


def own_descriptor(file: OpenFile) -> int:
    """A descriptor for cuFile alone, which accepts each number only once.

    With O_DIRECT if the filesystem allows it: older releases accept nothing else, and newer ones
    would read through the page cache.
    """
    if file.direct_fd >= 0:
        return os.dup(file.direct_fd)
    if fcntl.fcntl(file.fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        with suppress(OSError):
            return os.open(f"/proc/self/fd/{file.fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    return os.dup(file.fd)


def bytes_by_path(total: int, reads: dict[str, int]) -> dict[str, int]:
    """Splits bytes over I/O paths in proportion to their reads; empty if none was counted."""
    found: dict[str, int] = {}
    left, left_reads = total, sum(count for count in reads.values() if count > 0)
    for path, count in reads.items():
        if count > 0:
            found[path] = left * count // left_reads
            left -= found[path]
            left_reads -= count
    return found
