"""Device buffers: memory of a GPU that gdsload allocates itself, in a few large blocks.

torch is not needed, so that reads can begin before it is imported. Tensors are made from the blocks
as from host buffers (`memory.host_buffers`).

    byte ranges, in file order ──► groups of about one block ──► a Block each ──► buffer views
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from gdsload._native import ranges as native
from gdsload._native.cuda import Block, CudaFailure
from gdsload.errors import PlacementError
from gdsload.memory import late_copies
from gdsload.memory.host_buffers import BufferView
from gdsload.memory.staging_ring import release_idle
from gdsload.planning.read_plan import ByteRange
from gdsload.system import gpu
from gdsload.system.gc_control import collector_paused

# The smallest alignment of torch's own memory, which kernels rely on.
ALIGN_BYTES = 256
# A block is freed with the last tensor in it. One block for all would hold the memory of weights
# that are cast until the last one is; a block for each tensor would cost one allocation each. With
# these figures a cast holds back a sixteenth of the model, or 256 MiB.
LEAST_BYTES = 256 << 20
MOST_BLOCKS = 16


def block_layout(ranges: Sequence[ByteRange]) -> list[tuple[int, dict[str, int]]]:
    """For each block its bytes, and the offsets of its ranges in it by name.

    In file order, so that ranges of one read are neighbours. No range is split.
    """
    ordered = native.in_file_order(list(ranges))
    _, total = native.rounded(ordered, 1, ALIGN_BYTES)
    return native.laid_out(ordered, ALIGN_BYTES, max(LEAST_BYTES, -(-total // MOST_BLOCKS)))


def require_room(ordinal: int, nbytes: int, reusable_bytes: int = 0) -> int:
    """Like `gpu.require_room`. If memory is missing, frees idle staging rings, and the memory of
    interrupted loads whose last copies have ended, and checks again."""
    with suppress(PlacementError):
        return gpu.require_room(ordinal, nbytes, reusable_bytes)
    late_copies.forget_ended()
    release_idle(ordinal)
    return gpu.require_room(ordinal, nbytes, reusable_bytes)


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
    groups = block_layout(ranges)
    total = sum(length for length, _ in groups)
    require_room(ordinal, total)
    device = gpu.device(ordinal)
    views: dict[str, BufferView] = {}
    make = tuple.__new__
    for length, members in groups:
        try:
            block = Block(device, length)
        except CudaFailure as error:
            views.clear()  # the error refers to this frame, and may be stored
            raise PlacementError(
                f"no {length:,} bytes on cuda:{ordinal} for some of {total:,}: {error}",
                missing_bytes=length,
            ) from error
        for name, offset in members.items():
            views[name] = make(BufferView, (block, offset))
        del block
    return views
