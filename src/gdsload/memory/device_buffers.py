"""Device buffers: memory of a GPU that gdsload allocates itself, in a few large blocks.

torch is not needed, so that reads can begin before it is imported. Tensors are made from the blocks
as from host buffers (`memory.host_buffers`).

    byte ranges, in file order ──► groups of about one block ──► a Block each ──► buffer views
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from gdsload._native.cuda import Block, CudaFailure
from gdsload.errors import PlacementError
from gdsload.memory.host_buffers import BufferView
from gdsload.planning import read_plan
from gdsload.planning.read_plan import FILE_ORDER, ByteRange
from gdsload.system import gpu
from gdsload.system.gc_control import collector_paused

# The smallest alignment of torch's own memory, which kernels rely on.
ALIGN_BYTES = 256
# A block is freed with the last tensor in it. One block for all would hold the memory of weights
# that are cast until the last one is; a block for each tensor would cost one allocation each. With
# these figures a cast holds back a sixteenth of the model, or 256 MiB.
LEAST_BYTES = 256 << 20
MOST_BLOCKS = 16


def grouped(ranges: Sequence[ByteRange]) -> list[tuple[int, list[tuple[str, int]]]]:
    """For each block its bytes, and the names of its ranges with their offsets in it.

    In file order, so that ranges of one request are neighbours. No range is split.
    """
    most = max(LEAST_BYTES, -(-sum(map(_room, ranges)) // MOST_BLOCKS))
    groups = []
    wanted = sorted((each for each in ranges if each.nbytes), key=FILE_ORDER)
    for group in read_plan.grouped(wanted, most, size=_room):
        *offsets, length = accumulate(map(_room, group), initial=0)
        groups.append((length, [(r.name, at) for r, at in zip(group, offsets, strict=True)]))
    return groups


def _room(wanted: ByteRange) -> int:
    return -(-wanted.nbytes // ALIGN_BYTES) * ALIGN_BYTES


@collector_paused()
def take(ordinal: int, ranges: Sequence[ByteRange]) -> dict[str, BufferView]:
    """Allocates memory of a device for these ranges.

    Args:
        ordinal: The number of the device.
        ranges: The byte ranges. Empty ones get no memory.

    Returns:
        The memory of each range, by name.

    Raises:
        PlacementError: The device is too full. Nothing is allocated; the error has the number of
            missing bytes.
        BackendUnavailable: The device cannot be used.
    """
    groups = grouped(ranges)
    total = sum(length for length, _ in groups)
    gpu.require_room(ordinal, total)
    device = gpu.device(ordinal)
    views: dict[str, BufferView] = {}
    for length, members in groups:
        try:
            block = Block(device, length)
        except CudaFailure as error:
            views.clear()  # the error refers to this frame, and may be stored
            raise PlacementError(
                f"no {length:,} bytes on cuda:{ordinal} for some of {total:,}: {error}",
                missing_bytes=length,
            ) from error
        views.update((name, BufferView(block, offset)) for name, offset in members)
        del block
    return views
