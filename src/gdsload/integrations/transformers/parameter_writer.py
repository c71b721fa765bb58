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
import sys
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

# Tensors up to this size that are not cast need no torch, which copies them with one thread too.
_MOVED_BYTES = 64 << 10
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
        # A tensor that is split is not compared at the edges of its parts.
        split_bytes = window_bytes if session.verifier is None else sys.maxsize
        self._planned = deque(_windows_of(infos, window_bytes, split_bytes))
        # The number of the window with the last rows of each tensor.
        self._window_of = {
            rows.name: number for number, window in enumerate(self._planned) for rows in window
        }
        self._pool = Pool(ahead_bytes + 2 * window_bytes)
        self._in_flight: deque[tuple[_WindowBatch, list[_Rows]]] = deque()
        self._copied = 0  # windows
        self._lock = fork_safe_lock(self)
        self._closed = False
        self._copying = False  # stays True if a copy was interrupted

    def start(self) -> None:
        """Posts the first windows."""
        with self._lock:
            self._advance()

    def _advance(self) -> None:
        while self._planned:
            window = self._planned[0]
            # Without prefetched and mapped bytes.
            held_bytes = sum(batch.plan.read_bytes for batch, _ in self._in_flight)
            held_bytes += sum(rows.info.nbytes for rows in window)
            if self._in_flight and held_bytes > self._ahead_bytes:
                return
            runs = runs_of(whole(rows.info) for rows in window)
            plan, views = self.session.arrange(runs, window_bytes=self._window_bytes)
            self._in_flight.append((_WindowBatch(self.session, plan, views, self._pool), window))
            self._planned.popleft()

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
        batch, window = self._in_flight[0]
        start = time.monotonic()
        batch.wait(watch=self._require_open, parts=[rows.info for rows in window])
        self.waited_seconds += time.monotonic() - start
        self._copying = True
        self._write(window, batch.views)
        self._release_first()
        self.taken_bytes += sum(rows.info.nbytes for rows in window)
        self._copied += 1
        self._copying = False
        self._advance()

    def _write(self, window: Sequence[_Rows], views: Mapping[str, BufferView]) -> None:
        casts = []
        for info, name, rows in window:
            part = self.buffers.part_of(name)
            if rows != _ALL:
                part = part[rows]
            if part.dtype == known_dtype(info.dtype) and info.nbytes <= _MOVED_BYTES:
                view = views[info.name]
                start = view.region.address + view.offset
                ctypes.memmove(part.data_ptr(), start, info.nbytes)
            else:
                casts.append((info, part))
        tensors = hand_over([info for info, _ in casts], views)
        for info, part in casts:
            part.copy_(tensors.pop(info.name))

    def _release_first(self) -> None:
        batch, _ = self._in_flight.popleft()
        batch.views.clear()
        batch.release()

    def close(self) -> None:
        """Ends all reads and releases their memory; waiting and later calls raise QueueClosed."""
        self._closed = True  # seen by waiting threads, which then release the lock
        with self._lock:
            while self._in_flight:
                self._release_first()
            self._pool.close()

    def __enter__(self) -> ParameterWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _windows_of(
    infos: Sequence[TensorInfo], window_bytes: int, split_bytes: int
) -> list[list[_Rows]]:
    rows = (part for info in sorted(infos, key=FILE_ORDER) for part in _split(info, split_bytes))
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
