"""Host buffers: memory that is read into or mapped.

Each target of a read plan is one anonymous region, or, if its reads fill the page cache, part of
the mapping of its shard. Addresses are congruent to the file offsets, so that direct reads need no
copy. Not responsible for the tensors that view it (`memory.tensors`), and for memory kept between
loads (`memory.host_pool`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from gdsload._native.memory import Pool, Region
from gdsload.checkpoint import Checkpoint
from gdsload.errors import CheckpointError, PlacementError, StallError
from gdsload.planning.read_plan import ReadPlan
from gdsload.system.available import take_room
from gdsload.system.gc_control import collector_paused

if TYPE_CHECKING:
    from gdsload._native.cuda import Block
    from gdsload.memory.host_pool import HostPool


class BufferView(NamedTuple):
    """The memory of a tensor: a host or device buffer, and the offset in it in bytes."""

    region: Region | Block
    offset: int

    def free_pages(self, nbytes: int) -> None:
        """Returns the whole pages of these bytes to the system; memory of a pool stays. Bytes that
        become no tensor would otherwise be kept as long as any tensor of the region."""
        self.region.view(self.offset, nbytes, (nbytes,), 1, 8)  # a freed view returns its pages


class HostBuffers:
    """The memory of each target of a plan, in the order of the targets."""

    def __init__(
        self,
        plan: ReadPlan,
        mapping_of: Callable[[int], Region],
        pool: Pool | None = None,
    ) -> None:
        """Reserves address space; memory is taken as the reads progress.

        Args:
            plan: the reads to make room for.
            mapping_of: returns the mapping of a whole shard, by its number, for mapped targets.
            pool: regions that were used before and are reused first.

        Raises:
            PlacementError: the plan reads more than the machine or its cgroup has available.
        """
        self._plan, mapped = plan, plan.mapped_targets
        needed = plan.buffer_bytes - (pool.idle if pool is not None else 0)
        take = Region.anonymous if pool is None else pool.take
        self.starts: list[BufferView] = []
        own: dict[Region, int] = {}
        try:
            for number, target in enumerate(plan.targets):
                if number in mapped:
                    self.starts.append(BufferView(mapping_of(target.shard), target.offset))
                else:
                    own[region := take(target.length)] = target.length
                    self.starts.append(BufferView(region, 0))
        except MemoryError as error:
            raise PlacementError(str(error) or "no memory") from error
        if needed > 0:  # to look at the available memory takes as long as planning a window
            take_room(own, needed)

    @collector_paused()
    def views(self) -> dict[str, BufferView]:
        """The memory of each byte range of the plan, by name. Empty ranges are left out."""
        regions = [start.region for start in self.starts]
        offsets = [start.offset for start in self.starts]
        make = tuple.__new__
        return {
            name: make(BufferView, (regions[target], offsets[target] + offset))
            for name, (target, offset, _, _) in self._plan.locations.items()
            if target >= 0
        }


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
    """A private mapping of a whole shard. Its pages are those of the page cache until a write.

    Raises CheckpointError, and StallError: the server of a distant file may be asked.
    """
    opened = checkpoint.shards[shard]
    try:
        return checkpoint.answer_to(partial(Region.file, opened.fd, opened.size), [shard])
    except StallError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"{opened.path}: cannot be mapped: {error.strerror}", path=opened.path
        ) from error
