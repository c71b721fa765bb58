"""Host buffers: memory that is read into or mapped, and the tensors that view it.

Each target of a read plan is one anonymous region. Its addresses are congruent to the file offsets,
so that direct reads need no copy. Every tensor holds a reference to its region: it outlives the
loader, and its pages return to the system when it is freed. torch is imported when the first tensor
is made. Not responsible for memory kept between loads (`gdsload.memory.host_pool`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from gdsload._native.memory import Pool, Region
from gdsload.checkpoint import Checkpoint, TensorInfo
from gdsload.dtypes import DTYPES, torch_dtype
from gdsload.errors import CheckpointError, PlacementError
from gdsload.planning.read_plan import ReadPlan
from gdsload.system.available import require_room
from gdsload.system.gc_control import collector_paused

if TYPE_CHECKING:
    import torch

    from gdsload._native.cuda import Block
    from gdsload.memory.host_pool import HostPool


class BufferView(NamedTuple):
    """The memory of a tensor: a host or device buffer, and the offset in it in bytes."""

    region: Region | Block
    offset: int


# DLPack type codes and bits of the dtypes that every torch accepts from DLPack. The others are
# exported as unsigned or signed integers of their size, and viewed as their dtype afterwards.
_DLPACK_TYPES = {
    "I8": (0, 8), "I16": (0, 16), "I32": (0, 32), "I64": (0, 64), "U8": (1, 8),
    "F16": (2, 16), "F32": (2, 32), "F64": (2, 64), "BF16": (4, 16), "C64": (5, 64),
}  # fmt: skip


class HostBuffers:
    """The memory of each target of a plan, in the order of the targets."""

    def __init__(
        self,
        plan: ReadPlan,
        pool: Pool | None = None,
        mapping_of: Callable[[int], Region] | None = None,
    ) -> None:
        """Reserves address space; memory is taken as the reads progress.

        Args:
            plan: the reads to make room for.
            pool: regions that were used before and are reused first.
            mapping_of: returns the mapping of a whole shard, by its number. Only needed for a plan
                with mapped targets.

        Raises:
            PlacementError: the plan reads more than the machine or its cgroup has available.
        """
        mapped = plan.mapped_targets if mapping_of is not None else frozenset()
        require_room(plan.buffer_bytes - (pool.idle if pool is not None else 0))
        take = Region.anonymous if pool is None else pool.take
        self.starts: list[BufferView] = []
        try:
            for number, target in enumerate(plan.targets):
                if mapping_of is not None and number in mapped:
                    self.starts.append(BufferView(mapping_of(target.shard), target.offset))
                else:
                    self.starts.append(BufferView(take(target.length), 0))
        except MemoryError as error:
            raise PlacementError(str(error)) from error

    @collector_paused()
    def views(self, plan: ReadPlan) -> dict[str, BufferView]:
        """The memory of each byte range of the plan, by name. Empty ranges are left out."""
        regions = [start.region for start in self.starts]
        make = tuple.__new__
        views = {
            name: make(BufferView, (regions[target], offset))
            for name, (target, offset, _, _) in plan.locations.items()
            if target >= 0
        }
        if any(start.offset for start in self.starts):  # targets inside of mappings
            for name, view in views.items():
                start = self.starts[plan.locations[name].target]
                views[name] = BufferView(view.region, start.offset + view.offset)
        return views


# The open pools of this process and of its parents. A load that uses none does not import
# `host_pool`.
pools: list[HostPool] = []


def current_pool() -> HostPool | None:
    """The open pool of this process, the last one that was opened; None if absent."""
    for pool in reversed(pools):
        if pool.pid == os.getpid():  # after a fork, pools belong to the parent
            return pool
    return None


def map_shard(checkpoint: Checkpoint, shard: int) -> Region:
    """A private mapping of a whole shard. Its pages are those of the page cache until a write."""
    opened = checkpoint.shards[shard]
    try:
        return Region.file(opened.fd, opened.size)
    except OSError as error:
        raise CheckpointError(
            f"{opened.path}: cannot be mapped: {error.strerror}", path=opened.path
        ) from error


@collector_paused()
def hand_over(
    infos: Iterable[TensorInfo], views: Mapping[str, BufferView]
) -> dict[str, torch.Tensor]:
    """Makes a tensor over the bytes of each info.

    A tensor whose address is not a multiple of its dtype's alignment is copied. An empty tensor
    gets memory of its own.

    Args:
        infos: the tensors to make.
        views: the memory of each tensor, by name; not needed for empty tensors.

    Returns:
        The tensors, by name.

    Raises:
        CheckpointError: this torch lacks a dtype. No tensor was made, and no memory was released.
    """
    import torch

    infos = list(infos)
    formats: dict[str, tuple[int, int, torch.dtype | None, int]] = {}
    for info in infos:
        if info.dtype not in formats:
            formats[info.dtype] = *_dlpack_format(info), DTYPES[info.dtype].align
        if info.dtype == "F4":
            packed_shape(info)
    tensors: dict[str, torch.Tensor] = {}
    for info in infos:
        name, dtype, shape, _, _, nbytes = info
        if dtype == "F4":
            shape = packed_shape(info)
        if nbytes == 0:
            tensors[name] = torch.empty(shape, dtype=torch_dtype(dtype), device="cpu")
            continue
        region, offset = view = views[name]
        code, bits, viewed_as, align = formats[dtype]
        if (region.address + offset) % align:
            raw = bytes_at(view, nbytes)
            tensors[name] = raw.clone().view(torch_dtype(dtype)).reshape(shape)
            continue
        tensor = tensor_of(region.view(offset, nbytes, shape, code, bits))
        tensors[name] = tensor if viewed_as is None else tensor.view(viewed_as)
    return tensors


def tensor_of(capsule: object) -> torch.Tensor:
    """The tensor described by a DLPack capsule. torch initialises the device of its memory."""
    import torch

    found: torch.Tensor = torch.utils.dlpack.from_dlpack(capsule)
    return found


def bytes_at(view: BufferView, nbytes: int) -> torch.Tensor:
    """A uint8 tensor over `nbytes` of memory."""
    return tensor_of(view.region.view(view.offset, nbytes, (nbytes,), *_DLPACK_TYPES["U8"]))


def _dlpack_format(info: TensorInfo) -> tuple[int, int, torch.dtype | None]:
    """DLPack's type code and bits, and the dtype to view the result as."""
    target = torch_dtype_of(info)
    if info.dtype in _DLPACK_TYPES:
        return *_DLPACK_TYPES[info.dtype], None
    # BOOL, unsigned integers and 8-bit floats: their DLPack codes differ between torch versions.
    bits = max(DTYPES[info.dtype].bits, 8)
    return int(bits == 8), bits, target


def torch_dtype_of(info: TensorInfo) -> torch.dtype:
    """The torch dtype of a tensor. Raises CheckpointError, naming it, if this torch has none."""
    try:
        return torch_dtype(info.dtype)
    except CheckpointError as error:
        raise CheckpointError(f"tensor {info.name!r}: {error}", tensor=info.name) from None


def packed_shape(info: TensorInfo) -> tuple[int, ...]:
    """The shape of an F4 tensor in torch, where one byte of the last dimension holds two elements.

    Raises CheckpointError if the last dimension is odd.
    """
    shape = info.shape
    if not shape or shape[-1] % 2:
        raise CheckpointError(
            f"tensor {info.name!r} is F4 with shape {list(shape)}: torch packs two elements into a"
            " byte and needs an even last dimension",
            tensor=info.name,
        )
    return (*shape[:-1], shape[-1] // 2)
