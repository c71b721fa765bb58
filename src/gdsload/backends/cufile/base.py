"""What ``gds`` and ``gds_mt`` have in common: files made known to cuFile, a ring of VRAM that is
registered with it, and the truth about the road that the bytes took. How reads are handed to cuFile
is what the two differ in.
"""

from __future__ import annotations

import fcntl
import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from gdsload._native.cuda import Device
from gdsload._native.cufile import CuFileFailure, Files
from gdsload.backends.base import (
    VRAM,
    Backend,
    Memory,
    OpenFile,
    Option,
    Progress,
    Registration,
    Support,
)
from gdsload.backends.cufile import library
from gdsload.backends.staging import StagedRequest, StagingPipeline
from gdsload.errors import BackendUnavailable, CuFileError
from gdsload.memory.staging_ring import RING_BYTES, StagingRing, ring_for
from gdsload.planning.read_plan import DEFAULT_BLOCK_BYTES, Transfer
from gdsload.system import gpu

# An event that has not come for so long never will.
EVENT_SECONDS = 30.0


class CuFileBackend(Backend):
    """Reads files into VRAM by way of cuFile and a registered ring."""

    memory_kinds: ClassVar[frozenset[str]] = frozenset({VRAM})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        request = self.settings["request_bytes"]
        if request < 0 or request % DEFAULT_BLOCK_BYTES:
            raise ValueError(
                f"request_bytes={request!r}: requests are multiples of {DEFAULT_BLOCK_BYTES} bytes"
            )
        self.refusals: dict[str, str] = {}
        self.engine = ""
        self._device = "cuda:0"
        self._driver: library.Driver | None = None
        self._roads: dict[str, StagingPipeline] = {}
        self._handles: dict[int, int] = {}  # slot -> CUfileHandle_t
        self._known: list[tuple[int, int]] = []  # (handle, our descriptor)
        self._slots = 0
        self._counted: dict[str, int] = {}
        self._under_way: set[int] = set()

    @classmethod
    def options(cls) -> tuple[Option, ...]:
        return (
            Option("allow_compat", False, "use cuFile's compatibility mode where nothing else is"),
            Option("ring_bytes", RING_BYTES, "bytes of VRAM that reads pass through"),
        )

    @classmethod
    def probe(cls, device: str = "cpu") -> Support:
        """Whether cuFile has a native way to this device."""
        return cls.probe_with(device, {})

    @classmethod
    def probe_with(cls, device: str, options: Mapping[str, Any]) -> Support:
        if device.partition(":")[0] != "cuda":
            return Support(False, (f"it reaches CUDA devices, not {device}",))
        return library.support(device, bool(options.get("allow_compat", False)))

    def _open(self, device: str) -> library.Driver:
        if device.partition(":")[0] == "cuda":
            self._device = device
        if self._driver is None:
            self._driver = library.opened(self._device, self.settings["allow_compat"])
            self.engine = self._driver.mode
            if self._driver.mode == library.COMPAT:
                self.refusals[f"{self.name}/native"] = (
                    "cuFile has no native path here; its compatibility mode was allowed"
                )
            self._counted = self._driver.paths() or {}
        if self._driver.pid != os.getpid():
            raise BackendUnavailable(
                "this backend was opened before a fork",
                {self.name: "used after fork; start processes that load with 'spawn'"},
            )
        return self._driver

    def register(self, what: OpenFile | Memory) -> Registration:
        """Raises CuFileError where cuFile does not take the file."""
        if isinstance(what, Memory):
            if what.kind != VRAM:
                raise BackendUnavailable(f"backend {self.name!r} does not reach {what.kind}")
            return Registration(what, -1)
        driver = self._open(self._device)
        fd = own_descriptor(what)
        try:
            handle = driver.register_file(fd)
        except TimeoutError as error:  # the call goes on: the descriptor stays open
            raise BackendUnavailable(
                f"backend {self.name!r}: {what.path}: {error}", {self.name: str(error)}
            ) from error
        except CuFileFailure as error:
            os.close(fd)
            raise CuFileError(
                f"{what.path}: cuFile does not take it: {library.explain(error.code) or error}",
                code=error.code,
                path=what.path,
            ) from error
        except BaseException:
            os.close(fd)
            raise
        self._known.append((handle, fd))
        self._slots += 2
        for slot in (self._slots - 2, self._slots - 1):
            self._handles[slot] = handle
            for table in self._tables():
                table.put(slot, handle)
        return Registration(what, (self._slots - 2, self._slots - 1))

    def deregister(self, registration: Registration) -> None:
        """Handles go with the backend: a read that was given up may still be using one."""

    def _tables(self) -> list[Files]:
        """What its roads know of files."""
        return [road.files for road in self._roads.values() if road.files is not None]

    @abstractmethod
    def _new_engine(self) -> object:
        """The capsule of the engine that talks to cuFile."""

    @abstractmethod
    def _depth(self) -> int:
        """Reads that the pump keeps under way."""

    def _road(self, device: str) -> StagingPipeline:
        known = self._roads.get(device)
        if known is not None:
            return known
        driver = self._open(device)
        ordinal = gpu.ordinal_of(device)
        event_seconds = float(self.settings.get("event_seconds", EVENT_SECONDS))
        kind = (self.name, self._depth(), event_seconds)
        with ring_for(
            VRAM,
            ordinal,
            self.limits(device).max_request,
            self.settings["ring_bytes"],
            _registrar(driver, gpu.device(ordinal), self.refusals, self.name),
        ) as ring:
            road = ring.unpark(kind)
            if not isinstance(road, StagingPipeline):
                road = self._open_road(driver, ring, kind, event_seconds)
        if road.files is not None:
            for slot, handle in self._handles.items():
                road.files.put(slot, handle)
        self._roads[device] = road
        return road

    def _open_road(
        self, driver: library.Driver, ring: StagingRing, kind: object, event_seconds: float
    ) -> StagingPipeline:
        table = driver.library.files(gpu.device(ring.ordinal), event_seconds)
        try:
            return StagingPipeline(
                self.name, ring, self._new_engine(), self._depth(), files=table,
                explain=library.explain, kind=kind,
            )  # fmt: skip
        except OSError as error:
            why = library.explain(error.errno or 0) or str(error.strerror)
            raise BackendUnavailable(
                f"backend {self.name!r} cannot be opened: {why}", {self.name: why}
            ) from error

    def prepare(
        self,
        transfers: Sequence[Transfer],
        files: Sequence[Registration],
        memory: Sequence[Registration],
    ) -> StagedRequest:
        device = self._device
        if memory and isinstance(memory[0].what, Memory) and memory[0].what.device:
            device = memory[0].what.device
        return self._road(device).prepare(transfers, files, memory)

    def post(self, request: StagedRequest) -> None:
        if not self._under_way and self._driver is not None:
            self._counted = self._driver.paths() or {}  # what others read meanwhile is theirs
        self._under_way.add(id(request))
        request.start()

    def yield_to_loads(self, request: StagedRequest, ahead: bool) -> None:
        request.yield_to_loads(ahead)

    def check(self, request: StagedRequest) -> Progress:
        return request.progress()

    def wait(self, request: StagedRequest, seconds: float, first: int = 0, last: int = -1) -> None:
        request.wait(seconds, first, last)

    def release(self, request: StagedRequest) -> None:
        self._under_way.discard(id(request))
        request.end()

    def follow(self, device: str, stream: int) -> bool:
        return self._road(device).follow(stream)

    def paths(self, request: StagedRequest) -> dict[str, int]:
        """Bytes by the road that cuFile's own counters tell of since they were last asked."""
        direct, buffered, _, _ = request.native.counts()
        total = direct + buffered
        driver = self._driver
        if driver is None:
            return {}
        now = driver.paths()
        if now is None:
            return {f"{self.name}/{driver.mode}": total}
        moved = {road: now[road] - self._counted.get(road, 0) for road in now}
        self._counted = now
        # Batches are not counted everywhere: then there is only what the driver said it would do.
        parts = shares_of(total, moved) or {driver.mode: total}
        return {f"{self.name}/{road}": part for road, part in parts.items()}

    def close(self) -> None:
        """Ends the threads and gives cuFile its files back. A read or a call that hangs keeps
        both."""
        for table in self._tables():
            for slot in self._handles:
                table.put(slot, 0)
        quiet = [road.leave() for road in self._roads.values()]
        self._roads.clear()
        known, self._known = self._known, []
        self._handles.clear()
        driver = self._driver
        if driver is not None and all(quiet) and driver.pid == os.getpid() and not driver.stuck:
            for handle, fd in known:
                driver.deregister_file(handle)
                os.close(fd)
        self._driver = None


