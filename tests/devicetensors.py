"""Tensors over the memory of the CUDA double, and the backends that load into it."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from gdsload._native.cuda import Device
from gdsload.backends.posix.engines import ENGINES, first_working
from gdsload.system import gpu

# Not the default one, which has a row of its own, where another one works.
RINGS_ENGINE = first_working(ENGINES[1:], {}) or ENGINES[0]
BACKENDS: list[tuple[str, dict[str, Any]]] = [
    ("posix", {"engine": RINGS_ENGINE, "ring_bytes": 1 << 20, "request_bytes": 64 << 10}),
    ("posix", {"engine": "threads", "ring_bytes": 1 << 20, "request_bytes": 64 << 10}),
    ("gds_mt", {"ring_bytes": 1 << 20, "request_bytes": 64 << 10}),
    ("gds", {"ring_bytes": 1 << 20, "request_bytes": 64 << 10}),
]


def allocate_as_torch(owner: Device, nbytes: int) -> int:
    """Address of memory of a device. Like torch, it leaves the capture mode of the thread as it is:
    an allocation breaks a graph that another thread captures."""
    driver = ctypes.CDLL(owner.cuda.path)
    context, address = ctypes.c_void_p(), ctypes.c_uint64()
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), owner.ordinal) == 0
    assert driver.cuCtxPushCurrent_v2(context) == 0
    code = driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(nbytes))
    driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    driver.cuDevicePrimaryCtxRelease_v2(owner.ordinal)
    if code:
        raise RuntimeError("CUDA out of memory" if code == 2 else f"CUDA error {code}")
    return address.value


def device_tensor(shape: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """A CPU tensor over the double's device memory, given back with it."""
    nbytes = torch.empty(tuple(shape), dtype=dtype, device="meta").nbytes
    if nbytes == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    owner = gpu.device(gpu.ordinal_of(device))
    address = allocate_as_torch(owner, nbytes)
    view = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(view, owner.release, address)
    return torch.frombuffer(view, dtype=torch.uint8).view(dtype).reshape(tuple(shape))


class Block:
    """Memory that is carved from one allocation, as torch's allocator does after a warm-up."""

    def __init__(self, nbytes: int) -> None:
        self.device = gpu.device(0)
        self.address = self.next = self.device.allocate(nbytes)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
        nbytes = torch.empty(tuple(shape), dtype=dtype, device="meta").nbytes
        view = (ctypes.c_char * nbytes).from_address(self.next)
        self.next += -(-nbytes // 512) * 512
        return torch.frombuffer(view, dtype=torch.uint8).view(dtype).reshape(tuple(shape))


class Allocator(Block):
    """torch's allocator: it reuses the memory of a freed tensor at once, even if the device still
    works on it."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.returned: list[tuple[int, int]] = []  # address, bytes
        self.lent = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
        nbytes = torch.empty(tuple(shape), dtype=dtype, device="meta").nbytes
        view = (ctypes.c_char * nbytes).from_address(self.next)
        weakref.finalize(view, self.returned.append, (self.next, nbytes))
        self.next += -(-nbytes // 512) * 512
        self.lent += 1
        return torch.frombuffer(view, dtype=torch.uint8).view(dtype).reshape(tuple(shape))


class TorchStream:
    """torch's current stream: the default one."""

    cuda_stream = 0

    def __init__(self) -> None:
        self.waited = 0

    def synchronize(self) -> None:
        self.waited += 1


def memory_stats(reserved: int, allocated: int) -> dict[str, Any]:
    """What torch tells of the bytes of its allocator."""
    held = {"reserved_bytes": reserved, "allocated_bytes": allocated}
    return {name: {"all": {"current": nbytes}} for name, nbytes in held.items()}


class TorchCuda:
    """The functions of `torch.cuda` that a load calls, in a process that uses CUDA."""

    def __init__(self) -> None:
        self.stream = TorchStream()

    def is_initialized(self) -> bool:
        return True

    def current_stream(self, device: str) -> TorchStream:
        return self.stream

    def memory_stats_as_nested_dict(self, ordinal: int) -> dict[str, Any]:
        return memory_stats(0, 0)


def odd_tensors() -> dict[str, torch.Tensor]:
    """Tensors at file offsets that are not aligned for their dtype, and a tensor without bytes."""
    return {
        "a": torch.arange(7, dtype=torch.uint8),
        "b": torch.empty(0, 5),
        "c": torch.arange(333, dtype=torch.int16),
        "d": torch.tensor(2.5, dtype=torch.float64),
        "e": torch.arange(200_000, dtype=torch.float32).to(torch.float8_e4m3fn),
        "f": torch.ones(3, 1, dtype=torch.bool),
    }


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
