"""Copies tensors into parameter buffers, in the order of the files.

    windows, in file order    window     window      window     window
                              [copied]   [posted]    [posted]   [over the limit]
                                 `-- its memory is reused by the next one

A thread that requests a tensor copies all windows up to the tensor's own. So the reads are one
sequential stream, their memory does not grow with the model, and no order of calls can block. Not
responsible for the memory of the parameters (`parameter_buffers`).
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
)
from gdsload.loading.batch import Batch
from gdsload.loading.session import Session
from gdsload.memory.host_buffers import BufferView, HostBuffers, current_pool, hand_over
from gdsload.planning.read_plan import FILE_ORDER, ReadPlan, grouped
from gdsload.planning.tensor_slices import rows_of, runs_of, whole
from gdsload.system.lifecycle import fork_safe_lock

if TYPE_CHECKING:
    import torch

# torch copies more elements than this with all its threads, which spin while they wait for each
# other. With few cores, the threads that populate memory need the cores more.
_ELEMENTS_ALONE = 32767
_ELEMENTS_TOGETHER = 16 << 20
_FEW_CORES = 4
# Tensors that are not cast need no torch; with many cores, larger ones profit from its threads.
_MOVED_AT_ONCE = 1 << 20
_ALL = slice(None)


class _Rows(NamedTuple):
    """A tensor (or some of its rows, as `info`), its name, and its rows in the parameter."""

    info: TensorInfo
    name: str
    rows: slice


class _WindowBatch(Batch):
    """A window in memory that is reused by later windows."""

    def __init__(
        self, session: Session, plan: ReadPlan, views: dict[str, BufferView], pool: Pool
    ) -> None:
        self._pool = pool
        super().__init__(session, plan, views)

    def _take_memory(self) -> list[Memory]:
        if current_pool() is not None:  # the host pool stores the bytes for later loads
            return super()._take_memory()
        buffers = HostBuffers(self.plan, self._pool)
        self.views.update(buffers.views(self.plan))
        return [Memory(DRAM, region.address, region.length, region) for region in buffers.regions]


class ParameterWriter:
    """Writes parameters. Any number of threads may take tensors; must be closed."""

    def __init__(
        self,
        session: Session,
        buffers: ParameterBuffers,
        infos: Sequence[TensorInfo] = (),
        *,
        window_bytes: int = WINDOW_BYTES,
        ahead_bytes: int = AHEAD_BYTES,
    ) -> None:
        """Reads nothing before `start`.

        Args:
            session: Reads the tensors to the host.
            buffers: The memory of the parameters.
            infos: The tensors, all of them part of `buffers`.
            window_bytes: Size of a window in bytes.
            ahead_bytes: Limit in bytes for the windows in flight. At least one is.
        """
        self.session = session
        self.buffers = buffers
        self.waited_seconds = 0.0
        self.taken_tensors = self.taken_bytes = 0
        self._window_bytes, self._ahead_bytes = window_bytes, ahead_bytes
        self._windows = _windows_of(infos, window_bytes)
        # The window with the last rows of each tensor.
        self._window_of = {
            rows.name: number for number, window in enumerate(self._windows) for rows in window
        }
        self._pool = Pool(ahead_bytes + 2 * window_bytes)
        self._in_flight: deque[_WindowBatch] = deque()
        self._held_bytes = 0  # in flight
        self._posted = self._copied = 0  # windows
        self._lock = fork_safe_lock(self)
        self._closed = False
        self._copying = False  # stays True if a copy was interrupted
        few = len(os.sched_getaffinity(0)) <= _FEW_CORES
        self._elements = _ELEMENTS_ALONE if few else _ELEMENTS_TOGETHER
        self._move_limit = window_bytes if few else _MOVED_AT_ONCE

    def start(self) -> None:
        """Posts the first windows."""
        with self._lock:
            self._advance()

    def _advance(self) -> None:
        while self._posted < len(self._windows):
            window = self._windows[self._posted]
            nbytes = sum(rows.info.nbytes for rows in window)
            if self._in_flight and self._held_bytes + nbytes > self._ahead_bytes:
                return
            runs = runs_of(whole(rows.info) for rows in window)
            plan, views = self.session.arrange(runs, window_bytes=self._window_bytes)
            self._in_flight.append(_WindowBatch(self.session, plan, views, self._pool))
            self._posted += 1
            self._held_bytes += plan.read_bytes  # without prefetched and mapped bytes

    def take(self, name: str, dtype: Any) -> torch.Tensor | None:
        """Waits for a tensor and returns its part of the parameter; None if it has none, or if the
        parameter has another dtype.

        Raises:
            ReadError: A read up to this tensor failed.
            QueueClosed: The load ended meanwhile.
        """
        if not self.buffers.expects(name, dtype):
            return None
        with self._lock:
            while self._copied <= self._window_of[name]:
                self._copy_next()
            part = self.buffers.give(name)
            if part is not None:
                self.taken_tensors += 1
            return part

    def _require_open(self) -> None:
        if self._closed:
            raise QueueClosed(f"{self.session.checkpoint.source}: this load has ended")

    def _copy_next(self) -> None:
        self._require_open()
        if self._copying:
            # Tensors of the window have released their bytes: it cannot be copied again.
            source = self.session.checkpoint.source
            raise GdsloadError(f"{source}: copying to parameters was interrupted by an error")
        if not self._in_flight:  # posting failed before
            self._advance()
        batch, window = self._in_flight[0], self._windows[self._copied]
        start = time.monotonic()
        batch.wait(watch=self._require_open)
        self.waited_seconds += time.monotonic() - start
        self._copying = True
        self._write(window, batch.views)
        self._in_flight.popleft()
        batch.views.clear()
        batch.release()
        self.taken_bytes += sum(rows.info.nbytes for rows in window)
        self._held_bytes -= batch.plan.read_bytes
        self._windows[self._copied] = []
        self._copied += 1
        self._copying = False
        self._advance()

    def _write(self, window: Sequence[_Rows], views: Mapping[str, BufferView]) -> None:
        casts = []
        for info, name, rows in window:
            part = self.buffers.part_of(name)
            if rows != _ALL:
                part = part[rows]
            if part.dtype == known_dtype(info.dtype) and info.nbytes <= self._move_limit:
                self._move(part.data_ptr(), views[info.name], info.nbytes)
            else:
                casts.append((info, part))
        tensors = hand_over([info for info, _ in casts], views)
        for info, part in casts:
            self._cast(part, tensors.pop(info.name))

    def _move(self, to: int, view: BufferView, nbytes: int) -> None:
        start = view.region.address + view.offset
        for done in range(0, nbytes, _MOVED_AT_ONCE):
            count = min(_MOVED_AT_ONCE, nbytes - done)
            ctypes.memmove(to + done, start + done, count)

    def _cast(self, part: torch.Tensor, tensor: torch.Tensor) -> None:
        if tensor.numel() <= self._elements:
            part.copy_(tensor)
            return
        # `part` is contiguous: a whole parameter, or rows of one expert.
        to, flat = part.view(-1), tensor.reshape(-1)
        for start in range(0, flat.numel(), self._elements):
            to[start : start + self._elements].copy_(flat[start : start + self._elements])

    def close(self) -> None:
        """Ends all reads and releases their memory; waiting and later calls raise QueueClosed."""
        self._closed = True  # seen by waiting threads, which then release the lock
        with self._lock:
            while self._in_flight:
                batch = self._in_flight.popleft()
                batch.views.clear()
                batch.release()
            self._pool.close()

    def __enter__(self) -> ParameterWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _windows_of(infos: Sequence[TensorInfo], window_bytes: int) -> list[list[_Rows]]:
    rows = (part for info in sorted(infos, key=FILE_ORDER) for part in _split(info, window_bytes))
    return list(grouped(rows, window_bytes, size=lambda part: part.info.nbytes))


def _split(info: TensorInfo, limit_bytes: int) -> Iterator[_Rows]:
    """A tensor; by rows if it is larger than a window."""
    count = info.shape[0] if info.shape else 1
    if info.nbytes <= limit_bytes or count == 1:
        yield _Rows(info, info.name, _ALL)
        return
    step = max(limit_bytes // (info.nbytes // count), 1)
    for first in range(0, count, step):
        end = min(first + step, count)
        rows = rows_of(info, first, end)
        yield _Rows(rows._replace(name=f"{info.name}[{first}:{end}]"), info.name, slice(first, end))
