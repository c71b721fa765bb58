"""Tensors in the order in which somebody is going to ask for them, read before they do.

    slices, in the expected order          kept     window    window    window   window
      -> windows of so many bytes        [posted] [taken]   [posted]  [posted] [ahead is full]
      -> stages, posted some ahead                   |
      -> take(cut), from any thread                  its memory is the next one's when all was taken

A stage is one request of the session. Cuts that are kept are one window: their memory is the
model's, and each is given as it comes. A cut of a window that was not posted yet has it posted at
once, and one that nobody expected gets a stage of its own, so no order of requests can hang.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from gdsload.backends.base import Memory
from gdsload.checkpoint import TensorInfo
from gdsload.errors import CheckpointError, GdsloadError
from gdsload.loading.batch import Batch
from gdsload.loading.session import Session
from gdsload.memory.host_buffers import BufferView, hand_over, map_shard
from gdsload.planning.read_plan import ReadPlan
from gdsload.planning.tensor_slices import TensorSlice, runs_of
from gdsload.system.lifecycle import fork_safe_lock

if TYPE_CHECKING:
    import torch

    from gdsload._native.memory import Region

# One window, and how much of them may be on its way. With half of it a cast begins to wait for
# storage; with twice as much, fresh memory costs more than the reads that it hides.
WINDOW_BYTES = 32 << 20
AHEAD_BYTES = 128 << 20
_LOOK_SECONDS = 0.1  # how long Ctrl-C, or an error seen by another thread, may have to wait
_MADE_AT_ONCE = 256  # tensors handed over in one go


class PlannedWindow(NamedTuple):
    """Cuts that are read by one request. What is kept is bounded by the model, and not by what may
    be ahead; it is given as it comes."""

    kept: bool
    slices: list[TensorSlice]

    @property
    def nbytes(self) -> int:
        return sum(tensor_slice.nbytes for tensor_slice in self.slices)


class Taken(NamedTuple):
    """What a feed has handed out: how many slices, and the bytes of their runs."""

    tensors: int
    nbytes: int


class QueueClosed(GdsloadError, RuntimeError):
    """A tensor was asked for after its load had ended, by an error or by its own end."""


class ReadWindow(Batch):
    """The parts of some slices on their way, each taken as soon as its own bytes are there."""

    def __init__(
        self,
        session: Session,
        plan: ReadPlan,
        views: dict[str, BufferView],
        slices: Sequence[TensorSlice],
    ) -> None:
        self.left = len(slices)
        self.arrived = not plan.transfers
        self._infos = [part for tensor_slice in slices for part in tensor_slice.parts]
        self._place = {info.name: place for place, info in enumerate(self._infos)}
        self._made: dict[str, torch.Tensor] = {}
        super().__init__(session, plan, views)

    @classmethod
    def of(cls, session: Session, slices: Sequence[TensorSlice]) -> ReadWindow:
        """Puts them on their way and returns at once."""
        plan, views = session.arrange(runs_of(slices), window_bytes=WINDOW_BYTES)
        return cls(session, plan, views, slices)

    def look(self) -> None:
        """Notes what has arrived since it was last asked. Raises as `Batch.wait` does, and again
        with each later call."""
        if self.arrived:
            return
        progress = self._note_progress()
        self._require_progress(progress)
        if self.complete:
            self._settle()
        elif progress is not None and progress.idle_seconds > self.session.stall_seconds:
            raise self._stall(self.plan.transfers[self._arrived.find(0)], progress.idle_seconds)

    def _settle(self) -> None:
        """Ends the request, and gives back the pages between the parts that were read.

        At once: memory is made ready in units larger than a page, sometimes after the reads, so
        that gaps fill with pages that nobody needs, and those of tensors that are gone fill again.
        """
        regions = [entry.what.region for entry in self._memory if isinstance(entry.what, Memory)]
        self.release()
        self.arrived = True
        ends = [0] * len(regions)
        gaps = []
        for transfer in sorted(self.plan.transfers, key=lambda t: (t.target, t.target_offset)):
            number, start = transfer.target, transfer.target_offset
            gaps.append((number, ends[number], start - ends[number]))
            ends[number] = max(ends[number], start + transfer.length)
        gaps += [(n, end, regions[n].length - end) for n, end in enumerate(ends)]
        for number, start, length in gaps:
            if length > 0:
                regions[number].view(start, length, (length,), 1, 8)  # dies, and its pages with it

    def has(self, tensor_slice: TensorSlice) -> bool:
        """Whether all bytes of it are there."""
        return all(part.name in self._made or self._is_there(part) for part in tensor_slice.parts)

    def _is_there(self, info: TensorInfo) -> bool:
        if not self.settled(info.name):  # a prefetch has it on its way
            return False
        location = self.plan.locations.get(info.name)
        return location is None or self._arrived.find(0, location.first, location.last + 1) < 0

    def pause(self, tensor_slice: TensorSlice, seconds: float) -> None:
        """Waits, without the GIL, until the cut may be there; returns after `seconds` at most."""
        for part in tensor_slice.parts:
            claim = self.claims.get(part.name)
            if claim is not None:
                claim.pause(seconds)
                return
        request, backend, locations = self._request, self._backend, self.plan.locations
        if request is None or backend is None or self.session.checkpoint.closed:
            return
        spans = [locations[part.name] for part in tensor_slice.parts if part.name in locations]
        if not spans:
            return
        first = min(location.first for location in spans)
        last = max(location.last for location in spans)
        if last >= first:
            backend.wait(request, seconds, first, last)

    def give(self, tensor_slice: TensorSlice) -> list[torch.Tensor]:
        """The tensors of its parts, once: each owns its memory."""
        made = self._made
        for part in tensor_slice.parts:
            if part.name not in made:
                self._make(self._place[part.name])
        given = [made.pop(part.name) for part in tensor_slice.parts]
        self.left -= 1
        return given

    def _make(self, place: int) -> None:
        """Makes tensors of this part and of those after it that are there as well."""
        batch: list[TensorInfo] = []
        all_there = self.arrived and not self.claims
        for info in self._infos[place : place + _MADE_AT_ONCE]:
            if info.name in self._made or not (all_there or self._is_there(info)):
                break
            if info.nbytes and info.name not in self.views:
                break  # it was taken before
            batch.append(info)
        if not batch:
            name = self._infos[place].name
            raise GdsloadError(f"tensor {name!r} was lost: its hand-over was interrupted")
        # Given up first: where this is interrupted, tensors that were made drop their bytes.
        views = {info.name: self.views.pop(info.name) for info in batch if info.nbytes}
        try:
            self._made.update(hand_over(batch, views))
        except CheckpointError:  # before any tensor was made
            self.views.update(views)
            raise

    def joined(self, tensor_slice: TensorSlice, parts: list[torch.Tensor]) -> torch.Tensor:
        """The cut's tensor, of the tensors of its parts."""
        tensor = parts[0]
        if tensor_slice.shape is not None:
            import torch

            tensor = torch.stack(parts).view(tensor_slice.shape)
        # A copy, where something was cut away: a view would keep the rest alive.
        return tensor if tensor_slice.index is None else tensor[tensor_slice.index].clone()

    def end(self) -> None:
        """Releases what nobody took, and the request."""
        self._made.clear()
        self.views.clear()
        self.release()


