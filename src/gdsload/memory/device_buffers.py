"""Memory of a device that gdsload takes itself: a few large blocks, laid out for what will land in
them. Nothing of torch is needed, so that reads can begin before it is imported; tensors are made
from them as from any memory of ours (`arena.hand_over`).

    pieces, in file order ──► groups, cut where a block is full ──► a Block each ──► spots
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from gdsload._native.cuda import Block, CudaFailure
from gdsload.errors import PlacementError
from gdsload.memory.host_buffers import BufferView
from gdsload.planning.grouping import grouped as grouped_by_size
from gdsload.planning.read_plan import FILE_ORDER, ByteRange
from gdsload.system import gpu
from gdsload.system.gc_control import collector_paused

# What torch's own memory is aligned to at least, and kernels count on.
ALIGN_BYTES = 256
# A block goes back when the last tensor in it is gone. One for all would keep the memory of what is
# cast until all of it was; one for each tensor would cost an allocation each. A cast holds back a
# sixteenth of the model, or a quarter of a GiB: the memory of what is smaller is not worth parting.
LEAST_BYTES = 256 << 20
MOST_BLOCKS = 16


def grouped(pieces: Sequence[ByteRange]) -> list[tuple[int, list[tuple[str, int]]]]:
    """For each block its bytes, and the names of its pieces with their places in it.

    In file order, so that what is read by one request lies side by side. No piece is split.
    """
    most = max(LEAST_BYTES, -(-sum(map(_room, pieces)) // MOST_BLOCKS))
    groups = []
    wanted = sorted((piece for piece in pieces if piece.nbytes), key=FILE_ORDER)
    for group in grouped_by_size(wanted, most, size=_room):
        *offsets, length = accumulate(map(_room, group), initial=0)
        groups.append((length, [(p.name, at) for p, at in zip(group, offsets, strict=True)]))
    return groups


def _room(piece: ByteRange) -> int:
    return -(-piece.nbytes // ALIGN_BYTES) * ALIGN_BYTES


@collector_paused()
def take(ordinal: int, pieces: Sequence[ByteRange]) -> dict[str, BufferView]:
    """Memory on a device for these pieces, by their names; those of no bytes are left out.

    Raises PlacementError, with the bytes that are missing and nothing taken, where the device is
    too full, BackendUnavailable where it cannot be used.
    """
    groups = grouped(pieces)
    gpu.require_room(ordinal, sum(length for length, _ in groups))
    blocks = allocated(ordinal, [length for length, _ in groups])
    return {
        name: BufferView(block, place)
        for block, (_, members) in zip(blocks, groups, strict=True)
        for name, place in members
    }


def allocated(ordinal: int, lengths: Sequence[int]) -> list[Block]:
    """A block of each length. Raises PlacementError, with nothing taken, where one cannot be had,
    BackendUnavailable where the device cannot be used."""
    device = gpu.device(ordinal)
    blocks: list[Block] = []
    for length in lengths:
        try:
            blocks.append(Block(device, length))
        except CudaFailure as error:
            blocks.clear()  # the error may be kept, and with it this frame
            raise PlacementError(
                f"no {length:,} bytes on cuda:{ordinal} for some of {sum(lengths):,}: {error}",
                missing_bytes=length,
            ) from error
    return blocks
