"""The memory that tensors live in: regions to read into or to map, and tensors that view them.

Each target of a plan becomes one anonymous region whose addresses are congruent to the file's
offsets, so that direct reads land in place and nothing is copied. A tensor owns its share: it
outlives the loader, and when it dies its pages go back to the system. torch is imported when the
first tensor is made, not before.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from gdsload._native.memory import Pool, Region
from gdsload.checkpoint import Checkpoint, TensorInfo
from gdsload.dtypes import DTYPES, torch_dtype
from gdsload.errors import CheckpointError, PlacementError
from gdsload.planning.read_plan import ReadPlan
from gdsload.system.gc_control import collector_paused

if TYPE_CHECKING:
    import torch

    from gdsload._native.block import Block

# Left to the rest of the system when it is asked whether a model fits.
SPARE_BYTES = 64 << 20
# How memory is made ready before bytes come to it: by so many threads, since more of them wait for
# each other on the locks of the address space, and no further ahead than this, where they would
# take the cores that reads and copies need.
POPULATE_THREADS = 2
POPULATED_AHEAD_BYTES = 256 << 20


class BufferView(NamedTuple):
    """Where the bytes of a tensor are: a region, or a block of a device, and the place in it."""

    region: Region | Block
    offset: int


class _Recipe(NamedTuple):
    """How DLPack carries a dtype: its own code, or that of an integer to be viewed as it."""

    code: int
    bits: int
    align: int
    viewed_as: Any


# DLPack's codes for what every torch takes. The others travel as integers of their size.
_CODES = {
    "I8": (0, 8), "I16": (0, 16), "I32": (0, 32), "I64": (0, 64), "U8": (1, 8),
    "F16": (2, 16), "F32": (2, 32), "F64": (2, 64), "BF16": (4, 16), "C64": (5, 64),
}  # fmt: skip


class HostBuffers:
    """Regions for the targets of a plan, in their order."""

    def __init__(self, plan: ReadPlan, pool: Pool | None = None) -> None:
        """Takes address space, not memory: that comes with the reads. From `pool`, where
        it has some that was used before.

        Raises PlacementError where the machine (or its cgroup) has less memory than the plan
        reads.
        """
        keeper = current_pool()
        if keeper is not None:
            keeper.make_room(plan.read_bytes)
        require_room(plan.read_bytes - (pool.idle if pool is not None else 0))
        take = Region.anonymous if pool is None else pool.take
        try:
            self.regions = [take(target.length) for target in plan.targets]
        except MemoryError as error:
            raise PlacementError(str(error)) from error

    @collector_paused()
    def views(self, plan: ReadPlan) -> dict[str, BufferView]:
        """Where each piece of the plan lies; those of no bytes are left out."""
        regions = self.regions
        return {
            name: BufferView(regions[location.target], location.offset)
            for name, location in plan.locations.items()
            if location.target >= 0
        }


def map_shard(checkpoint: Checkpoint, shard: int) -> Region:
    """A private mapping of a whole shard, shared with the page cache until it is written to."""
    opened = checkpoint.shards[shard]
    try:
        return Region.file(opened.fd, opened.size)
    except OSError as error:
        raise CheckpointError(
            f"{opened.path}: it cannot be mapped: {error.strerror}", path=opened.path
        ) from error


@collector_paused()
def hand_over(
    infos: Iterable[TensorInfo], views: Mapping[str, BufferView]
) -> dict[str, torch.Tensor]:
    """A tensor for each info, over the memory where its bytes are.

    Tensors whose file offset does not fit their dtype are copied to where it does; a tensor of no
    bytes has memory of its own. Raises CheckpointError for a dtype that this torch lacks; then no
    tensor was made, and none has dropped its bytes.
    """
    import torch

    infos = list(infos)
    recipes: dict[str, _Recipe] = {}
    for info in infos:
        if info.dtype not in recipes:
            recipes[info.dtype] = _recipe(info)
        if info.dtype == "F4":
            packed_shape(info)
    tensors: dict[str, torch.Tensor] = {}
    for info in infos:
        name, dtype, shape, _, _, nbytes = info
        recipe = recipes[dtype]
        if dtype == "F4":
            shape = packed_shape(info)
        if nbytes == 0:
            tensors[name] = torch.empty(shape, dtype=torch_dtype(dtype), device="cpu")
            continue
        region, offset = views[name]
        if (region.address + offset) % recipe.align:
            raw = bytes_at(views[name], nbytes)
            tensors[name] = raw.clone().view(torch_dtype(dtype)).reshape(shape)
            continue
        tensor = tensor_of(region.view(offset, nbytes, shape, recipe.code, recipe.bits))
        tensors[name] = tensor if recipe.viewed_as is None else tensor.view(recipe.viewed_as)
    return tensors


def tensor_of(capsule: object) -> torch.Tensor:
    """The tensor that a DLPack capsule tells of; torch opens the device that it is on."""
    import torch

    found: torch.Tensor = torch.utils.dlpack.from_dlpack(capsule)
    return found


def bytes_at(view: BufferView, nbytes: int) -> torch.Tensor:
    """A tensor of bytes over memory whose bytes are there, whatever they are of."""
    return tensor_of(view.region.view(view.offset, nbytes, (nbytes,), 1, 8))


def _recipe(info: TensorInfo) -> _Recipe:
    dtype = DTYPES[info.dtype]
    target = torch_dtype_of(info)
    if info.dtype in _CODES:
        return _Recipe(*_CODES[info.dtype], dtype.align, None)
    # BOOL, the unsigned and the 8-bit floats: torch's versions disagree on their DLPack codes.
    bits = max(dtype.bits, 8)
    return _Recipe(0 if bits > 8 else 1, bits, dtype.align, target)


def torch_dtype_of(info: TensorInfo) -> torch.dtype:
    """The torch dtype of a tensor. Raises CheckpointError, naming it, where this torch has none."""
    try:
        return torch_dtype(info.dtype)
    except CheckpointError as error:
        raise CheckpointError(f"tensor {info.name!r}: {error}", tensor=info.name) from None


def packed_shape(info: TensorInfo) -> tuple[int, ...]:
    """The shape that torch gives an F4 tensor: two elements share a byte of the last dimension.

    Raises CheckpointError where the last dimension is odd.
    """
    shape = info.shape
    if not shape or shape[-1] % 2:
        raise CheckpointError(
            f"tensor {info.name!r} is F4 with shape {list(shape)}: torch packs two elements into a"
            " byte and needs an even last dimension",
            tensor=info.name,
        )
    return (*shape[:-1], shape[-1] // 2)


class Keeper(Protocol):
    """The host pool, as far as this module knows it (`gdsload.memory.host_pool`)."""

    pid: int

    def make_room(self, nbytes: int) -> None:
        """Gives back what nobody uses where the machine has no room for so many bytes."""


_pools: list[Keeper] = []


def current_pool() -> Keeper | None:
    """The pool that this process's loads go through, if any: the one that was opened last."""
    for pool in reversed(_pools):
        if pool.pid == os.getpid():  # what a fork has copied belongs to the parent's tensors
            return pool
    return None


