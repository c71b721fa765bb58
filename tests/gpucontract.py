"""The contract suite of backends over device memory of the CUDA double."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpudoubles
from contract import BLOCK, SIZE, BackendContract, bytes_of
from gdsload.backends import VRAM, Backend, Memory, OpenFile
from gdsload.backends.posix import engines
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
        if engine := self.options.get("engine"):
            support = engines.try_engine(engine)
            if not support.usable:
                pytest.skip(f"engine {engine}: {support}")
        return self.kind(**self.options)

    def take(self, length: int) -> Memory:
        memory = DeviceMemory(length)
        return Memory(VRAM, memory.address, length, memory, device="cuda:0")

    def look(self, memory: Memory, offset: int, length: int) -> bytes:
        return ctypes.string_at(memory.address + offset, length)

    def test_memory_of_several_allocations(self, backend: Backend, files: list[OpenFile]) -> None:
        """As loads to a device pass it: without an address of its own, and with a hole."""
        first, rest = 4 * BLOCK, 6 * BLOCK
        owners = DeviceMemory(first), DeviceMemory(SIZE + BLOCK - rest)
        shares = [(0, first, owners[0].address), (rest, SIZE + BLOCK - rest, owners[1].address)]
        memory = Memory(VRAM, 0, SIZE + BLOCK, owners, "cuda:0", shares)
        transfers = self.reads(0)
        known, space = backend.register(files[0]), backend.register(memory)
        request = backend.prepare(transfers, [known], [space])
        backend.post(request)
        assert self.finish(backend, request, len(transfers)) == {}
        backend.release(request)
        assert ctypes.string_at(owners[0].address, first) == bytes_of(0)[:first]
        assert ctypes.string_at(owners[1].address, SIZE - rest) == bytes_of(0)[rest:]


def suite(name: str, kind: type[Backend], **facts: Any) -> type:
    facts.setdefault("options", {})
    facts["options"] = {"ring_bytes": 1 << 20, "request_bytes": 64 << 10, **facts["options"]}
    return type(name, (GpuContract,), {**facts, "kind": kind, "__module__": __name__})
