"""Reads of the posix backend into VRAM: an engine reads into a pinned staging ring, and the device
copies from there. A module of its own, so that loads to DRAM never import CUDA.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gdsload.backends.staging import StagingPipeline
from gdsload.memory import DRAM
from gdsload.memory.staging_ring import ring_for
from gdsload.system import gpu
from gdsload.system.device_name import device_kind


def why_not(device: str) -> str:
    """Why the backend cannot read into this device, or ""."""
    if device_kind(device) != "cuda":
        return f"it reaches DRAM and CUDA devices, not {device}"
    return gpu.why_not(device)


def open_pipeline(
    device: str, engine: str, capsule: object, settings: Mapping[str, Any], notes: dict[str, str]
) -> StagingPipeline:
    """A pipeline to a device.

    Args:
        device: The device, such as "cuda:0".
        engine: The name of the engine.
        capsule: The engine.
        settings: The settings of the posix backend; their depth is that of the pipeline.
        notes: Gets an entry for each limitation.

    Raises:
        BackendUnavailable: The engine does not open.
        PlacementError: There is no room for the ring.
    """
    fixed = settings["fixed_buffers"] != "never"
    kind = ("posix", engine, settings["depth"], fixed)
    slot_bytes, ring_bytes = settings["request_bytes"], settings["ring_bytes"]
    with ring_for(DRAM, gpu.ordinal_of(device), slot_bytes, ring_bytes) as ring:
        if ring.notes:
            notes["posix/ring"] = "; ".join(ring.notes)
        return ring.unpark(kind) or StagingPipeline(
            "posix", ring, capsule, settings["depth"], register=fixed, kind=kind
        )
