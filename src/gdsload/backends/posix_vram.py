"""Files to VRAM without cuFile: the posix engines read into a pinned ring, copies carry it on.

What `gdsload.backends.posix` needs for a device, kept apart so that loads to DRAM never touch CUDA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gdsload import gpu
from gdsload.backends.staged import StagedRoad
from gdsload.errors import BackendUnavailable
from gdsload.ring import DRAM, ring_for

if TYPE_CHECKING:
    from gdsload.backends.posix import PosixBackend


def why_not(device: str) -> str:
    """Why this road does not lead to a device; empty where it does."""
    if device.partition(":")[0] != "cuda":
        return f"it reaches DRAM and CUDA devices, not {device}"
    return gpu.why_not(device)


def road(backend: PosixBackend, device: str) -> StagedRoad:
    """The backend's road to a device, made with the first request.

    Raises BackendUnavailable where the engine does not open, PlacementError without room for the
    ring.
    """
    known: StagedRoad | None = backend.device_roads.get(device)
    if known is not None:
        return known
    from gdsload.backends.posix import _engine_module

    settings = backend.settings
    ring = ring_for(DRAM, gpu.ordinal_of(device), settings["request_bytes"], settings["ring_bytes"])
    for note in ring.notes:
        backend.refusals["posix/ring"] = note
    try:
        # Twice the depth: half of the slots are being copied from while the others are read to.
        made = StagedRoad(
            "posix",
            ring,
            _engine_module(backend.engine).engine(),
            2 * settings["depth"],
            register=settings["fixed_buffers"] != "never",
        )
    except OSError as error:
        raise BackendUnavailable(
            f"engine {backend.engine!r} of backend 'posix' cannot be opened for {device}:"
            f" {error.strerror}",
            {f"posix/{backend.engine}": str(error.strerror)},
        ) from error
    backend.device_roads[device] = made
    return made
