"""Tensors that are read ahead of the consumer, in the order in which it will ask for them.

    slices, in the expected order          kept     window    window    window   window
      -> windows of `WINDOW_BYTES`       [posted] [taken]   [posted]  [posted] [over the limit]
      -> read windows, posted ahead                  |
      -> take(slice), from any thread                `-- reused by the next window when all is taken

A read window is one request of the session. All kept slices form one window: their memory becomes
the model's, and each is handed out as soon as it has arrived. A slice of a window that is not
posted yet makes the queue post it at once, and a slice that nobody expected gets a window of its
own, so no order of calls can block. Not responsible for the order itself (`load_plan`).
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdsload.backends.base import Memory
from gdsload.checkpoint import TensorInfo
from gdsload.errors import CheckpointError, GdsloadError, IntegrityError
from gdsload.loading import window_writer
from gdsload.loading.batch import Batch, assembled
from gdsload.loading.claims import Claim
from gdsload.loading.device_batch import DeviceBatch, compare
from gdsload.loading.session import Session
from gdsload.memory.host_buffers import BufferView
from gdsload.memory.tensors import make_tensors
from gdsload.planning.read_plan import ReadPlan
from gdsload.planning.tensor_slices import TensorSlice, part_ranges
from gdsload.system import cancellation
from gdsload.system.lifecycle import fork_safe_lock

if TYPE_CHECKING:
    import torch

_HANDED_OVER_AT_ONCE = 256  # tensors


class QueueClosed(GdsloadError, RuntimeError):
    """A tensor was requested after the load had ended, by an error or regularly."""


class ReadWindow(Batch):
    """A batch whose slices are taken one by one: each as soon as its own bytes have arrived, or,
    with `whole`, all bytes that the window reads."""

    def __init__(
        self,
        session: Session,
        plan: ReadPlan,
        views: dict[str, BufferView],
        claims: dict[str, Claim],
        slices: Sequence[TensorSlice],
        *,
        whole: bool,
    ) -> None:
        self.left = len(slices)
        self._whole = whole
        self.arrived = not plan.transfers
        self._infos = [part for tensor_slice in slices for part in tensor_slice.parts]
        self._number_of = {info.name: number for number, info in enumerate(self._infos)}
        self._made: dict[str, torch.Tensor] = {}
        self._compared: set[str] = set()  # parts that are equal to their checksums
        super().__init__(session, plan, views, claims, slices=slices)

    def poll(self, tensor_slice: TensorSlice) -> None:
        """Updates which bytes have arrived: all that the window reads, and what prefetches read of
        a slice. Raises as `Batch.wait` does, and again with each later call."""
        for part in tensor_slice.parts:
            self.settle(part.name)
        if self.arrived:
            return
        progress = self._note_progress()
        self._require_progress(progress)
        if self.complete:
            self._finish_reads()
        elif progress is not None:
            self._require_bytes(progress)

    def _finish_reads(self) -> None:
        """Releases the request, and returns the pages between the parts that were read.

        At once: memory is touched in units larger than a page, so the gaps hold pages that are
        not needed. Bytes are compared before that: a host pool keeps them.
        """
        self._compare([info for info in self._infos if info.name in self.plan.locations])
        self._verified = True
        regions = [entry.what.region for entry in self._memory if isinstance(entry.what, Memory)]
        self._end_request()
        self.arrived = True
        ends = [0] * len(regions)
        gaps = []
        for transfer in sorted(self.plan.transfers, key=lambda t: (t.target, t.target_offset)):
            number, start = transfer.target, transfer.target_offset
            gaps.append((number, ends[number], start))
            ends[number] = max(ends[number], start + transfer.length)
        gaps += [(number, end, regions[number].length) for number, end in enumerate(ends)]
        for number, start, end in gaps:
            if start < end:
                BufferView(regions[number], start).free_pages(end - start)

    def has(self, tensor_slice: TensorSlice) -> bool:
        """Whether a slice can be taken."""
        # `arrived` means the reads of the window: a prefetch may still be reading the slice.
        return (self.arrived or not self._whole) and all(
            part.name in self._made or self._has(part) for part in tensor_slice.parts
        )

    def _has(self, info: TensorInfo) -> bool:
        if not self.is_there(info.name):  # a prefetch is still reading it
            return False
        location = self.plan.locations.get(info.name)
        return location is None or self.has_arrived(location.first, location.last)

    def await_slice(self, tensor_slice: TensorSlice, seconds: float) -> None:
        """Waits, without the GIL, until a slice can perhaps be taken; at most `seconds`."""
        for part in tensor_slice.parts:
            claim = self.claims.get(part.name)
            if claim is not None:
                claim.wait_for(seconds)
                return
        locations = self.plan.locations
        if self.session.checkpoint.closed:
            return
        spans = [locations[part.name] for part in tensor_slice.parts if part.name in locations]
        first = min((location.first for location in spans), default=0)
        last = max((location.last for location in spans), default=-1)
        if self._whole:
            first, last = 0, len(self.plan.transfers) - 1
        if last >= first:
            self.wait_for(first, last, seconds)

    def give(self, tensor_slice: TensorSlice) -> list[torch.Tensor]:
        """The tensors of a slice's parts, once. Each owns its memory."""
        for part in tensor_slice.parts:
            if part.name not in self._made:
                self._hand_over(self._number_of[part.name])
        given = [self._made.pop(part.name) for part in tensor_slice.parts]
        self.left -= 1
        return given

    def _hand_over(self, number: int) -> None:
        """Makes tensors of this part and of those after it that have arrived as well."""
        infos: list[TensorInfo] = []
        all_arrived = self.arrived and not self.claims
        for info in self._infos[number : number + _HANDED_OVER_AT_ONCE]:
            taken_before = info.nbytes and info.name not in self.views
            if info.name in self._made or taken_before or not (all_arrived or self._has(info)):
                break
            infos.append(info)
        if not infos:
            name = self._infos[number].name
            raise GdsloadError(f"tensor {name!r} was lost: its hand-over was interrupted")
        for info in infos:
            self.settle(info.name)
        self._compare(infos)
        # Removed first: if this is interrupted, tensors that were made release their bytes.
        views = {info.name: self.views.pop(info.name) for info in infos if info.nbytes}
        try:
            self._made.update(make_tensors(infos, views))
        except CheckpointError:  # before any tensor was made
            self.views.update(views)
            raise

    def _compare(self, infos: Sequence[TensorInfo]) -> None:
        """Compares parts that have arrived with their checksums. Raises IntegrityError."""
        verifier = self.session.verifier
        if verifier is None:
            return
        for info in infos:
            if info.name not in self._compared:
                self.session.report.unverified_bytes += info.nbytes
                for block in verifier.blocks_of(info):
                    verifier.check_in_memory(block, info, self.views[info.name])
                    self.session.report.verified_bytes += block.nbytes
                    self.session.report.unverified_bytes -= block.nbytes
                self._compared.add(info.name)

    def end(self) -> None:
        """Releases the request and all tensors that were not taken."""
        self._made.clear()
        self.views.clear()
        self.release()


