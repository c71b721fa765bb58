"""The contract of a backend, held on the three roads into VRAM, over doubles of CUDA and cuFile."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpudoubles
from contract import BackendContract
from gdsload.backends import VRAM, Backend, Memory
from gdsload.backends.cufile.gds import GdsBackend
from gdsload.backends.cufile.gds_mt import GdsMtBackend
from gdsload.backends.posix import PosixBackend
from gdsload.system import gpu
from gpudoubles import Doubles


class DeviceMemory:
    """Memory of a device for as long as it is kept."""

    def __init__(self, length: int) -> None:
        self.device = gpu.device(0)
        self.address = self.device.allocate(length)
        ctypes.memset(self.address, 0, length)

    def __del__(self) -> None:
        self.device.release(self.address)


class GpuContract(BackendContract):
    kind: type[Backend]
    options: dict[str, Any] = {}  # noqa: RUF012
    machine: dict[str, Any] = {}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def doubles(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Doubles]:
        with gpudoubles.installed(monkeypatch, tmp_path / "root", **self.machine) as doubles:
            yield doubles

    def make(self) -> Backend:
        return self.kind(**self.options)

    def take(self, length: int) -> Memory:
        memory = DeviceMemory(length)
        return Memory(VRAM, memory.address, length, memory, device="cuda:0")

    def look(self, memory: Memory, offset: int, length: int) -> bytes:
        return ctypes.string_at(memory.address + offset, length)


def suite(name: str, kind: type[Backend], **facts: Any) -> type:
    facts.setdefault("options", {})
    facts["options"] = {"ring_bytes": 1 << 20, "request_bytes": 64 << 10, **facts["options"]}
    return type(name, (GpuContract,), {**facts, "kind": kind, "__module__": __name__})


for _direct in (False, True):
    _way = "Direct" if _direct else "Buffered"
    for _engine in ("threads", "uring", "linuxaio"):
        _name = f"TestPosix{_engine.title()}{_way}"
        globals()[_name] = suite(_name, PosixBackend, direct=_direct, options={"engine": _engine})
    for _label, _kind in (("Gds", GdsBackend), ("GdsMt", GdsMtBackend)):
        globals()[f"Test{_label}{_way}"] = suite(f"Test{_label}{_way}", _kind, direct=_direct)

TestGdsCompat = suite(
    "TestGdsCompat", GdsBackend, direct=True, options={"allow_compat": True},
    machine={"native": gpudoubles.COMPAT},
)  # fmt: skip
TestGdsP2P = suite("TestGdsP2P", GdsBackend, direct=True, machine={"native": gpudoubles.P2P})
TestGdsMtOldest = suite("TestGdsMtOldest", GdsMtBackend, machine={"version": 1110})
TestGdsMtNewest = suite("TestGdsMtNewest", GdsMtBackend, machine={"version": 1200})
TestGdsMtFewSlots = suite(
    "TestGdsMtFewSlots", GdsMtBackend, options={"ring_bytes": 128 << 10}, machine={"patience": 40}
)
TestPosixSlowCopies = suite("TestPosixSlowCopies", PosixBackend, machine={"patience": 40})
