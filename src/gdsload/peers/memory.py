"""Memory that NIXL lets other processes read.

Tensors that share a storage are registered together: a region is the smallest range of one storage
that contains its tensors, and nothing else of that storage. Memory that NIXL cannot register (that
of a GPU without a peer-to-peer path) is staged: a copy in host memory is served instead.
"""

from __future__ import annotations

import ctypes
import time
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from gdsload.errors import BackendUnavailable
from gdsload.peers.publication import MemoryLocation
from gdsload.remote.nixl_library import new_agent
from gdsload.system.torch_thread import copying

if TYPE_CHECKING:
    import torch

_ALIGN_BYTES = 64  # of tensors in the staging buffer
_PROBE_BYTES = 4096
_PROBE_SECONDS = 10.0


class PeerRegion(NamedTuple):
    """A range of one storage."""

    kind: str  # "DRAM" or "VRAM"
    device: int
    start: int
    end: int


class RegisteredMemory:
    """Tensors in memory that is registered with a NIXL agent; it keeps them alive.

    Args:
        flats: Flat tensors of uint8, by name.
        plugin: The backend of NIXL.
        parameters: Its parameters.

    Attributes:
        locations: Where each tensor is served from.
        agent_name: The name of the agent.
        staged_bytes: The bytes of tensors that are staged.
        staged_reason: Why they are, or "".

    Raises:
        BackendUnavailable: NIXL is not installed, or cannot register host memory.
    """

    def __init__(
        self, flats: Mapping[str, torch.Tensor], plugin: str, parameters: dict[str, str]
    ) -> None:
        self.agent_name = f"gdsload-source-{uuid.uuid4().hex}"
        self.staged_bytes, self.staged_reason = 0, ""
        self._agent = new_agent(self.agent_name, plugin, parameters, progress=True)
        # It stays: LIBFABRIC says that a read of its own memory is done, and writes to its target a
        # little later.
        self._probe = ctypes.create_string_buffer(_PROBE_BYTES)
        on_devices = {name: flat for name, flat in flats.items() if flat.device.type != "cpu"}
        in_place = {name: flat for name, flat in flats.items() if name not in on_devices}
        if on_devices:
            import torch

            for device in {flat.device for flat in on_devices.values()}:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)  # reads of NIXL wait for no stream
            fault = self._registration_fault(regions_of(on_devices))
            if not fault:
                in_place |= on_devices
                on_devices = {}
            self.staged_reason = fault
        staged = _staged(on_devices)
        self.staged_bytes = sum(flat.numel() for flat in staged.values())
        self._kept = in_place | staged
        host = {name: flat for name, flat in self._kept.items() if flat.device.type == "cpu"}
        fault = self._registration_fault(regions_of(host))
        if fault:
            reason = f"NIXL cannot register host memory: {fault}"
            raise BackendUnavailable(reason, {"nixl": reason})
        self.locations = locations_of(self._kept)

    def _registration_fault(self, regions: list[PeerRegion]) -> str:
        """Registers regions of one kind of memory, and reads from one of each device. The fault, or
        ""."""
        if not regions:
            return ""
        described = [(start, end - start, device, "") for _, device, start, end in regions]
        kind, of_device = regions[0].kind, {region.device: region for region in regions}
        probe = ctypes.addressof(self._probe)
        try:
            self._agent.register_memory(described, kind)
            registered = self._agent.register_memory([(probe, _PROBE_BYTES, 0, "")], "DRAM")
            try:
                return next(filter(None, map(self._read_fault, of_device.values())), "")
            finally:
                self._agent.deregister_memory(registered)
        except Exception as error:  # the classes of NIXL derive from Exception
            return str(error) or type(error).__name__

    def _read_fault(self, region: PeerRegion) -> str:
        """Reads the first bytes of a region through NIXL. The fault, or ""."""
        agent, (kind, device, start, end) = self._agent, region
        nbytes = min(_PROBE_BYTES, end - start)
        handle = agent.initialize_xfer(
            "READ",
            agent.get_xfer_descs([(ctypes.addressof(self._probe), nbytes, 0)], "DRAM"),
            agent.get_xfer_descs([(start, nbytes, device)], kind),
            self.agent_name,
        )
        state = agent.transfer(handle)
        deadline = time.monotonic() + _PROBE_SECONDS
        while state == "PROC" and time.monotonic() < deadline:
            time.sleep(0.0005)
            state = agent.check_xfer_state(handle)
        handle.release()
        return "" if state == "DONE" else f"a read of it ended as {state}"

    def metadata(self) -> bytes:
        """What readers need to reach the memory."""
        found: bytes = self._agent.get_agent_metadata()
        return found


def _memory_of(flat: torch.Tensor) -> tuple[str, int]:
    return ("DRAM", 0) if flat.device.type == "cpu" else ("VRAM", flat.device.index or 0)


def regions_of(flats: Mapping[str, torch.Tensor]) -> list[PeerRegion]:
    """The regions of tensors, ordered by kind, device and address."""
    found: dict[tuple[str, int, int], PeerRegion] = {}
    for flat in flats.values():
        if not flat.numel():
            continue
        kind, device = _memory_of(flat)
        key = kind, device, flat.untyped_storage().data_ptr()
        start, end = flat.data_ptr(), flat.data_ptr() + flat.numel()
        before = found.get(key, PeerRegion(kind, device, start, end))
        found[key] = PeerRegion(kind, device, min(start, before.start), max(end, before.end))
    return sorted(found.values())


def locations_of(flats: Mapping[str, torch.Tensor]) -> dict[str, MemoryLocation]:
    """Where tensors are, with the numbers of their regions."""
    numbers: dict[tuple[str, int], int] = {}
    found = {}
    for name, flat in flats.items():
        kind, device = _memory_of(flat)
        key = f"{kind}{device}", flat.untyped_storage().data_ptr()
        region = numbers.setdefault(key, len(numbers))
        found[name] = MemoryLocation(kind, device, flat.data_ptr(), flat.numel(), region)
    return found


def _staged(flats: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies in one buffer of host memory."""
    import torch

    starts, total = {}, 0
    for name, flat in flats.items():
        starts[name] = total
        total += -(-flat.numel() // _ALIGN_BYTES) * _ALIGN_BYTES
    buffer = torch.empty(total, dtype=torch.uint8, device="cpu")
    found = {}
    for name, flat in flats.items():
        found[name] = buffer[starts[name] : starts[name] + flat.numel()]
        with copying():
            found[name].copy_(flat)
    return found