def _registrar(
    driver: library.Driver, device: Device, refusals: dict[str, str], name: str
) -> Callable[[int, int], Callable[[], None]]:
    def register(address: int, nbytes: int) -> Callable[[], None]:
        try:
            driver.register_buffer(address, nbytes, device)
        except CuFileFailure as error:
            # cuFile then goes through bounce buffers of its own: slower, and still right.
            refusals[f"{name}/registered ring"] = library.explain(error.code) or str(error)
            return lambda: None
        return lambda: driver.deregister_buffer(address, device)

    return register


def own_descriptor(file: OpenFile) -> int:
    """A descriptor for cuFile alone: it knows files by number, and one number only once.

    For direct I/O wherever the filesystem does it: older releases take no other, newer ones would
    read through the page cache.
    """
    if file.direct_fd >= 0:
        return os.dup(file.direct_fd)
    if fcntl.fcntl(file.fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        with suppress(OSError):
            return os.open(f"/proc/self/fd/{file.fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    return os.dup(file.fd)


def shares_of(total: int, reads: dict[str, int]) -> dict[str, int]:
    """Splits bytes over roads as their reads were counted, requests being all of a size; empty
    where none was counted."""
    counted = sum(count for count in reads.values() if count > 0)
    if not counted:
        return {}
    found: dict[str, int] = {}
    left, left_reads = total, counted
    for road, count in reads.items():
        if count > 0:
            found[road] = left * count // left_reads
            left -= found[road]
            left_reads -= count
    return found