class DeviceReadWindow(DeviceBatch, ReadWindow):
    """A read window in memory of the session's device.

    Kept tensors are read to their final memory. Others are read to memory that returns to torch's
    allocator as soon as transformers drops them; torch casts and converts them on the device.
    Tensors that a prefetch read to the device are used where they are.
    """

    _difference: IntegrityError | None = None

    def _finish_reads(self) -> None:
        self._end_request()
        self.arrived = True

    def give(self, tensor_slice: TensorSlice) -> list[torch.Tensor]:
        """The tensor of a slice, once: its parts are adjacent already."""
        if self._difference is not None:
            raise copy(self._difference)
        for part in tensor_slice.parts:
            self.settle(part.name)
        given = [*self._tensors.give([tensor_slice], self.views, self.is_there).values()]
        try:
            compare(self.session, tensor_slice.parts, given[0])
        except IntegrityError as error:
            self._difference = error
            raise
        self.left -= 1
        return given

    def end(self) -> None:
        """Releases the request and all tensors that were not taken."""
        super().end()
        # Not cleared: a request with copies in flight holds the dict, and torch's allocator must
        # not reuse the memory before they have ended.
        self._tensors.tensors = {}


@dataclass(slots=True, eq=False)
class _Window:
    """Slices of one read window, and its reads once they are posted."""

    slices: list[TensorSlice]
    kept: bool
    ahead_bytes: int = 0  # of kept slices 0: the model bounds them
    reads: ReadWindow | None = None


