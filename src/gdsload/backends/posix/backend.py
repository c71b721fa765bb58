"""The ``posix`` backend: reads through the kernel, by one of four engines.

Reads into DRAM go to the memory itself or through bounce buffers, reads into VRAM through a pinned
staging ring. If an engine does not work here (see `engines`), the next one is used and the report
says why.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from gdsload._native.memory import Region
from gdsload._native.populate import Populator
from gdsload._native.pump import Pump
from gdsload.backends.base import (
    DRAM,
    VRAM,
    Memory,
    OpenFile,
    Option,
    Registration,
    Registrations,
    Support,
    require_own_process,
)
from gdsload.backends.posix import bounce_buffers, engines
from gdsload.backends.posix.engines import ENGINES, first_working, try_engine, unopened
from gdsload.backends.pump_request import PumpBackend, PumpedRequest
from gdsload.errors import BackendUnavailable
from gdsload.memory.host_buffers import POPULATE_THREADS, POPULATED_AHEAD_BYTES
from gdsload.planning.read_plan import DEFAULT_BLOCK_BYTES, Limits, Transfer
from gdsload.system.storage import Storage

if TYPE_CHECKING:
    from gdsload.backends.staging import StagingPipeline

# 4 MiB, 16 in flight: the smallest that reached the disk's rate in benchmarks/engines.py.
REQUEST_BYTES = 4 << 20
DEPTH = 16
# Staging ring in DRAM: room for the reads of two loads at the same time, 2 * DEPTH each. The first
# load of a process waits until all of it is pinned.
RING_BYTES = 4 * DEPTH * REQUEST_BYTES
# The largest buffer that io_uring registers.
LARGEST_BUFFER_BYTES = 1 << 30
# How long a release, and then a close, waits for reads that cannot be cancelled. After that the
# pump keeps them, and the memory they write to. Ctrl-C waits for both, half a second at most.
DRAIN_SECONDS = 0.15
# The longest read that the kernel does not shorten, and more reads in flight than any disk needs.
MOST_REQUEST_BYTES = 1 << 30
MOST_DEPTH = 4096


class PosixBackend(PumpBackend):
    """Reads files into DRAM and, through a pinned staging ring, into VRAM."""

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
        # Settings of loads to DRAM. Distant storage changes those that the user did not set.
        self._dram_settings = self.settings
        self._asked = frozenset(options)
        self._bounce: bounce_buffers.BounceBuffers | None = None
        self._pump: Pump | None = None
        self._buffers: list[tuple[int, int]] = []  # to register with the engine
        wanted = self.settings["engine"]
        if wanted == "auto":
            self.engine = self._first_engine(ENGINES)
        elif (answer := try_engine(wanted)).usable:
            self.engine = wanted
        else:
            raise BackendUnavailable(
                f"engine {wanted!r} of backend 'posix' cannot work here: {answer}",
                {f"posix/{wanted}": str(answer)},
            )

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
        """Whether one of the engines works."""
        if device.partition(":")[0] != "cpu":
            from gdsload.backends.posix import device as device_module  # imports CUDA

            if why := device_module.why_not(device):
                return Support(False, (why,))
        refusals: dict[str, str] = {}
        engine = first_working(ENGINES, refusals)
        reasons = [f"engine {name.partition('/')[2]}: {why}" for name, why in refusals.items()]
        return Support(bool(engine), tuple(reasons))

    def _first_engine(self, names: Sequence[str]) -> str:
        engine = first_working(names, self.refusals)
        if not engine:
            raise BackendUnavailable("no engine of backend 'posix' works here", self.refusals)
        return engine

    def limits(self, device: str = "cpu") -> Limits:
        # Slots of a staging ring have one size, whatever the storage.
        settings = self._dram_settings if device == "cpu" else self.settings
        return Limits(settings["request_bytes"], depth=self._dram_settings["depth"])

    def register(self, what: OpenFile | Memory) -> Registration:
        if isinstance(what, OpenFile):
            self._adapt(what.storage)
            return Registration(what, self._new_slots())
        if what.kind == VRAM:
            return Registration(what, -1)
        if what.kind != DRAM:
            raise BackendUnavailable(f"backend 'posix' does not reach {what.kind}")
        fixed = self.settings["fixed_buffers"]
        wanted = fixed == "always" or (fixed == "auto" and what.reused)
        # Registering pins the whole memory, which pays off only if many reads write to it. An
        # engine takes buffers only when it is opened.
        if not wanted or what.length > LARGEST_BUFFER_BYTES or self._pump is not None:
            return Registration(what, -1)
        self._buffers.append((what.address, what.length))
        return Registration(what, len(self._buffers) - 1)

    def _adapt(self, storage: Storage) -> None:
        """Suits the reads of an engine that is not open yet to distant storage."""
        if storage.distant and self._pump is None:
            # A few bounce buffers would leave most of the depth unused.
            suited = {**storage._asdict(), "bounce": "never"}
            wanted = suited.keys() & self.settings.keys() - self._asked
            self._dram_settings = {**self.settings, **{name: suited[name] for name in wanted}}

    def deregister(self, registration: Registration) -> None:
        """Nothing to do: slots and buffers are released when the engine is closed."""

    @property
    def pump(self) -> Pump:
        """The pump of loads to DRAM, opened when it is first used."""
        if self._pump is None:
            self._pump = self._open_pump()
        require_own_process(self._pump.pid, "posix")
        return self._pump

    def _open_pump(self) -> Pump:
        """An engine that worked in the probe may lack something now; `auto` then tries the next."""
        while True:
            engine = engines.engine_module(self.engine).engine()
            bounce = bounce_buffers.BounceBuffers(engine, self._dram_settings)
            try:
                pump = Pump(bounce.engine, self._dram_settings["depth"], self._buffers)
            except OSError as error:
                refusal = unopened(self.engine, error)
            else:
                self._bounce = bounce
                return pump
            self.refusals[f"posix/{self.engine}"] = str(refusal)
            others = ENGINES[ENGINES.index(self.engine) + 1 :]
            if self.settings["engine"] != "auto" or not others:
                raise BackendUnavailable(
                    f"backend 'posix' cannot be opened: {refusal}", self.refusals
                )
            self.engine = self._first_engine(others)

    @property
    def fixed_buffers(self) -> bool:
        """Whether the engine reads into registered buffers."""
        return self._pump is not None and self._pump.fixed_buffers

    def prepare(
        self, transfers: Sequence[Transfer], files: Registrations, memory: Registrations
    ) -> PumpedRequest:
        if memory and isinstance(memory[0].what, Memory) and memory[0].what.kind == VRAM:
            return self._pipeline(memory[0].what.device).prepare(transfers, files, memory)
        pump = self.pump
        # Before threads populate the memory of the request: mapping more has to wait for them.
        if self._bounce is not None:
            self._bounce.arm(transfers, files)
        return PosixRequest(pump, self.settings, transfers, files, memory)

    def _open_pipeline(self, device: str) -> StagingPipeline:
        from gdsload.backends.posix import device as device_module  # imports CUDA

        if self.engine == "linuxaio" and self.settings["engine"] == "auto" and not self._pump:
            # It copies from the page cache one read after the other; a device takes several
            # times as much. From storage, threads are as fast.
            self.engine = self._first_engine(("threads", "linuxaio"))
        capsule = engines.engine_module(self.engine).engine()
        settings = {**self.settings, "depth": self._dram_settings["depth"]}
        return device_module.open_pipeline(device, self.engine, capsule, settings, self.refusals)

    def paths(self, request: PumpedRequest) -> dict[str, int]:
        direct, buffered, _, _ = request.native.counts()
        through = 0
        if isinstance(request, PosixRequest) and self._bounce is not None:
            through = self._bounce.news(direct)
        found = {
            f"posix/{self.engine}/direct": direct - through,
            f"posix/{self.engine}/buffered": buffered,
        }
        return {**found, f"posix/{self.engine}/direct bounced": through} if through else found

    def close(self) -> None:
        self._close_pipelines()
        if self._pump is not None:
            ended = self._pump.close(DRAIN_SECONDS)
            self._pump = None
            self._buffers.clear()
            if self._bounce is not None:
                self._bounce.close(ended)
                self._bounce = None


class PosixRequest(PumpedRequest):
    """A list of transfers to DRAM, and the threads that populate the memory for it."""

    populator: Populator | None = None

    def __init__(
        self,
        pump: Pump,
        settings: dict[str, Any],
        transfers: Sequence[Transfer],
        files: Registrations,
        memory: Registrations,
    ) -> None:
        spaces = [entry.what for entry in memory if isinstance(entry.what, Memory)]
        if settings["populate_threads"] > 0:
            self.populator = populator_for(
                transfers,
                [space.region for space in spaces],
                settings["populate_threads"],
                settings["huge_pages"] != "never",
            )
        targets = [
            (space.address, None if space.region is None else space.region.handle(), entry.handle)
            for space, entry in zip(spaces, memory, strict=True)
        ]
        super().__init__("posix", pump, transfers, files, targets)

    def yield_to_loads(self, ahead: bool) -> None:
        super().yield_to_loads(ahead)
        if self.populator is not None:
            self.populator.gentle = _spare_threads() if ahead else 0

    def end(self) -> None:
        self.native.cancel()
        self.native.quiet(DRAIN_SECONDS)
        if self.populator is not None:
            self.populator.stop()


def _spare_threads() -> int:
    """Threads that populate memory for a prefetch: one core stays free for other work."""
    return max(1, min(POPULATE_THREADS, len(os.sched_getaffinity(0)) - 1))


def populator_for(
    transfers: Sequence[Transfer], regions: Sequence[Any], threads: int, huge: bool
) -> Populator | None:
    """Threads that populate the memory of these transfers, in their order.

    None if there is too little to be worth a thread, or if the library did not map the memory.
    """
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