class ReadaheadQueue:
    """Hands out slices to any number of threads, some windows ahead of them. Close it at the
    end."""

    def __init__(
        self,
        session: Session,
        slices: Sequence[TensorSlice] = (),
        *,
        kept: Container[str] = (),
        window_bytes: int = WINDOW_BYTES,
        ahead_bytes: int = AHEAD_BYTES,
        stages: type[ReadWindow] = ReadWindow,
    ) -> None:
        """`slices` in the order in which they will be asked for; nothing is read before `start`.

        `kept` are the keys of those whose memory is the model's. `window_bytes` 0 makes one window
        of all, as if all were kept.
        """
        self.session = session
        self.waited_seconds = 0.0  # of all threads together
        self.unexpected: list[str] = []
        self._tensors = self._nbytes = 0  # handed out
        self._ahead_bytes = ahead_bytes
        self._stages_are = stages
        self._lock = fork_safe_lock(self)
        self._closed = False
        known = {tensor_slice.key: tensor_slice for tensor_slice in slices}
        self._windows = _grouped(known.values(), kept, window_bytes)
        self._sizes = [0 if window.kept else window.nbytes for window in self._windows]
        self._window_of = {
            tensor_slice.key: number
            for number, window in enumerate(self._windows)
            for tensor_slice in window.slices
        }
        self._stages: dict[int, ReadWindow] = {}  # posted, and not yet all taken
        self._posted = [False] * len(self._windows)
        self._next = 0
        self._loose: set[ReadWindow] = set()
        self._mappings: dict[int, Region] = {}

    @property
    def taken(self) -> Taken:
        """What has been handed out."""
        return Taken(self._tensors, self._nbytes)

    @property
    def untaken(self) -> list[str]:
        """What was expected and never asked for."""
        return list(self._window_of)

    def start(self) -> None:
        """Posts the first windows."""
        with self._lock:
            self._advance()

    def _advance(self) -> None:
        """Posts windows while there is room for them."""
        held = sum(self._sizes[number] for number in self._stages)
        while self._next < len(self._windows):
            size = self._sizes[self._next]
            if self._posted[self._next]:
                self._next += 1
                continue
            if self._stages and held + size > self._ahead_bytes:
                return
            self._post(self._next)
            held += size

    def _post(self, number: int) -> ReadWindow:
        kept, slices = self._windows[number]
        stage = self._stages_are.of(self.session, slices)
        self._posted[number] = True
        self._stages[number] = stage
        self._windows[number] = PlannedWindow(kept, [])  # its stage holds what is still needed
        return stage

    def take(self, tensor_slice: TensorSlice) -> torch.Tensor:
        """The tensor of a cut, when its bytes are there. It owns its memory.

        Raises ReadError and its kinds for what went wrong with its window, QueueClosed when the
        load ended meanwhile.
        """
        with self._lock:
            self._require_open()
            number = self._window_of.pop(tensor_slice.key, None)
            stage = None
            try:
                stage = self._stage_of(tensor_slice, number)
                piecemeal = number is not None and self._windows[number].kept
                parts = self._given(stage, tensor_slice, piecemeal)
            except BaseException:
                self._put_back(tensor_slice, number, stage)
                raise
        if parts is None:
            try:
                parts = self._await(stage, tensor_slice, piecemeal)
            except BaseException:
                with self._lock:
                    self._put_back(tensor_slice, number, stage)
                raise
        if stage.left == 0:
            with self._lock:
                self._retire(stage, number)
        return stage.joined(tensor_slice, parts)

    def _stage_of(self, tensor_slice: TensorSlice, number: int | None) -> ReadWindow:
        if number is None:
            stage = self._stages_are.of(self.session, [tensor_slice])
            self._loose.add(stage)
            self.unexpected.append(tensor_slice.key)
            return stage
        return self._stages[number] if self._posted[number] else self._post(number)

    def _put_back(
        self, tensor_slice: TensorSlice, number: int | None, stage: ReadWindow | None
    ) -> None:
        """The cut was not given: the next call for it meets the same stage, and the same error."""
        if number is not None:
            self._window_of[tensor_slice.key] = number
        elif stage is not None:
            self._loose.discard(stage)
            stage.end()

    def _await(
        self, stage: ReadWindow, tensor_slice: TensorSlice, piecemeal: bool
    ) -> list[torch.Tensor]:
        start = time.monotonic()
        while True:
            stage.pause(tensor_slice, _LOOK_SECONDS)
            with self._lock:
                self._require_open()
                parts = self._given(stage, tensor_slice, piecemeal)
                if parts is not None:
                    self.waited_seconds += time.monotonic() - start
                    return parts

    def _given(
        self, stage: ReadWindow, tensor_slice: TensorSlice, piecemeal: bool
    ) -> list[torch.Tensor] | None:
        """The parts of a cut where they are there, else None. Called with the lock held."""
        if not self._is_ready(stage, tensor_slice, piecemeal):
            stage.look()
            if not self._is_ready(stage, tensor_slice, piecemeal):
                return None
        self._tensors += 1
        self._nbytes += tensor_slice.nbytes
        return stage.give(tensor_slice)

    def _is_ready(self, stage: ReadWindow, tensor_slice: TensorSlice, piecemeal: bool) -> bool:
        # A stage has arrived when its own reads have: what a prefetch brings may still be missing.
        return (stage.arrived or piecemeal) and stage.has(tensor_slice)

    def _retire(self, stage: ReadWindow, number: int | None) -> None:
        if number is None:
            self._loose.discard(stage)
        elif self._stages.pop(number, None) is None:
            return  # another thread was quicker
        if not self._closed:
            stage.end()
            self._advance()

    def mapped(self, info: TensorInfo) -> torch.Tensor:
        """The tensor in a mapping of its file: nothing is read until somebody touches it."""
        with self._lock:
            self._require_open()
            if info.shard not in self._mappings:
                self._mappings[info.shard] = map_shard(self.session.checkpoint, info.shard)
            region = self._mappings[info.shard]
        return hand_over([info], {info.name: BufferView(region, info.offset)})[info.name]

    def _require_open(self) -> None:
        if self._closed:
            raise QueueClosed(f"{self.session.checkpoint.source}: this load has ended")

    def close(self) -> None:
        """Ends all reads and gives their memory back; whoever waits gets QueueClosed."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for stage in [*self._stages.values(), *self._loose]:
                stage.end()
            self._stages.clear()
            self._loose.clear()
            self._mappings.clear()

    def __enter__(self) -> ReadaheadQueue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _grouped(
    slices: Iterable[TensorSlice], kept: Container[str], window_bytes: int
) -> list[PlannedWindow]:
    """Windows, in the order of their first slices. What is kept is one window."""
    windows: list[PlannedWindow] = []
    filling: dict[bool, tuple[PlannedWindow, int]] = {}
    for tensor_slice in slices:
        keeps = not window_bytes or tensor_slice.key in kept
        window, held = filling.get(keeps, (None, 0))
        if window is None or (not keeps and held + tensor_slice.nbytes > window_bytes):
            window, held = PlannedWindow(keeps, []), 0
            windows.append(window)
        window.slices.append(tensor_slice)
        filling[keeps] = window, held + tensor_slice.nbytes
    return windows
