"""Tensors that are copied to their places in parameters, in the order in which they lie in files.

    windows, as they lie      window     window      window     window
                              [copied]   [posted]    [posted]   [ahead is full]
                                 `-- its memory is the next one's

Whoever wants a tensor copies the windows up to its own, and finds it in its place. So the reads are
one stream, in memory that does not grow with the model, whatever the order in which tensors are
asked for; and no order of requests can hang.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from gdsload._native.memory import Pool
from gdsload.backends.base import DRAM, Memory
from gdsload.checkpoint import TensorInfo
from gdsload.dtypes import known_dtype
from gdsload.errors import GdsloadError
from gdsload.integrations.transformers.parameter_buffers import ParameterBuffers
from gdsload.integrations.transformers.readahead_queue import (
    AHEAD_BYTES,
    WINDOW_BYTES,
    QueueClosed,
    Taken,
)
from gdsload.loading.batch import Batch
from gdsload.loading.session import Session
from gdsload.memory import host_pool
from gdsload.memory.host_buffers import BufferView, HostBuffers, hand_over
from gdsload.planning.grouping import grouped
from gdsload.planning.read_plan import FILE_ORDER, ReadPlan
from gdsload.planning.tensor_slices import rows_of, runs_of, whole
from gdsload.system.lifecycle import fork_safe_lock

if TYPE_CHECKING:
    import torch

# torch copies more elements than this with all its threads, which wait for each other by spinning.
# Where there are few cores, the threads that make memory ready need them more.
_ELEMENTS_ALONE = 32767
_ELEMENTS_TOGETHER = 16 << 20
_FEW_CORES = 4
# What stays as it is needs no torch; where there are many cores, more than this is worth them.
_MOVED_AT_ONCE = 1 << 20
_ALL = slice(None)


class _Piece(NamedTuple):
    """A tensor, or some rows of it, and whose they are."""

    info: TensorInfo
    name: str
    rows: slice


class _Batch(Batch):
    """A window on its way into memory that the windows before it had."""

    def __init__(
        self, session: Session, plan: ReadPlan, views: dict[str, BufferView], pool: Pool
    ) -> None:
        self._pool = pool
        super().__init__(session, plan, views)

    def _take_memory(self) -> list[Memory]:
        if host_pool.current() is not None:  # it keeps what was read
            return super()._take_memory()
        arena = HostBuffers(self.plan, self._pool)
        self.views.update(arena.views(self.plan))
        return [Memory(DRAM, region.address, region.length, region) for region in arena.regions]


class ParameterWriter:
    """Fills destinations. Any number of threads may ask; close it at the end."""

    def __init__(
        self,
        session: Session,
        destinations: ParameterBuffers,
        infos: Sequence[TensorInfo] = (),
        *,
        window_bytes: int = WINDOW_BYTES,
        ahead_bytes: int = AHEAD_BYTES,
    ) -> None:
        """`infos` have places among the destinations; nothing is read before `start`."""
        self.session = session
        self.destinations = destinations
        self.waited_seconds = 0.0
        self._window_bytes, self._ahead_bytes = window_bytes, ahead_bytes
        self._windows = _windows(infos, window_bytes)
        # Of the last piece of each tensor.
        self._window_of = {
            piece.name: number for number, window in enumerate(self._windows) for piece in window
        }
        self._pool = Pool(ahead_bytes + 2 * window_bytes)
        self._under_way: deque[_Batch] = deque()
        self._held = 0  # bytes under way
        self._posted = self._copied = 0  # windows
        self._tensors = self._nbytes = 0  # of them, handed out
        self._lock = fork_safe_lock(self)
        self._closed = False
        self._copying = False  # stays True where a copy was interrupted
        few = len(os.sched_getaffinity(0)) <= _FEW_CORES
        self._elements = _ELEMENTS_ALONE if few else _ELEMENTS_TOGETHER
        self._most_moved = window_bytes if few else _MOVED_AT_ONCE

    @property
    def taken(self) -> Taken:
        """What has been handed out."""
        return Taken(self._tensors, self._nbytes)

    def start(self) -> None:
        """Posts the first windows."""
        with self._lock:
            self._advance()

    def _advance(self) -> None:
        while self._posted < len(self._windows):
            window = self._windows[self._posted]
            nbytes = sum(piece.info.nbytes for piece in window)
            if self._under_way and self._held + nbytes > self._ahead_bytes:
                return
            batch = self._batch_of(window)
            self._under_way.append(batch)
            self._posted += 1
            self._held += batch.plan.read_bytes  # not what a prefetch holds, or the page cache

    def _batch_of(self, window: Sequence[_Piece]) -> _Batch:
        runs = runs_of(whole(piece.info) for piece in window)
        plan, views = self.session.arrange(runs, window_bytes=self._window_bytes)
        return _Batch(self.session, plan, views, self._pool)

    def take(self, name: str, dtype: Any) -> torch.Tensor | None:
        """The tensor in its place; None where it has none, or one of another dtype.

        Raises ReadError and its kinds for what went wrong on the way to it, QueueClosed when the
        load ended meanwhile.
        """
        if not self.destinations.expects(name, dtype):
            return None
        with self._lock:
            while self._copied <= self._window_of[name]:
                self._copy_next()
            place = self.destinations.give(name)
            if place is not None:
                self._tensors += 1
            return place

    def _require_open(self) -> None:
        if self._closed:
            raise QueueClosed(f"{self.session.checkpoint.source}: this load has ended")

    def _copy_next(self) -> None:
        self._require_open()
        if self._copying:
            # Tensors that were made of the window have dropped their bytes: it cannot be repeated.
            source = self.session.checkpoint.source
            raise GdsloadError(f"{source}: copying to parameters was interrupted by an error")
        if not self._under_way:  # posting it failed before
            self._advance()
        batch, window = self._under_way[0], self._windows[self._copied]
        start = time.monotonic()
        batch.wait(watch=self._require_open)
        self.waited_seconds += time.monotonic() - start
        self._copying = True
        self._fill(window, batch.views)
        self._under_way.popleft()
        batch.views.clear()
        batch.release()
        self._nbytes += sum(piece.info.nbytes for piece in window)
        self._held -= batch.plan.read_bytes
        self._windows[self._copied] = []
        self._copied += 1
        self._copying = False
        self._advance()

    def _fill(self, window: Sequence[_Piece], views: Mapping[str, BufferView]) -> None:
        casts = []
        for info, name, rows in window:
            place = self.destinations.place_of(name)
            if rows != _ALL:
                place = place[rows]
            if place.dtype == known_dtype(info.dtype) and info.nbytes <= self._most_moved:
                self._move(place.data_ptr(), views[info.name], info.nbytes)
            else:
                casts.append((info, place))
        tensors = hand_over([info for info, _ in casts], views)
        for info, place in casts:
            self._cast(place, tensors.pop(info.name))

    def _move(self, to: int, view: BufferView, nbytes: int) -> None:
        start = view.region.address + view.offset
        for done in range(0, nbytes, _MOVED_AT_ONCE):
            part = min(_MOVED_AT_ONCE, nbytes - done)
            ctypes.memmove(to + done, start + done, part)
            self.destinations.filled(part)

    def _cast(self, place: torch.Tensor, tensor: torch.Tensor) -> None:
        count, most = tensor.numel(), self._elements
        if count <= most:
            place.copy_(tensor)
            self.destinations.filled(place.nbytes)
            return
        to, flat = place.view(-1), tensor.view(-1)
        for start in range(0, count, most):
            part = to[start : start + most]
            part.copy_(flat[start : start + most])
            self.destinations.filled(part.nbytes)

    def close(self) -> None:
        """Ends all reads and gives their memory back; whoever asks after it gets QueueClosed."""
        self._closed = True  # whoever waits sees it, and lets go of the lock
        with self._lock:
            while self._under_way:
                batch = self._under_way.popleft()
                batch.views.clear()
                batch.release()
            self._pool.close()

    def __enter__(self) -> ParameterWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _windows(infos: Sequence[TensorInfo], window_bytes: int) -> list[list[_Piece]]:
    ordered = sorted(infos, key=FILE_ORDER)
    pieces = (piece for info in ordered for piece in _pieces(info, window_bytes))
    return list(grouped(pieces, window_bytes, size=lambda piece: piece.info.nbytes))


def _pieces(info: TensorInfo, most_bytes: int) -> Iterator[_Piece]:
    """A tensor, by rows where it is larger than a window and has some."""
    count = info.shape[0] if info.shape else 1
    if info.nbytes <= most_bytes or count == 1:
        yield _Piece(info, info.name, _ALL)
        return
    step = max(most_bytes // (info.nbytes // count), 1)
    for first in range(0, count, step):
        end = min(first + step, count)
        rows = rows_of(info, first, end)
        yield _Piece(
            rows._replace(name=f"{info.name}[{first}:{end}]"), info.name, slice(first, end)
        )
