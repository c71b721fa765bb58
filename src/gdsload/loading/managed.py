"""Memory that the host and an integrated GPU share: files are read into it, and tensors of the GPU
view it where the bytes have landed. No ring, no copy. Who may have such memory is `gpu`'s to say.

    target of a plan ──► a block of managed memory ──► slid, so that its tensors lie on a border

Direct reads go to addresses that are multiples of what the disk asks for: 4 bytes for NVMe, 512 or
a page elsewhere. Tensors lie on multiples of 8 in their files as a rule, and kernels count on 256.
So each target is slid to where most of its bytes are on a border. Where direct reads do not reach
that place it is read through the page cache, which reaches any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from gdsload.backends.base import DRAM, Memory, OpenFile, Registration
from gdsload.memory.device_buffers import ALIGN_BYTES, allocated
from gdsload.memory.host_buffers import BufferView, current_pool, require_room
from gdsload.planning.read_plan import DEFAULT_BLOCK_BYTES, ByteRange, ReadPlan
from gdsload.system import gpu
from gdsload.system.gc_control import collector_paused


class Layout(NamedTuple):
    """The plan, with reads that go through the page cache for the sake of their place; where each
    piece will lie; what is behind each target; and the bytes whose road was changed."""

    plan: ReadPlan
    views: dict[str, BufferView]
    memory: list[Memory]
    buffered_bytes: int


@collector_paused()
def lay_out(
    device: str,
    plan: ReadPlan,
    pieces: Sequence[ByteRange],
    files: Sequence[Registration],
    *,
    reroute: bool,
) -> Layout:
    """Managed memory for what a plan reads. Without `reroute` no read changes its road, and more
    pieces may lie off the border.

    Raises PlacementError, with nothing taken, where there is not so much memory.
    """
    keeper = current_pool()
    if keeper is not None:  # its memory is the device's, too
        keeper.make_room(plan.read_bytes)
    require_room(plan.read_bytes)
    slides, through_cache = _slides(plan, pieces, files, reroute)
    # Targets begin on a block in the file, and so they do here before they are slid.
    room = DEFAULT_BLOCK_BYTES + ALIGN_BYTES
    ordinal = gpu.ordinal_of(device)
    blocks = allocated(ordinal, [target.length + room for target in plan.targets], managed=True)
    starts = [
        -block.address % DEFAULT_BLOCK_BYTES + slide
        for block, slide in zip(blocks, slides, strict=True)
    ]
    views = {
        piece.name: BufferView(blocks[location.target], starts[location.target] + location.offset)
        for piece in pieces
        if (location := plan.locations[piece.name]).target >= 0
    }
    memory = [
        Memory(DRAM, block.address + start, target.length, block, device=device)
        for block, start, target in zip(blocks, starts, plan.targets, strict=True)
    ]
    failovers = [
        transfer
        for transfer in plan.transfers
        if transfer.target in through_cache and transfer.io_mode == "direct"
    ]
    if failovers:
        transfers = list(plan.transfers)
        for transfer in failovers:
            transfers[transfer.tag] = transfer._replace(io_mode="buffered")
        plan = replace(plan, transfers=tuple(transfers))
    return Layout(plan, views, memory, sum(transfer.wanted for transfer in failovers))


def _slides(
    plan: ReadPlan, pieces: Sequence[ByteRange], files: Sequence[Registration], reroute: bool
) -> tuple[list[int], set[int]]:
    """How far each target is slid, and which of them direct reads do not reach then."""
    wishes = [Counter[int]() for _ in plan.targets]
    for piece in pieces:
        location = plan.locations[piece.name]
        if location.target >= 0:
            wishes[location.target][-location.offset % ALIGN_BYTES] += piece.nbytes
    slides: list[int] = []
    beyond: set[int] = set()
    for number, wish in enumerate(wishes):
        file = files[plan.targets[number].shard].what
        step = file.address_block if isinstance(file, OpenFile) else DEFAULT_BLOCK_BYTES
        slide = wish.most_common(1)[0][0]
        if slide % step:
            if reroute:
                beyond.add(number)
            else:
                reached = {far: size for far, size in wish.items() if far % step == 0}
                slide = max(reached, key=reached.__getitem__, default=0)
        slides.append(slide)
    return slides, beyond
