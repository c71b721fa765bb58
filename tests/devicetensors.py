"""Tensors over the memory of the CUDA double, and the backends that load into it."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from gdsload.system import gpu

BACKENDS: list[tuple[str, dict[str, Any]]] = [
    ("posix", {"engine": "uring", "ring_bytes": 1 << 20, "request_bytes": 64 << 10}),
    ("posix", {"engine": "threads", "ring_bytes": 1 << 20, "request_bytes": 64 << 10}),
    ("gds_mt", {"ring_bytes": 1 << 20, "request_bytes": 64 << 10}),
    ("gds", {"ring_bytes": 1 << 20, "request_bytes": 64 << 10}),
]


def device_tensor(shape: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """A CPU tensor over the double's device memory, given back with it."""
    nbytes = torch.empty(tuple(shape), dtype=dtype, device="meta").nbytes
    if nbytes == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    owner = gpu.device(gpu.ordinal_of(device))
    address = owner.allocate(nbytes)
    view = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(view, owner.release, address)
    return torch.frombuffer(view, dtype=torch.uint8).view(dtype).reshape(tuple(shape))


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
