"""Tensors of a checkpoint that several ranks load together: the `group=` of `load_file`, `stream`.

Not responsible for opening the checkpoint: the caller passes a context that does.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdsload.checkpoint import TensorInfo
from gdsload.checkpoint.selection import no_such_tensor
from gdsload.distribution.exchange import Exchange, Shards, agreed_layouts, boxes_of
from gdsload.distribution.reader_group import ReaderGroup, require_readers
from gdsload.distribution.shares import wanted_bytes_of
from gdsload.loading.session import Session
from gdsload.loading.torch_memory import moved
from gdsload.system.available import memory_cgroups, require_machine_room, require_room

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

NOT_COMPARED = "verify= and group= cannot be combined: shares of tensors have no checksums"
# A window takes milliseconds, in which the ranks agree; windows of one byte would take hours.
LEAST_WINDOW_BYTES = 64 << 10

Opened = AbstractContextManager[tuple[Session, list[TensorInfo], Callable[[int], None]]]


@dataclass(frozen=True, slots=True)
class Sharing:
    """How ranks share a load: the arguments `group`, `shards` and `readers` of `load_file`."""

    group: ProcessGroup
    shards: Shards
    readers: str

    @classmethod
    def of(cls, group: ProcessGroup | None, shards: Shards | None, readers: str) -> Sharing | None:
        """The checked arguments; None if this process reads alone. Raises ValueError."""
        require_readers(readers)
        if group is None and shards is not None:
            raise ValueError("shards= needs group=: the ranks that the tensors are divided among")
        return None if group is None else cls(group, shards or {}, readers)


def require_room_of_ranks(readers: ReaderGroup, nbytes: int) -> None:
    """Checks that `nbytes` of host memory are available to this rank, and what all ranks of a node
    need together: they take it at the same time. All ranks call it.

    Raises:
        PlacementError: Too little memory.
        RankError: Another rank has failed.
    """
    if nbytes:
        require_room(nbytes)
    if not readers.of_node:
        return
    cgroups, needs = zip(*readers.agree((memory_cgroups(), nbytes)), strict=True)
    if total := sum(needs):
        require = require_room if len(set(cgroups)) == 1 else require_machine_room
        require(total, "bytes are to be loaded into memory by the ranks of this node")


def shared_tensors(
    sharing: Sharing,
    opened: Callable[[], Opened],
    arrange: Callable[[Iterable[TensorInfo]], list[TensorInfo]],
    window_bytes: int,
    device: str,
    stall_seconds: float,
    held_bytes: int | None,
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Yields what this rank wants, tensor by tensor. All ranks of the group iterate together.

    Args:
        sharing: The group, and what this rank wants.
        opened: Opens the checkpoint: the session, the wanted tensors, a function for progress.
        arrange: Puts the tensors in order if not all ranks want the same ones.
        window_bytes: Bytes that the ranks of a node read at a time, together; at least
            `LEAST_WINDOW_BYTES`.
        device: Where the tensors are needed.
        stall_seconds: Every wait for another rank ends after this time.
        held_bytes: Bytes of tensors that the caller holds at a time; None: all of them.
    """
    with (
        ReaderGroup(sharing.group, sharing.readers, stall_seconds) as readers,
        readers.together(),
        opened() as (session, infos, advance),
    ):
        rank = readers.rank
        if not callable(sharing.shards):
            tensors = session.checkpoint.tensors
            for name in sharing.shards:
                if name not in tensors:
                    raise no_such_tensor(name, tensors, session.checkpoint.source)
        boxes = boxes_of(infos, sharing.shards, readers.numbers[rank], readers.whole_size)
        wanted = {info.name: box for info, box in zip(infos, boxes, strict=True)}
        layouts, window_bytes = agreed_layouts(readers, session, wanted, window_bytes, arrange)
        wanted_bytes = wanted_bytes_of(layouts, readers.size)
        session.report.wanted_bytes = wanted_bytes[rank]
        held = wanted_bytes[rank] if held_bytes is None else min(wanted_bytes[rank], held_bytes)
        require_room_of_ranks(readers, held if device == "cpu" else 0)
        readers.agree()  # what a rank reads from now on must not count as missing on another one
        exchange = Exchange(readers, session, layouts, max(window_bytes, LEAST_WINDOW_BYTES))
        try:
            for complete in exchange.windows():
                advance(sum(layout.wanted_bytes(rank) for layout, _ in complete))
                while complete:  # a tensor is freed as soon as the caller drops it
                    layout, tensor = complete.pop(0)
                    if device != session.device:
                        tensor = moved(tensor, device)
                    yield layout.info.name, tensor
                    del tensor
        finally:
            exchange.close()
