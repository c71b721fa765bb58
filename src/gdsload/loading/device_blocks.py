"""Memory of a device for the targets of a plan. Not responsible for tensors (`device_batch`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gdsload._native import ranges as native
from gdsload.backends import VRAM, Memory
from gdsload.memory import device_buffers
from gdsload.planning.read_plan import ReadPlan
from gdsload.system import gpu
from gdsload.system.gc_control import collector_paused

if TYPE_CHECKING:
    from gdsload.loading.batch import Batch


def in_blocks(batch: Batch) -> list[Memory]:
    """Blocks of the device as the memory of a batch, which gets a view for each range. Raises
    PlacementError if the device is too full."""
    device, plan = batch.session.device, batch.plan
    views = device_buffers.take(gpu.ordinal_of(device), plan.ranges)
    batch.views.update(views)
    starts = {view.region: view.region.address for view in views.values()}
    addresses = {name: starts[block] + offset for name, (block, offset) in views.items()}
    return memory_of(device, plan, addresses, list(starts))


@collector_paused()
def memory_of(
    device: str, plan: ReadPlan, addresses: dict[str, int], owners: object
) -> list[Memory]:
    """The memory of each target of the plan, in shares that are as long as possible.

    `addresses` are device addresses of the byte ranges; `owners` keep their memory alive.
    """
    owner = gpu.device(gpu.ordinal_of(device))
    shares = native.shares(plan.members, addresses, len(plan.targets), owner.range_of)
    return [
        Memory(VRAM, 0, target.length, owners, device=device, shares=shares[number])
        for number, target in enumerate(plan.targets)
    ]
