"""The memory files that a pool of host memory is made of, and how one is filled.

A segment holds what one batch of reads has brought. The reads go to shared mappings of it; whoever
uses the bytes gets a private one, so that nobody can change what the next one gets.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gdsload._native.memory import Lease, Region
from gdsload.checkpoint import Checkpoint, Identity
from gdsload.memory.host_buffers import BufferView
from gdsload.planning.read_plan import ReadPlan

# Parts of a segment start on borders of this, which is what is made ready at a time.
UNIT_BYTES = 2 << 20


class Run(NamedTuple):
    """Bytes of a shard, and where they are in a segment."""

    shard: int
    offset: int
    nbytes: int
    place: int


class Segment:
    """One memory file, and what is in it."""

    def __init__(self, length: int) -> None:
        """Raises OSError where the system has no memory files, or no descriptor left."""
        self.length = length
        self.fd = os.memfd_create("gdsload-pool", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, length)
            self.lease = Lease()
        except BaseException:
            os.close(self.fd)
            raise
        self.source = ""
        self.used = time.monotonic()
        self.stored: list[Identity] = []
        self.pinned: Region | None = None

    @property
    def idle(self) -> bool:
        """Whether nobody reads into it, and no tensor lives in it. An `Intake` has it on loan for
        as long as it lives, and reads under way have."""
        return self.lease.lent == (self.pinned is not None)


Filled = Callable[[Segment, "Checkpoint | None", Sequence[Run]], None]


class Intake:
    """Memory for the reads of one batch, whose bytes the pool keeps if all of them come."""

    def __init__(self, segment: Segment, plan: ReadPlan, filled: Filled) -> None:
        self._segment, self._plan, self._filled = segment, plan, filled
        self._bases: list[int] = []
        base = 0
        for target in plan.targets:
            self._bases.append(base)
            base += whole_units(target.length)
        lend = segment.lease.lend
        lengths = [target.length for target in plan.targets]
        self.regions = [
            lend(segment.fd, base, length, True)
            for base, length in zip(self._bases, lengths, strict=True)
        ]
        self._private = lend(segment.fd, 0, segment.length, False)

    def views(self, plan: ReadPlan) -> dict[str, BufferView]:
        """Where each piece of the plan will be seen."""
        return {
            name: BufferView(self._private, self._bases[location.target] + location.offset)
            for name, location in plan.locations.items()
            if location.target >= 0
        }

    def end(self, checkpoint: Checkpoint | None) -> None:
        """All that was planned of this checkpoint has come; or, with None, it has not."""
        self.regions.clear()
        runs: list[Run] = []
        for transfer in self._plan.transfers:
            place = self._bases[transfer.target] + transfer.target_offset
            if runs:
                shard, offset, nbytes, start = runs[-1]
                if (shard, offset + nbytes, start + nbytes) == (
                    transfer.shard, transfer.offset, place,
                ):  # fmt: skip
                    runs[-1] = Run(shard, offset, nbytes + transfer.wanted, start)
                    continue
            runs.append(Run(transfer.shard, transfer.offset, transfer.wanted, place))
        self._filled(self._segment, checkpoint, runs)


def whole_units(length: int) -> int:
    """`length`, rounded up to where the next part of a segment may start."""
    return -(-length // UNIT_BYTES) * UNIT_BYTES