class ReadaheadQueue:
    """Hands out slices to any number of threads, and reads some windows ahead. Must be closed."""

    def __init__(
        self,
        session: Session,
        slices: Sequence[TensorSlice] = (),
        *,
        kept: Container[str] = (),
        past_cache: str = "",
    ) -> None:
        """Reads nothing before `start`.

        Args:
            session: Reads to its device. Closed by the caller, after the queue.
            slices: In the order in which they will be requested.
            kept: Keys of the slices whose memory becomes the model's. They do not count as ahead.
            past_cache: As for `Session.arrange`.
        """
        self.session = session
        self.waited_seconds = 0.0  # sum over all threads
        self.taken_tensors = self.taken_bytes = 0
        self._past_cache = past_cache
        self._lock = fork_safe_lock(self)
        self._closed = False
        self._cancellation = cancellation.current()  # other threads take the slices
        unique = {tensor_slice.key: tensor_slice for tensor_slice in slices}.values()
        self._planned = _windows_of(unique, kept)
        self._posted: list[_Window] = []  # not all of it is taken
        self._window_of = {one.key: window for window in self._planned for one in window.slices}

    def start(self) -> None:
        """Posts the first windows. Raises LoadCancelled."""
        with self._lock:
            self._require_open()
            self._advance()

    def _advance(self) -> None:
        """Posts windows up to the limit, but at least one."""
        held = sum(window.ahead_bytes for window in self._posted)
        while self._planned:
            held += self._planned[0].ahead_bytes
            if self._posted and held > window_writer.AHEAD_BYTES:
                return
            self._post(self._planned[0])

    def _post(self, window: _Window) -> ReadWindow:
        kind = ReadWindow if self.session.device == "cpu" else DeviceReadWindow
        # Also the window of all kept slices is read in this order: the first wanted come first.
        found = self.session.arrange(
            part_ranges(window.slices),
            window_bytes=window_writer.WINDOW_BYTES,
            past_cache=self._past_cache,
        )
        window.reads = kind(self.session, *found, window.slices, whole=not window.kept)
        if window in self._planned:
            self._planned.remove(window)
        self._posted.append(window)
        return window.reads

    def take(self, tensor_slice: TensorSlice) -> torch.Tensor:
        """Waits for a slice and returns its tensor, which owns its memory.

        Raises:
            ReadError: Reading its window failed. Every later call for it fails in the same way.
            LoadCancelled: The load was cancelled.
            QueueClosed: The load ended meanwhile.
        """
        expected: _Window | None = None
        window: _Window | None = None
        waited = 0.0
        try:
            while True:
                with self._lock:
                    self._require_open()
                    if window is None:
                        expected = self._window_of.pop(tensor_slice.key, None)
                        window = expected or _Window([tensor_slice], kept=True)
                    reads = window.reads or self._post(window)
                    if (parts := self._given(reads, tensor_slice)) is not None:
                        self.waited_seconds += waited
                        break
                start = time.monotonic()
                reads.await_slice(tensor_slice, cancellation.WAKE_SECONDS)
                waited += time.monotonic() - start
        except BaseException:
            with self._lock:
                if expected is not None:  # the next call for it gets the same window and error
                    self._window_of[tensor_slice.key] = expected
                elif window is not None:
                    self._end(window)
            raise
        if reads.left == 0:
            with self._lock:
                if self._end(window):
                    self._advance()
        return assembled(tensor_slice, parts)

    def _given(self, reads: ReadWindow, tensor_slice: TensorSlice) -> list[torch.Tensor] | None:
        """The parts of a slice; None if not all have arrived. Called with the lock held."""
        if not reads.has(tensor_slice):
            reads.poll(tensor_slice)
            if not reads.has(tensor_slice):
                return None
        self.taken_tensors += 1
        self.taken_bytes += tensor_slice.nbytes
        return reads.give(tensor_slice)

    def _end(self, window: _Window) -> bool:
        """Releases a posted window. False if another thread was faster, or the queue is closed."""
        if window.reads is None or window not in self._posted:
            return False
        self._posted.remove(window)
        window.reads.end()
        return True

    def _require_open(self) -> None:
        self._cancellation.check()
        if self._closed:
            raise QueueClosed(f"{self.session.checkpoint.source}: this load has ended")

    def finish(self) -> None:
        """Called after the last tensor was taken, before `close`. Nothing is left to do here."""

    def close(self) -> None:
        """Ends all reads and releases their memory; waiting threads get QueueClosed."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            posted, self._posted = self._posted, []
            with ExitStack() as stack:  # all of them, also if one raises
                for window in posted:
                    if window.reads is not None:
                        stack.callback(window.reads.end)

    def __enter__(self) -> ReadaheadQueue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _windows_of(slices: Iterable[TensorSlice], kept: Container[str]) -> list[_Window]:
    """Windows in the order of their first slices; all kept slices are in one."""
    windows: list[_Window] = []
    current: dict[bool, _Window] = {}  # by whether it is kept
    for one in slices:
        keep = one.key in kept
        window = current.get(keep)
        most_bytes = window_writer.WINDOW_BYTES
        if window is None or (not keep and window.ahead_bytes + one.nbytes > most_bytes):
            window = current[keep] = _Window([], keep)
            windows.append(window)
        window.slices.append(one)
        window.ahead_bytes += 0 if keep else one.nbytes
    return windows