def use_pool(pool: Keeper) -> None:
    """Loads go through it from now on, until `drop_pool`."""
    _pools.append(pool)


def drop_pool(pool: Keeper) -> None:
    """Undoes `use_pool`; also where it was undone before."""
    _pools[:] = [other for other in _pools if other is not pool]


def require_room(nbytes: int) -> None:
    """Raises PlacementError, with the bytes that are missing, where memory is too small."""
    available = available_bytes()
    if available is not None and nbytes + SPARE_BYTES > available:
        missing = nbytes + SPARE_BYTES - available
        raise PlacementError(
            f"{nbytes:,} bytes are to be loaded into memory, but only {available:,} are available:"
            f" {missing:,} bytes are missing",
            missing_bytes=missing,
        )


def available_bytes() -> int | None:
    """Memory that a load may take: the machine's, or less where a cgroup allows less."""
    limits = [limit for limit in (_machine_bytes(), _cgroup_bytes()) if limit is not None]
    return min(limits, default=None)


def _machine_bytes() -> int | None:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    return None


def _cgroup_bytes() -> int | None:
    """What the tightest cgroup above this process leaves, not counting reclaimable page cache."""
    try:
        with open("/proc/self/cgroup") as lines:
            rows = [line.rstrip("\n").split(":", 2) for line in lines]
    except OSError:
        return None
    rooms: list[int] = []
    for _, controllers, path in rows:
        if controllers == "":
            root, names = "/sys/fs/cgroup", ("memory.max", "memory.current", "file", "shmem")
        elif "memory" in controllers.split(","):
            root = "/sys/fs/cgroup/memory"
            names = (
                "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem",
            )  # fmt: skip
        else:
            continue
        # In a container the path of the host is not there, and the root is our own group.
        group = os.path.normpath(root + path)
        while group.startswith(root):
            room = _group_bytes(group, *names)
            if room is not None:
                rooms.append(room)
            group = os.path.dirname(group)
    return min(rooms, default=None)


def _group_bytes(
    group: str, limit_name: str, used_name: str, cache_name: str, shared_name: str
) -> int | None:
    try:
        with open(f"{group}/{limit_name}") as knob:
            text = knob.read().strip()
        if text == "max" or int(text) >= 1 << 60:
            return None
        with open(f"{group}/{used_name}") as knob:
            used = int(knob.read())
        with open(f"{group}/memory.stat") as lines:
            stat = dict(line.split() for line in lines)
    except (OSError, ValueError):
        return None
    # Memory files are counted among the cache, and cannot be dropped like it.
    cache = max(int(stat.get(cache_name, 0)) - int(stat.get(shared_name, 0)), 0)
    return max(int(text) - used + cache, 0)
