"""The GPUs of this process: CUDA is opened once, and the context of each device is retained once.

Also checks before a load that a device has enough free memory. Not responsible for allocating or
copying (`memory.device_buffers`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from gdsload._native import cuda as native
from gdsload._native.cuda import Cuda, CudaFailure, Device
from gdsload.errors import BackendUnavailable, PlacementError
from gdsload.system import lifecycle, shared_libraries
from gdsload.system.available import available_bytes
from gdsload.system.kernel_files import read_text

# Left free on a device, for a context, kernels and the rounding of torch's allocator.
SPARE_BYTES = 64 << 20

_lock = lifecycle.fork_safe_lock(sys.modules[__name__])
_cuda: list[Cuda] = []
_devices: dict[int, Device] = {}


def ordinal_of(device: str) -> int:
    """2 for "cuda:2", 0 for "cuda". Raises PlacementError if it is not a CUDA device."""
    kind, _, number = device.partition(":")
    if kind != "cuda" or (number and not number.isdecimal()):
        raise PlacementError(f"{device!r} is not a CUDA device")
    return int(number or 0)


def cuda() -> Cuda:
    """The CUDA driver. Raises BackendUnavailable if it is missing, or after a fork."""
    with _lock:
        if not _cuda:
            _refuse_at_exit()
            _cuda.append(_open())
    refuse_after_fork()
    return _cuda[0]


def refuse_after_fork() -> None:
    """Raises BackendUnavailable if CUDA was started before this process was forked."""
    # Not under the lock, which a thread of the parent may have held.
    if _cuda and _cuda[0].pid != os.getpid():
        raise BackendUnavailable(
            "CUDA was started before this process was forked from its parent; start processes"
            " that load to a GPU with 'spawn'",
            {"cuda": "used after fork"},
        )


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
    """A device, whose primary context is retained until the process ends.

    Raises:
        BackendUnavailable: CUDA, or this device, cannot be used.
        PlacementError: There is no such device.
    """
    driver = cuda()
    with _lock:
        if ordinal not in _devices:
            _refuse_at_exit()
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


@contextmanager
def capture_relaxed(device_name: str) -> Iterator[None]:
    """Calls of this thread inside do not break a CUDA graph that another thread captures in the
    default mode. torch needs it: it relaxes its allocations only while the same thread captures.

    Does nothing for the CPU, and for a device that gdsload has not opened.
    """
    with ExitStack() as undo:
        with suppress(PlacementError, CudaFailure, RuntimeError):  # of the parent
            owner = _devices.get(ordinal_of(device_name))
            if owner is not None:
                undo.callback(owner.restore, owner.relax())
        yield


def _refuse_at_exit() -> None:
    if lifecycle.is_ending():
        raise BackendUnavailable("CUDA cannot be started: the process ends")


def _end() -> None:
    # A thread may be starting CUDA or a device: the driver must not shut down meanwhile.
    if _lock.acquire(timeout=lifecycle.LOCK_SECONDS):
        _lock.release()
    native.end()


lifecycle.at_exit(lifecycle.CUDA, _end)


def any_open() -> Device | None:
    """A device that this process has opened already, or None."""
    if not _cuda or _cuda[0].pid != os.getpid():
        return None
    return next(iter(dict(_devices).values()), None)


def numa_node(bus: str, root: str = "/") -> int:
    """The NUMA node of the PCI device at `bus` ("0000:17:00.0"); -1 if it is unknown."""
    domain, _, rest = bus.lower().partition(":")
    try:
        name = f"{int(domain, 16):04x}:{rest}"  # CUDA may write the domain with eight digits
        return int(read_text(root, f"sys/bus/pci/devices/{name}/numa_node"))
    except ValueError:
        return -1


def require_room(ordinal: int, nbytes: int, reusable_bytes: int = 0) -> int:
    """Checks that a device has room for `nbytes`.

    Args:
        ordinal: The number of the device.
        nbytes: Bytes to be allocated.
        reusable_bytes: Bytes that torch's allocator has reserved and can reuse.

    Returns:
        The free bytes of the device, without SPARE_BYTES.

    Raises:
        PlacementError: There is too little memory; with the number of missing bytes.
        BackendUnavailable: The device does not answer.
    """
    try:
        owner = device(ordinal)
        free_bytes, total = owner.memory()
        if owner.integrated:  # page cache of the host is not free, but is given back for it
            free_bytes = max(free_bytes, min(available_bytes() or 0, total))
    except CudaFailure as error:  # as after an error of a kernel
        raise BackendUnavailable(f"the memory of cuda:{ordinal} is not known: {error}") from error
    missing = nbytes + SPARE_BYTES - free_bytes - reusable_bytes
    if missing > 0:
        raise PlacementError(
            f"{nbytes:,} bytes are to be loaded to cuda:{ordinal}, but only {free_bytes:,} of"
            f" {total:,} are free: {missing:,} bytes are missing",
            missing_bytes=missing,
        )
    return free_bytes - SPARE_BYTES


def why_not(device_name: str) -> str:
    """Why CUDA cannot be used for this device, or ""."""
    try:
        device(ordinal_of(device_name))
    except (BackendUnavailable, PlacementError) as error:
        return str(error)
    return ""
