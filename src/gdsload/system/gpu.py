"""The GPUs of this process: CUDA opened once, each device's context shared once, and what is known
of a device before anything is copied to it.
"""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

from gdsload._native import cuda as native
from gdsload._native.cuda import Cuda, CudaFailure, Device
from gdsload.errors import BackendUnavailable, PlacementError
from gdsload.system import lifecycle, shared_libraries

# Left free on a device: what a context, kernels and the allocator's rounding take.
SPARE_BYTES = 64 << 20


class Gpu(NamedTuple):
    """What is known of a device. `node` is its NUMA node, -1 where nobody says."""

    ordinal: int
    name: str
    bus: str
    node: int
    total_bytes: int


_lock = lifecycle.fork_safe_lock(sys.modules[__name__])
_cuda: list[Cuda] = []
_devices: dict[int, Device] = {}
lifecycle.at_exit(lifecycle.CUDA, native.end)


def ordinal_of(device: str) -> int:
    """2 for "cuda:2", 0 for "cuda". Raises PlacementError for what is no CUDA device."""
    kind, _, number = device.partition(":")
    if kind != "cuda" or (number and not number.isdecimal()):
        raise PlacementError(f"{device!r} is not a CUDA device")
    return int(number or 0)


def cuda() -> Cuda:
    """The CUDA driver. Raises BackendUnavailable where there is none, or after a fork."""
    with _lock:
        if not _cuda:
            _cuda.append(_open())
        return _own(_cuda[0])


def refuse_after_fork() -> None:
    """Raises BackendUnavailable where this process was forked from one that had started CUDA."""
    if _cuda:  # not under the lock, which a thread of the parent may have held
        _own(_cuda[0])


def _own(found: Cuda) -> Cuda:
    if found.pid != os.getpid():
        raise BackendUnavailable(
            "CUDA was started before this process was forked from its parent; start processes"
            " that load to a GPU with 'spawn'",
            {"cuda": "used after fork"},
        )
    return found


def _open() -> Cuda:
    reasons = []
    for path in shared_libraries.candidates(shared_libraries.CUDA):
        try:
            return Cuda(path)
        except (OSError, CudaFailure) as error:
            reasons.append(str(error))
    why = "; ".join(reasons)
    raise BackendUnavailable(f"there is no CUDA here: {why}", {"cuda": why})


def device(ordinal: int) -> Device:
    """A device, with its primary context kept alive for this process.

    Raises BackendUnavailable where CUDA is not there, PlacementError where that device is not.
    """
    driver = cuda()
    with _lock:
        if ordinal not in _devices:
            count = driver.device_count
            if ordinal >= count:
                raise PlacementError(f"there is no device cuda:{ordinal}: CUDA sees {count}")
            try:
                _devices[ordinal] = Device(driver, ordinal)
            except CudaFailure as error:
                raise BackendUnavailable(
                    f"device cuda:{ordinal} cannot be used: {error}", {"cuda": str(error)}
                ) from error
        return _devices[ordinal]


def any_open() -> Device | None:
    """A device that this process has opened already; None where there is none."""
    if not _cuda or _cuda[0].pid != os.getpid():
        return None
    return next(iter(dict(_devices).values()), None)


def facts(ordinal: int) -> Gpu:
    """What a device is and where it is."""
    found = device(ordinal)
    bus = found.bus
    return Gpu(ordinal, found.name, bus, numa_node(bus), found.total_bytes)


def numa_node(bus: str, root: str = "/") -> int:
    """The NUMA node that a PCI device is attached to; -1 where the kernel does not say."""
    domain, _, rest = bus.lower().partition(":")
    for name in (bus.lower(), f"{domain[-4:]}:{rest}"):
        try:
            with open(os.path.join(root, "sys/bus/pci/devices", name, "numa_node")) as file:
                return int(file.read())
        except (OSError, ValueError):
            continue
    return -1


def require_room(ordinal: int, nbytes: int, reusable_bytes: int = 0) -> int:
    """The bytes of a device that are free, but for what is spared. Raises PlacementError, with the
    bytes that are missing, where it is too full.

    `reusable_bytes` is what torch's allocator holds and would give.
    """
    free_bytes, total = device(ordinal).memory()
    missing = nbytes + SPARE_BYTES - free_bytes - reusable_bytes
    if missing > 0:
        raise PlacementError(
            f"{nbytes:,} bytes are to be loaded to cuda:{ordinal}, but only {free_bytes:,} of"
            f" {total:,} are free: {missing:,} bytes are missing",
            missing_bytes=missing,
        )
    return free_bytes - SPARE_BYTES


def why_not(device_name: str) -> str:
    """Why nothing can be loaded to this device by way of CUDA; empty where it can."""
    try:
        device(ordinal_of(device_name))
    except (BackendUnavailable, PlacementError) as error:
        return str(error)
    return ""
