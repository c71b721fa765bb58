"""The ``posix`` backend: files to DRAM through the kernel, by one of four engines.

An engine that does not work (see `engines`) ends in the next one, and in a reason that the report
shows.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

from gdsload._native.memory import Region
from gdsload._native.populate import Populator
from gdsload._native.pump import Pump
from gdsload._native.request import Request
from gdsload.backends.base import (
    DRAM,
    VRAM,
    Backend,
    Memory,
    OpenFile,
    Option,
    Progress,
    Registration,
    Support,
)
from gdsload.backends.posix import bounce_buffers, engines
from gdsload.backends.posix.engines import ENGINES, try_engine, unopened
from gdsload.backends.pump_request import PumpedRequest, file_table
from gdsload.errors import BackendUnavailable
from gdsload.memory.host_buffers import POPULATE_THREADS, POPULATED_AHEAD_BYTES
from gdsload.planning.read_plan import DEFAULT_BLOCK_BYTES, Limits, Transfer

# 4 MiB, 16 in flight: the smallest that reached the disk's rate in benchmarks/engines.py.
REQUEST_BYTES = 4 << 20
DEPTH = 16
# Staging ring in DRAM (gdsload.memory.staging_ring): room for the requests of two loads side by
# side, 2 * DEPTH each. The first load of a process waits until all of it is pinned.
RING_BYTES = 4 * DEPTH * REQUEST_BYTES
# The kernel takes no larger buffer, and takes them when the ring is made.
LARGEST_BUFFER_BYTES = 1 << 30
# How long a release, and then a close, waits for reads that cannot be called back before it leaves
# them, with the memory they point into, to the pump. Ctrl-C takes both, and shall take half a
# second at most.
DRAIN_SECONDS = 0.15
# The longest read that the kernel does not cut, and more in flight than any disk asks for.
MOST_REQUEST_BYTES = 1 << 30
MOST_DEPTH = 4096


class PosixBackend(Backend):
    """Reads files into DRAM, and into VRAM through a pinned staging ring."""

    name: ClassVar[str] = "posix"
    memory_kinds: ClassVar[frozenset[str]] = frozenset({DRAM, VRAM})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        request_bytes, depth = self.settings["request_bytes"], self.settings["depth"]
        if not 0 < request_bytes <= MOST_REQUEST_BYTES or request_bytes % DEFAULT_BLOCK_BYTES:
            raise ValueError(
                f"request_bytes={request_bytes!r}: requests are multiples of {DEFAULT_BLOCK_BYTES}"
                f" bytes, up to {MOST_REQUEST_BYTES}"
            )
        if not 0 < depth <= MOST_DEPTH:
            raise ValueError(f"depth={depth!r}: from 1 to {MOST_DEPTH} reads can be in flight")
        if self.settings["bounce"] not in bounce_buffers.CHOICES:
            raise ValueError(
                f"bounce={self.settings['bounce']!r} is none of {', '.join(bounce_buffers.CHOICES)}"
            )
        self._bounced: bounce_buffers.BounceBuffers | None = None
        self.refusals: dict[str, str] = {}
        self.engine = self._choose_engine(self.settings["engine"])
        self._pump: Pump | None = None
        self._buffers: list[tuple[int, int]] = []
        self._slots = 0  # numbers for descriptors, never used twice
        self._device_roads: dict[str, Any] = {}

    @classmethod
    def options(cls) -> tuple[Option, ...]:
        return (
            Option("engine", "auto", f"one of {', '.join(ENGINES)}, or auto: the first that works"),
            Option("request_bytes", REQUEST_BYTES, "bytes of one read, at most"),
            Option("depth", DEPTH, "reads in flight"),
            Option("populate_threads", POPULATE_THREADS, "threads that make memory ready; 0: none"),
            Option("huge_pages", "auto", "auto: where they are cheaper now; never"),
            Option("fixed_buffers", "auto", "auto: register memory that is reused; always; never"),
            Option("ring_bytes", RING_BYTES, "bytes of pinned DRAM on the way to a device"),
            Option(
                "bounce", "auto", "auto: through huge pages where that is faster; always; never"
            ),
        )

    @classmethod
    def probe(cls, device: str = "cpu") -> Support:
        """Whether one engine works: asked in order, up to the first that does."""
        if device.partition(":")[0] != "cpu":
            from gdsload.backends.posix import (
                device as device_module,  # not before a device is asked for
            )

            if why := device_module.why_not(device):
                return Support(False, (why,))
        reasons: list[str] = []
        for engine in ENGINES:
            answer = try_engine(engine)
            if answer.usable:
                return Support(True, tuple(reasons))
            reasons.append(f"engine {engine}: {answer}")
        return Support(False, tuple(reasons))

    def _choose_engine(self, wanted: str) -> str:
        if wanted != "auto":
            answer = try_engine(wanted)
            if not answer.usable:
                raise BackendUnavailable(
                    f"engine {wanted!r} of backend 'posix' cannot work here: {answer}",
                    {f"posix/{wanted}": str(answer)},
                )
            return wanted
        return self._first_engine(ENGINES)

    def _first_engine(self, engines: Sequence[str]) -> str:
        for engine in engines:
            answer = try_engine(engine)
            if answer.usable:
                return engine
            self.refusals[f"posix/{engine}"] = str(answer)
        raise BackendUnavailable("no engine of backend 'posix' works here", self.refusals)

    def limits(self, device: str = "cpu") -> Limits:
        return Limits(max_request=self.settings["request_bytes"], depth=self.settings["depth"])

    def register(self, what: OpenFile | Memory) -> Registration:
        if isinstance(what, OpenFile):
            self._slots += 2
            return Registration(what, (self._slots - 2, self._slots - 1))
        if what.kind == VRAM:
            return Registration(what, -1)
        if what.kind != DRAM:
            raise BackendUnavailable(f"backend 'posix' does not reach {what.kind}")
        fixed = self.settings["fixed_buffers"]
        wanted = fixed == "always" or (fixed == "auto" and what.reused)
        # Registering pins all of it at once, which only pays for memory that many reads go to.
        if not wanted or what.length > LARGEST_BUFFER_BYTES or self._pump is not None:
            return Registration(what, -1)
        self._buffers.append((what.address, what.length))
        return Registration(what, len(self._buffers) - 1)

    def deregister(self, registration: Registration) -> None:
        """Slots and buffers go with the engine: closing it gives all of them back."""

    @property
    def pump(self) -> Pump:
        if self._pump is not None and self._pump.pid != os.getpid():
            raise BackendUnavailable(
                "this backend was opened before a fork: its threads stayed in the parent",
                {"posix": "used after fork; open a new one in the child"},
            )
        if self._pump is None:
            self._pump = self._open_pump()
        return self._pump

    def _open_pump(self) -> Pump:
        """What worked when it was tried may be used up now: then the next engine, in ``auto``."""
        while True:
            engine = engines.engine_module(self.engine).engine()
            way = bounce_buffers.BounceBuffers(engine, self.settings)
            try:
                pump = Pump(way.engine, self.settings["depth"], self._buffers)
                self._bounced = way
                return pump
            except OSError as error:
                refusal = unopened(self.engine, error)
            self.refusals[f"posix/{self.engine}"] = str(refusal)
            left = ENGINES[ENGINES.index(self.engine) + 1 :]
            if self.settings["engine"] != "auto" or not left:
                raise BackendUnavailable(
                    f"backend 'posix' cannot be opened: {refusal}", self.refusals
                )
            self.engine = self._first_engine(left)

    @property
    def fixed_buffers(self) -> bool:
        """Whether the engine reads into registered buffers."""
        return self._pump is not None and self._pump.fixed_buffers

    def prepare(
        self,
        transfers: Sequence[Transfer],
        files: Sequence[Registration],
        memory: Sequence[Registration],
    ) -> Any:
        if memory and isinstance(memory[0].what, Memory) and memory[0].what.kind == VRAM:
            return self._device_road(memory[0].what.device).prepare(transfers, files, memory)
        pump = self.pump
        # Before its threads make memory ready, which whoever maps memory has to wait for.
        if self._bounced is not None:
            self._bounced.arm(transfers, files)
        return PosixRequest(pump, self.settings, transfers, files, memory)

    def _device_road(self, device: str) -> Any:
        from gdsload.backends.posix import device as device_module

        if device not in self._device_roads:
            if self.engine == "linuxaio" and self.settings["engine"] == "auto" and not self._pump:
                # It copies what is in the page cache one read after the other; a device takes
                # several times as much. From storage threads are as quick.
                self.engine = self._first_engine(("threads", "linuxaio"))
            capsule = engines.engine_module(self.engine).engine()
            self._device_roads[device] = device_module.open_road(
                device, self.engine, capsule, self.settings, self.refusals
            )
        return self._device_roads[device]

    def post(self, request: Any) -> None:
        request.start()

    def check(self, request: Any) -> Progress:
        progress: Progress = request.progress()
        return progress

    def wait(self, request: Any, seconds: float, first: int = 0, last: int = -1) -> None:
        request.wait(seconds, first, last)

    def release(self, request: Any) -> None:
        request.end()

    def yield_to_loads(self, request: Any, ahead: bool) -> None:
        request.yield_to_loads(ahead)

    def follow(self, device: str, stream: int) -> bool:
        return bool(self._device_road(device).follow(stream))

    def paths(self, request: Any) -> dict[str, int]:
        direct, buffered, _, _ = request.native.counts()
        through = 0
        if isinstance(request, PosixRequest) and self._bounced is not None:
            through = self._bounced.news(direct)
        found = {
            f"posix/{self.engine}/direct": direct - through,
            f"posix/{self.engine}/buffered": buffered,
        }
        return {**found, f"posix/{self.engine}/direct bounced": through} if through else found

    def close(self) -> None:
        while self._device_roads:
            self._device_roads.popitem()[1].leave()
        ended = True
        if self._pump is not None:
            ended = self._pump.close(DRAIN_SECONDS)
            self._pump = None
            self._buffers.clear()
        if self._bounced is not None:
            self._bounced.close(ended)
            self._bounced = None


class PosixRequest(PumpedRequest):
    """Transfers bound to a pump, and the threads that make their memory ready."""

    def __init__(
        self,
        pump: Pump,
        settings: dict[str, Any],
        transfers: Sequence[Transfer],
        files: Sequence[Registration],
        memory: Sequence[Registration],
    ) -> None:
        self.populator: Populator | None = None
        table, direct, buffered = file_table(files)
        handles = [getattr(entry.what, "region", None) for entry in memory]
        regions = [None if region is None else region.handle() for region in handles]
        bases = [entry.what.address for entry in memory if isinstance(entry.what, Memory)]
        ops = []
        for transfer in transfers:
            lanes = direct if transfer.io_mode == "direct" else buffered
            target = transfer.target
            ops.append(
                (
                    lanes[transfer.shard],
                    transfer.offset,
                    transfer.length,
                    transfer.wanted,
                    bases[target] + transfer.target_offset,
                    regions[target],
                    memory[target].handle,
                )
            )
        if settings["populate_threads"] > 0:
            self.populator = populator_for(
                transfers, handles, settings["populate_threads"], settings["huge_pages"] != "never"
            )
        super().__init__("posix", Request(pump, table, ops, self.populator))

    def yield_to_loads(self, ahead: bool) -> None:
        super().yield_to_loads(ahead)
        if self.populator is not None:
            self.populator.gentle = _spare_threads() if ahead else 0

    def end(self) -> None:
        """After this nothing is written to its memory any more, or it is kept."""
        self.native.cancel()
        self.native.quiet(DRAIN_SECONDS)
        if self.populator is not None:
            self.populator.stop()


def _spare_threads() -> int:
    """Threads that make memory ready while nobody waits: a core is left to whoever works there."""
    return max(1, min(POPULATE_THREADS, len(os.sched_getaffinity(0)) - 1))


def populator_for(
    transfers: Sequence[Transfer], regions: Sequence[Any], threads: int, huge: bool
) -> Populator | None:
    """Threads that make the memory of these transfers ready, in their order; None for too little
    to be worth a thread, memory that is ready, or that is no mapping of the library's."""
    parts: list[tuple[object, int, int]] = []
    last, reach, total = -1, 0, 0
    for transfer in transfers:
        region = regions[transfer.target]
        if not isinstance(region, Region):
            return None
        if region.populated(transfer.target_offset, transfer.length):
            continue
        total += transfer.length
        if transfer.target == last and transfer.target_offset == reach:
            handle, offset, length = parts[-1]
            parts[-1] = (handle, offset, length + transfer.length)
        else:
            parts.append((region.handle(), transfer.target_offset, transfer.length))
        last, reach = transfer.target, transfer.target_offset + transfer.length
    if total < 4 * REQUEST_BYTES:
        return None
    return Populator(parts, threads, POPULATED_AHEAD_BYTES, huge)
