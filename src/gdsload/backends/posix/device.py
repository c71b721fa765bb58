"""Files to VRAM without cuFile: the posix engines read into a pinned ring, copies carry it on.

What `gdsload.backends.posix` needs for a device, kept apart so that loads to DRAM never touch CUDA.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gdsload.backends.staging import StagingPipeline
from gdsload.errors import BackendUnavailable
from gdsload.memory.staging_ring import DRAM, ring_for
from gdsload.system import gpu

# Engines that know a file by its descriptor alone, so that they can be used again for others.
_LASTING = frozenset({"uring", "linuxaio", "threads"})


def why_not(device: str) -> str:
    """Why this road does not lead to a device; empty where it does."""
    if device.partition(":")[0] != "cuda":
        return f"it reaches DRAM and CUDA devices, not {device}"
    return gpu.why_not(device)


def open_road(
    device: str, engine: str, capsule: object, settings: Mapping[str, Any], notes: dict[str, str]
) -> StagingPipeline:
    """A road to a device by an engine of the posix backend; what it has to do without goes into
    `notes`.

    Raises BackendUnavailable where the engine does not open, PlacementError without room for the
    ring.
    """
    fixed = settings["fixed_buffers"] != "never"
    kind = ("posix", engine, settings["depth"], fixed) if engine in _LASTING else None
    slot_bytes, ring_bytes = settings["request_bytes"], settings["ring_bytes"]
    with ring_for(DRAM, gpu.ordinal_of(device), slot_bytes, ring_bytes) as ring:
        if ring.notes:
            notes["posix/ring"] = "; ".join(ring.notes)
        waiting = ring.unpark(kind)
        if isinstance(waiting, StagingPipeline):
            return waiting
        try:
            # Twice the depth: half of the slots are being copied from while others are read to.
            return StagingPipeline(
                "posix", ring, capsule, 2 * settings["depth"], register=fixed, kind=kind
            )  # fmt: skip
        except OSError as error:
            why = str(error.strerror)
            raise BackendUnavailable(
                f"engine {engine!r} of backend 'posix' cannot be opened for {device}: {why}",
                {f"posix/{engine}": why},
            ) from error
