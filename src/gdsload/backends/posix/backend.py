"""The ``posix`` backend: reads through the kernel, by one of its engines.

Reads into VRAM go through a pinned staging ring. If an engine does not work here (see `engines`),
the next one is used and the report says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from gdsload._native.first_touch import MODES
from gdsload._native.pump import Pump
from gdsload.backends.base import (
    MAPPED_PATH,
    NO_NUMBERS,
    Memory,
    OpenFile,
    Option,
    Registration,
    Registrations,
    Support,
)
from gdsload.backends.posix import engines
from gdsload.backends.posix.engines import (
    ENGINES,
    first_working,
    try_engine,
    unopened,
)
from gdsload.backends.pump_request import PumpBackend, PumpedRequest
from gdsload.errors import BackendUnavailable
from gdsload.memory import DRAM, VRAM
from gdsload.planning.read_plan import Limits, Transfer
from gdsload.system.device_name import device_kind
from gdsload.system.storage import Storage

if TYPE_CHECKING:
    from gdsload.backends.staging import StagingPipeline

# 4 MiB, 16 in flight: the smallest that reached the disk's rate in benchmarks/engines.py.
REQUEST_BYTES = 4 << 20
DEPTH = 16
# Reads in flight into a device, for each of those into DRAM: the device copies from half of the
# slots while the others are read to.
RING_READS = 2
# Of reads into a device, and so the size of a slot. The first load of a process waits until the
# ring is pinned. With slots of 4 MiB warm loads of 15 GB take 3 % less time, and those of 1.5 GB
# 9 % more (benchmarks/results/gpu-h200.json).
SLOT_BYTES = 2 << 20
RING_BYTES = RING_READS * DEPTH * SLOT_BYTES
# Distant storage has more reads in flight: its ring grows up to this size.
MOST_RING_BYTES = 256 << 20
# The largest buffer that io_uring registers.
LARGEST_BUFFER_BYTES = 1 << 30
# More reads in flight than any disk needs.
MOST_DEPTH = 4096


class PosixBackend(PumpBackend):
    """Reads files into DRAM and, through a pinned staging ring, into VRAM."""

    name: ClassVar[str] = "posix"
    memory_kinds: ClassVar[frozenset[str]] = frozenset({DRAM, VRAM})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._require_request_options(MOST_DEPTH)
        if self.settings["pages"] not in MODES:
            raise ValueError(f"pages={self.settings['pages']!r} must be one of {', '.join(MODES)}")
        if (fixed := self.settings["fixed_buffers"]) not in ("auto", "always", "never"):
            raise ValueError(f"fixed_buffers={fixed!r} must be one of auto, always, never")
        # Settings of loads to DRAM. Distant storage changes those that the user did not set.
        self._dram_settings = self.settings
        self._buffers: list[tuple[int, int]] = []  # to register with the engine
        wanted = self.settings["engine"]
        self.engine = ENGINES[0] if wanted == "auto" else wanted
        if wanted != "auto" and not (answer := try_engine(wanted)).usable:
            raise BackendUnavailable(
                f"engine {wanted!r} of backend 'posix' cannot work here: {answer}",
                {f"posix/{wanted}": str(answer)},
            )

    @classmethod
    def options(cls) -> tuple[Option, ...]:
        return (
            Option("engine", "auto", f"one of {', '.join(ENGINES)}, or auto: the first that works"),
            Option(
                "request_bytes",
                REQUEST_BYTES,
                "bytes of one read past the page cache, at most; half of the default into a device",
            ),
            Option("depth", DEPTH, "reads in flight"),
            Option(
                "pages",
                "auto",
                "how threads touch fresh memory: huge pages, small pages, small pages after a"
                " bounce buffer (bounce), or auto: the cheaper of huge and bounce; in the page"
                " cache: huge folios, growing ones (small, bounce), or auto: the cheaper",
            ),
            Option(
                "fixed_buffers",
                "auto",
                "memory that engine uring registers. auto: rings; always: tensors too; never: none",
            ),
            Option(
                "ring_bytes",
                0,
                "bytes of pinned DRAM on the way to a device, at least; 0: one slot a read",
            ),
        )

    @classmethod
    def probe(cls, device: str = "cpu") -> Support:
        """Whether one of the engines works."""
        if device_kind(device) != "cpu":
            from gdsload.backends.staging import why_not  # imports CUDA

            if why := why_not(device):
                return Support(False, (why,))
        refusals: dict[str, str] = {}
        engine = first_working(ENGINES, refusals)
        reasons = [f"engine {name.partition('/')[2]}: {why}" for name, why in refusals.items()]
        return Support(bool(engine), tuple(reasons))

    def _first_engine(self, names: Sequence[str]) -> str:
        engine = first_working(names, self.refusals)
        if not engine:
            why = "; ".join(self.refusals.values())
            raise BackendUnavailable(f"no engine of 'posix' works here: {why}", self.refusals)
        return engine

    def limits(self, device: str = "cpu") -> Limits:
        modes = ["direct", "buffered"]
        if device == "cpu":
            if self.engine == "threads":  # rings would copy to the mapping
                modes.append("mapped")
            settings = self._dram_settings
        else:
            settings = self._device_settings()
        return Limits(settings["request_bytes"], depth=settings["depth"], io_modes=modes)

    def _device_settings(self) -> dict[str, Any]:
        """The settings of a pipeline, which is no deeper than its ring. Slots have one size,
        whatever the storage."""
        settings = dict(self.settings)
        if "request_bytes" not in self._set_by_user:
            settings["request_bytes"] = SLOT_BYTES
        slot_bytes, depth = settings["request_bytes"], RING_READS * self._dram_settings["depth"]
        if not settings["ring_bytes"]:
            settings["ring_bytes"] = max(min(depth * slot_bytes, MOST_RING_BYTES), 2 * slot_bytes)
        settings["depth"] = min(depth, max(settings["ring_bytes"] // slot_bytes, 1))
        return settings

    def register(self, what: OpenFile | Memory) -> Registration:
        if isinstance(what, OpenFile):
            self._adapt(what.storage)
            return Registration(what, NO_NUMBERS)
        if what.kind == VRAM:
            return Registration(what, -1)
        if what.kind != DRAM:
            raise BackendUnavailable(f"backend 'posix' does not reach {what.kind}")
        # Registering pins the whole memory, which pays off only if many reads write to it: to
        # tensors it is done if it is asked for. An engine takes buffers only when it is opened.
        wanted = self.settings["fixed_buffers"] == "always" and self._pump is None
        if not wanted or what.length > LARGEST_BUFFER_BYTES:
            return Registration(what, -1)
        self._buffers.append((what.address, what.length))
        return Registration(what, len(self._buffers) - 1)

    def _adapt(self, storage: Storage) -> None:
        """Suits the reads of an engine that is not open yet to distant storage."""
        if storage.has_round_trips and self._pump is None:
            suited = storage._asdict()
            wanted = suited.keys() & self.settings.keys() - self._set_by_user
            self._dram_settings = {**self.settings, **{name: suited[name] for name in wanted}}

    def deregister(self, registration: Registration) -> None:
        """Nothing to do: files and buffers are released when the engine is closed."""

    def _open_pump(self) -> Pump:
        settings = self._dram_settings
        while True:
            capsule = engines.engine_capsule(self.engine, settings["pages"])
            try:
                return Pump(capsule, settings["depth"], self._buffers)
            except OSError as error:
                refusal = str(unopened(self.engine, error))
            if not self._next_engine(refusal):
                text = f"backend 'posix' cannot be opened: {refusal}"
                raise BackendUnavailable(text, {**self.refusals, f"posix/{self.engine}": refusal})

    def _next_engine(self, refusal: str) -> bool:
        """Changes to the next engine: one that worked in the probe may lack something now. False if
        there is none, or if one was asked for, or has opened."""
        others = ENGINES[ENGINES.index(self.engine) + 1 :]
        if self.settings["engine"] != "auto" or self._pump is not None or not others:
            return False
        self.refusals[f"posix/{self.engine}"] = refusal
        self.engine = self._first_engine(others)
        return True

    def prepare(
        self, transfers: Sequence[Transfer], files: Registrations, memory: Registrations
    ) -> PumpedRequest:
        if any(each.io_mode == "mapped" for each in transfers):
            _ = self.pump  # opens the engine, which may become another one
            if self.engine != "threads":
                why = f"{self.engine} cannot fill mapped memory"  # it would be private, and twice
                refusal = self.refusals.get("posix/threads", "")
                raise BackendUnavailable(
                    f"backend 'posix': {why}, and threads did not open: {refusal}",
                    {**self.refusals, "posix": why},
                )
        return super().prepare(transfers, files, memory)

    def _open_pipeline(self, device: str) -> StagingPipeline:
        from gdsload.backends.staging import pipeline_through_dram  # imports CUDA

        if self.settings["engine"] == "auto" and self._pump is None:
            self.engine = self._first_engine(ENGINES)
        settings = self._device_settings()
        fixed = settings["fixed_buffers"] != "never"
        while True:
            capsule = engines.engine_capsule(self.engine)
            kind = ("posix", self.engine, settings["depth"], fixed)
            try:
                return pipeline_through_dram(
                    "posix", device, capsule, settings, self.refusals, register=fixed, kind=kind
                )
            except BackendUnavailable as error:
                if not self._next_engine(str(error)):
                    raise

    def paths(self, request: PumpedRequest) -> dict[str, int]:
        direct, buffered, _, _ = request.native.counts()
        _, _, bounced, present = request.native.touched()
        if request.transfers[0].io_mode == "mapped":  # and so are all the others
            present = min(present, buffered)
            return {f"posix/{self.engine}/mapped": buffered - present, MAPPED_PATH: present}
        bounced = min(bounced, direct)
        found = {
            f"posix/{self.engine}/direct": direct - bounced,
            f"posix/{self.engine}/buffered": buffered,
        }
        return {**found, f"posix/{self.engine}/direct bounced": bounced} if bounced else found

    def close(self) -> None:
        super().close()
        self._buffers.clear()
