"""A load by several ranks: every window is read by all of them, then exchanged.

    rank 0   read share of window k+1 ──────────────►
             agree, exchange window k ──► tensors

The reads of the next window are posted before a window is exchanged: native threads read while
torch.distributed sends.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

from gdsload.checkpoint import Checkpoint, TensorInfo
from gdsload.checkpoint.shard import Identity
from gdsload.distribution.reader_group import ReaderGroup, node_id, rank_errors
from gdsload.distribution.shares import (
    Box,
    Layout,
    Message,
    Rows,
    even_part,
    info_of,
    layout_of,
    messages_of,
    shares_of,
    windows_of,
)
from gdsload.errors import CheckpointError, PlacementError
from gdsload.loading.batch import Batch, release_all
from gdsload.loading.session import Session
from gdsload.loading.torch_memory import capture_relaxed, taking
from gdsload.loading.whole_tensors import post
from gdsload.memory.tensors import flat_bytes, torch_dtype_of, torch_shape
from gdsload.remote.urls import sources_of
from gdsload.system import cancellation
from gdsload.system.device_name import device_kind
from gdsload.system.torch_thread import copying

if TYPE_CHECKING:
    import torch

# What a rank wants of a tensor: a dimension of which it gets its part, slices, or all.
Shard = SupportsIndex | slice | tuple[slice, ...] | None
Shards = Mapping[str, Shard] | Callable[[TensorInfo], Shard]
# The state of a rank whose reads of a window have not ended.
_READING = "reading"
# A URL or a node, the size of the file, and its version or the time of its last change.
_Version = tuple[str, int, str | int]


def box_of(info: TensorInfo, shard: Shard, number: int = 0, parts: int = 1) -> Box:
    """The box of `tensor[shard]`, or of part `number` of `parts` if `shard` is a dimension.

    Raises ValueError if the tensor has no such dimension, or a slice has a step, and TypeError if
    `shard` is none of these.
    """
    shape = info.shape
    if shard is None:
        return tuple((0, size) for size in shape)
    if isinstance(shard, SupportsIndex) and not isinstance(shard, bool):
        dim = index(shard)
        if not -len(shape) <= dim < len(shape):
            raise ValueError(f"tensor {info.name!r} of shape {list(shape)} has no dim {dim}")
        dim %= len(shape)
        return tuple(
            even_part(size, number, parts) if each == dim else (0, size)
            for each, size in enumerate(shape)
        )
    items = (shard,) if isinstance(shard, slice) else shard
    if not isinstance(items, tuple) or not all(isinstance(item, slice) for item in items):
        raise TypeError(
            f"the shard of tensor {info.name!r} is {shard!r}, not a dimension, a slice, a tuple of"
            " slices, or None"
        )
    if len(items) > len(shape):
        raise ValueError(
            f"tensor {info.name!r} has {len(shape)} dimensions, the index of its shard {len(items)}"
        )
    ends = []
    for item, size in zip((*items, *[slice(None)] * (len(shape) - len(items))), shape, strict=True):
        start, stop, step = item.indices(size)
        if step != 1:
            raise ValueError(f"the slice {item} of tensor {info.name!r} has a step")
        ends.append((start, max(start, stop)))
    return tuple(ends)


def boxes_of(infos: Iterable[TensorInfo], shards: Shards, number: int, parts: int) -> list[Box]:
    """What `shards` asks for of each tensor, on rank `number` of `parts`. Raises as `box_of`."""
    if callable(shards):
        return [box_of(info, shards(info), number, parts) for info in infos]
    return [box_of(info, shards.get(info.name), number, parts) for info in infos]


def agreed_layouts(
    readers: ReaderGroup,
    session: Session,
    wanted: Mapping[str, Box],
    window_bytes: int,
    arrange: Callable[[Iterable[TensorInfo]], list[TensorInfo]] = list,
) -> tuple[list[Layout], int]:
    """What all ranks read, the same on every rank. Connects the devices.

    Args:
        readers: The ranks.
        session: The open session of this rank.
        wanted: The box of each tensor that this rank wants, in its order.
        window_bytes: Bytes that this rank would read at a time, with the others.
        arrange: Puts the tensors in order if not all ranks want the same ones.

    Returns:
        The layouts of all tensors that a rank wants, and the smallest `window_bytes`.

    Raises:
        RankError: Another rank has failed.
        CheckpointError: The ranks have opened different checkpoints, or versions of one.
        PlacementError: Some ranks read to devices, others to CPU memory.
        ValueError: A box is no part of its tensor, or the ranks want different orders.
    """
    tensors, memory = session.checkpoint.tensors, device_kind(session.device)
    # A box of a whole tensor is not sent: usually these are most of them.
    mine = {
        name: None if box == box_of(tensors[name], None) else box for name, box in wanted.items()
    }
    # Shards without tensors count as well: the ranks compare versions shard by shard.
    headers = _digest([len(session.checkpoint.shards), *map(tuple, tensors.values())])
    order = _digest([info.name for info in arrange(tensors.values())])
    node = node_id()
    versions = [
        _version_of(shard.identity, shard.origin, node) for shard in session.checkpoint.shards
    ]
    answers = readers.agree(_Answer(headers, versions, order, memory, window_bytes, mine))
    if any(other.headers != headers for other in answers):
        raise CheckpointError(
            f"{session.checkpoint.source}: the ranks have opened different checkpoints:"
            " their headers differ"
        )
    _require_same_versions(session.checkpoint, [other.versions for other in answers])
    if any(other.order != order for other in answers):
        raise ValueError("the ranks of one load want the tensors in different orders")
    if any(other.memory != memory for other in answers):
        kinds = ", ".join(sorted({other.memory for other in answers}))
        raise PlacementError(f"the ranks of one load read to different kinds of memory: {kinds}")
    if memory != "cpu":
        readers.connect_devices(session.device)
    wants = [other.wants for other in answers]
    names = list(mine)
    if any(list(want) != names for want in wants):
        union = {name for want in wants for name in want}
        names = [info.name for info in arrange(tensors.values()) if info.name in union]
    layouts = []
    for name in names:
        info = tensors[name]
        boxes = [None if name not in want else want[name] or box_of(info, None) for want in wants]
        layouts.append(layout_of(info, boxes))
    return layouts, min(other.window_bytes for other in answers)


class _Answer(NamedTuple):
    """What a rank tells the others before the first window."""

    headers: str  # a digest, as `order`, which is that of all tensors
    versions: list[_Version]  # of the shards
    order: str
    memory: str
    window_bytes: int
    wants: Mapping[str, Box | None]  # None: the whole tensor


def _digest(facts: list[Any]) -> str:
    return hashlib.sha256(repr(facts).encode("utf-8", "surrogatepass")).hexdigest()


def _version_of(file: Identity, origin: tuple[str, str], node: str) -> _Version:
    """Copies have other numbers, and on another node perhaps other times; one in the local cache
    counts as the remote file, which another rank may read there.

    A file of `replicas` has the version of the first source that answered a rank: not compared.
    """
    url, version = origin if any(origin) else file.remote
    if url:
        return url, file.size, "" if sources_of(url) else version
    return node, file.size, file.mtime_ns


def _require_same_versions(checkpoint: Checkpoint, answers: Sequence[Sequence[_Version]]) -> None:
    """Raises CheckpointError if two ranks have opened different versions of a file."""
    for shard, found in zip(checkpoint.shards, zip(*answers, strict=True), strict=True):
        if len(set(found)) > len({where for where, _, _ in found}):
            raise CheckpointError(
                f"{shard.path}: the ranks have opened different versions of it; copies on one node"
                " need the same time of change",
                path=shard.path,
            )


@dataclass(slots=True)
class _SharedWindow:
    """One window: the rows that each rank reads, and the reads of this rank."""

    shares: list[list[Rows]]
    infos: list[TensorInfo]  # of this rank's share
    batch: Batch


class Exchange:
    """The tensors of one load, from the windows of all ranks. Closed after the last of them."""

    def __init__(
        self,
        readers: ReaderGroup,
        session: Session,
        layouts: Sequence[Layout],
        window_bytes: int,
        check: Callable[[], None] = cancellation.check,
    ) -> None:
        """Reads nothing before `windows`.

        Args:
            readers: The ranks that read.
            session: The open session of this rank.
            layouts: From `agreed_layouts`.
            window_bytes: Bytes that all ranks together read at a time.
            check: Called while this rank waits for its reads and for slow ranks. An exception from
                it ends the load.
        """
        self._check = check
        self._readers, self._session, self._layouts = readers, session, layouts
        self._planned = windows_of(layouts, window_bytes)
        self._posted: deque[_SharedWindow] = deque()
        self._tensors: dict[int, torch.Tensor] = {}  # not yet complete
        # Rows of each tensor that come with windows after this one.
        self._left = [len(layout.rows_of(readers.rank)) for layout in layouts]
        self._next = 0  # the first tensor that was not handed out
        self._answer_at = 0.0  # monotonic seconds
        session.report.ranks = readers.size
        session.expect(sum(layout.info.nbytes for layout in layouts) // readers.size)

    def _post_next(self) -> None:
        """Posts the reads of the next window, if there is one."""
        if (window := next(self._planned, None)) is not None:
            shares = shares_of(self._layouts, window, self._readers.size)
            infos = [info_of(self._layouts, rows) for rows in shares[self._readers.rank]]
            self._posted.append(_SharedWindow(shares, infos, post(self._session, infos)))

    def windows(self) -> Iterator[list[tuple[Layout, torch.Tensor]]]:
        """Yields the tensors that are complete after each window, in the order of the layouts.

        A file that changes during an exchange is an error on all ranks before they get the last
        tensors.

        Raises:
            RankError: Another rank has failed.
            GdsloadError: As for `load_file`.
        """
        self._answer_at = time.monotonic() + self._readers.patience_seconds
        self._session.watch = self.stay_in_touch
        self._post_next()
        if not self._posted:
            self._finish()
        device = self._session.device
        while self._posted:
            self._post_next()
            window = self._posted[0]
            self._answer_at = time.monotonic() + self._readers.patience_seconds
            window.batch.wait(watch=self.stay_in_touch)
            read = {info.shard for info in window.infos}
            self._session.checkpoint.verify_unchanged(read)
            with self._session.report.phase("allocate"), capture_relaxed(device):
                received = self._receiving(window)
            with self._session.report.phase("exchange"), capture_relaxed(device):
                sent = self._sending(window)
            while _READING in self._readers.agree():
                self._check()
            with (
                self._session.report.phase("exchange"),
                self._readers.exchanging(),
                capture_relaxed(device),
            ):
                self._exchange(sent, received)
            del sent, received  # they hold memory of tensors that are handed out
            self._posted.popleft()
            # What was sent may be of a mapping, which changes with its file. At the end all of them
            # are compared: one may have changed since its own window.
            self._session.checkpoint.verify_unchanged(read if self._posted else None)
            if not self._posted:
                self._readers.agree()
                self._finish()
            yield self._complete()
        yield self._complete()

    def stay_in_touch(self) -> None:
        """Tells the other ranks from time to time that this one is still reading: they wait a
        limited time for each answer. Also for a caller that pauses between two windows, in the
        thread that iterates over them. Raises RankError if another rank has failed, and what
        `check` raises."""
        self._check()
        if time.monotonic() >= self._answer_at:
            self._readers.agree(_READING)
            self._answer_at = time.monotonic() + self._readers.patience_seconds

    def _finish(self) -> None:
        self._readers.finish()
        self._answer_at = inf

    def _complete(self) -> list[tuple[Layout, torch.Tensor]]:
        done = []
        while self._next < len(self._layouts) and not self._left[self._next]:
            number, layout = self._next, self._layouts[self._next]
            self._next += 1
            if layout.boxes[self._readers.rank] is not None:
                tensor = self._tensors.pop(number, None)
                done.append((layout, self._empty(layout) if tensor is None else tensor))
        return done

    def _empty(self, layout: Layout) -> torch.Tensor:
        import torch

        shape = layout.shapes[self._readers.rank] or ()
        info = layout.info._replace(shape=shape)
        device, nbytes = self._session.device, layout.wanted_bytes(self._readers.rank)
        with taking(nbytes, device, f"tensor {info.name!r}"):
            return torch.empty(torch_shape(info), dtype=torch_dtype_of(info), device=device)

    def _rows(self, rows: Rows) -> torch.Tensor:
        """The memory of these rows in the tensor of this rank, as bytes."""
        layout = self._layouts[rows.tensor]
        tensor = self._tensors.get(rows.tensor)
        if tensor is None:
            tensor = self._tensors[rows.tensor] = self._empty(layout)
        wanted = layout.rows_of(self._readers.rank)
        raw = flat_bytes(tensor).view(len(wanted), -1)
        return raw[rows.start - wanted.start : rows.stop - wanted.start]

    def _receiving(self, window: _SharedWindow) -> list[tuple[int, Message, torch.Tensor]]:
        """For each message to this rank its reader, and the memory that it is received in.

        Allocated before the ranks agree: a rank without memory fails before others wait for it.
        """
        import torch

        device = self._session.device
        received = []
        for reader, share in enumerate(window.shares):
            for message in messages_of(self._layouts, share, self._readers.rank):
                for _, rows in message.parts:
                    self._rows(rows)
                    self._left[rows.tensor] -= rows.stop - rows.start
                if reader == self._readers.rank:
                    continue
                if len(message.parts) == 1:
                    memory = self._rows(message.parts[0][1]).view(-1)
                else:
                    with taking(message.nbytes, device, "a message of another rank"):
                        memory = torch.empty(message.nbytes, dtype=torch.uint8, device=device)
                received.append((reader, message, memory))
        return received

    def _sending(self, window: _SharedWindow) -> list[tuple[int, torch.Tensor]]:
        """The messages of this rank, each with the rank that gets it. Copies what stays here.

        Packed before the ranks agree, as `_receiving` allocates.
        """
        read = window.batch.tensors_of(window.infos)
        window.batch.release()
        sources = {
            rows: read[info.name].view(-1, *self._layouts[rows.tensor].row_shape)
            for rows, info in zip(window.shares[self._readers.rank], window.infos, strict=True)
        }
        packed: dict[Any, torch.Tensor] = {}  # ranks that want the same get the same memory
        sent = []
        share = window.shares[self._readers.rank]
        for rank in range(self._readers.size):
            for message in messages_of(self._layouts, share, rank):
                if rank == self._readers.rank:
                    for part in message.parts:
                        self._copy(self._wanted(sources, part, rank), part[1])
                    continue
                boxes = [self._layouts[rows.tensor].boxes[rank] for _, rows in message.parts]
                key = message.parts, tuple(box and box[1:] for box in boxes)
                if key not in packed:
                    packed[key] = self._packed(sources, message, rank)
                sent.append((rank, packed[key]))
        return sent

    def _exchange(
        self,
        sent: list[tuple[int, torch.Tensor]],
        received: list[tuple[int, Message, torch.Tensor]],
    ) -> None:
        self._readers.exchange(
            sent, [(reader, memory) for reader, _, memory in received], self._session.device
        )
        for _, message, memory in received:
            self._session.report.received_bytes += message.nbytes
            self._unpack(message, memory)
        if (device := self._session.device) != "cpu":
            import torch

            # The bytes may be used on any stream, and what was sent may be freed. Also without a
            # message: a rank copies what it keeps.
            with rank_errors("does not answer"):  # what NCCL has queued fails here
                torch.cuda.current_stream(device).synchronize()

    def _wanted(
        self, sources: Mapping[Rows, torch.Tensor], part: tuple[Rows, Rows], rank: int
    ) -> torch.Tensor:
        """What a rank wants of rows that were read here."""
        read, rows = part
        within = slice(rows.start - read.start, rows.stop - read.start)
        box = self._layouts[rows.tensor].boxes[rank] or ()
        return sources[read][(within, *[slice(*ends) for ends in box[1:]])]

    def _packed(
        self, sources: Mapping[Rows, torch.Tensor], message: Message, rank: int
    ) -> torch.Tensor:
        import torch

        device = self._session.device
        with taking(message.nbytes, device, "a message to another rank"), copying():
            parts = [self._wanted(sources, part, rank).reshape(-1) for part in message.parts]
            # `reshape` of a column that is one byte wide is a view with a stride.
            return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)

    def _unpack(self, message: Message, memory: torch.Tensor) -> None:
        if len(message.parts) == 1:  # it was received where it belongs
            return
        start = 0
        for _, rows in message.parts:
            into = self._rows(rows)
            self._copy(memory[start : start + into.numel()], rows)
            start += into.numel()

    def _copy(self, source: torch.Tensor, rows: Rows) -> None:
        with copying():
            self._rows(rows).view(source.shape).copy_(source)  # needs no memory for a second copy

    def close(self) -> None:
        """Ends the reads that are in flight, and releases memory."""
        release_all(window.batch for window in self._posted)
        self._posted.clear()
        self._tensors.clear()
        self._check = cancellation.check  # that of its owner may refer to this object
