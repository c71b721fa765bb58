"""Copies tensors into memory that exists already, in the order of the files.

    windows, in file order    window     window      window     window
                              [copied]   [posted]    [posted]   [over the limit]
                                 `-- its memory is reused by the next one

The reads are one sequential stream, and their memory does not grow with the model. Not responsible
for the memory that is written to, nor for threads that wait for a tensor.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from gdsload._native.copies import Copier
from gdsload._native.memory import Pool, Region
from gdsload.backends.base import Memory
from gdsload.checkpoint import TensorInfo
from gdsload.dtypes import known_dtype
from gdsload.errors import GdsloadError
from gdsload.loading.accounting import count_pages
from gdsload.loading.batch import Batch, release_all
from gdsload.loading.claims import Claim
from gdsload.loading.session import Session
from gdsload.loading.torch_memory import capture_relaxed
from gdsload.loading.whole_tensors import post
from gdsload.memory.host_buffers import BufferView, current_pool
from gdsload.planning.read_plan import FILE_ORDER, ReadPlan, grouped, ranges_of
from gdsload.planning.tensor_slices import PartName, rows_of
from gdsload.system.torch_thread import copying

if TYPE_CHECKING:
    import torch

# The size of one window, and the limit for all windows in flight. With half of it a cast begins to
# wait for storage; with twice as much, page faults of fresh memory cost more than the reads.
WINDOW_BYTES = 32 << 20
AHEAD_BYTES = 128 << 20
NO_WAITING = "copies do not wait for the storage"  # filling the page cache would only cost time


class CopyPart(NamedTuple):
    """Bytes of a file, described as a tensor, and where they are copied to.

    Attributes:
        info: The tensor that is read; its name differs from those of other parts.
        key: The tensor that is written to.
        at: The index of the part of that tensor.
        index: If not None: the index, a tuple, of the part of the read tensor that is copied.
    """

    info: TensorInfo
    key: str
    at: tuple[Any, ...] = ()
    index: Any = None


class Copy(NamedTuple):
    """A part as the copier takes it: addresses, the length of the target, and whether the source is
    bfloat16 and the target float32."""

    target: int
    source: int
    nbytes: int
    widens: bool


class _WindowBatch(Batch):
    """A window in host memory that is reused by later windows."""

    def __init__(
        self,
        session: Session,
        plan: ReadPlan,
        views: dict[str, BufferView],
        claims: dict[str, Claim],
        pool: Pool,
    ) -> None:
        self._pool = pool
        super().__init__(session, plan, views, claims)

    def _take_memory(self) -> list[Memory]:
        if current_pool() is not None:  # the host pool stores the bytes for later loads
            return super()._take_memory()
        return self._in_buffers(self._host_buffers(self._pool))


class WindowWriter:
    """Writes tensors window by window. Must be closed. One thread at a time may use it.

    Attributes:
        window_of: The number of the window with the last part of each key.
        copied: The number of windows that were copied completely.
        copying: Whether a copy is under way, or was interrupted by an error.
        writing: Whether this copy has begun to write to the tensors.
    """

    def __init__(
        self,
        session: Session,
        parts: Sequence[CopyPart],
        part_of: Callable[[str], torch.Tensor],
        *,
        fresh: Region | None = None,
    ) -> None:
        """Reads nothing before `copy_next`.

        Args:
            session: Reads to its device, from where the tensors are copied.
            parts: What to read and where to copy it.
            part_of: Returns the tensor of a key.
            fresh: Memory that nobody has touched, in which tensors may lie.
        """
        import torch

        self.session = session
        self.waited_seconds = self._copied_seconds = 0.0
        self.taken_bytes = 0
        # A tensor that is split is not compared at the edges of its parts.
        split_bytes = WINDOW_BYTES if session.verifier is None else sys.maxsize
        self.windows = _windows_of(parts, split_bytes)
        self.window_of = {
            part.key: number for number, window in enumerate(self.windows) for part in window
        }
        self.copied = 0
        self.copying = self.writing = False
        self._part_of = part_of
        self._fresh = fresh
        self._copier = Copier(torch.get_num_threads())
        self._pool = Pool(AHEAD_BYTES + 2 * WINDOW_BYTES)
        self._in_flight: deque[tuple[Batch, list[CopyPart]]] = deque()

    def _advance(self) -> None:
        """Posts windows up to the limit, but at least one."""
        while (number := self.copied + len(self._in_flight)) < len(self.windows):
            window = self.windows[number]
            # Without prefetched and mapped bytes.
            held_bytes = sum(batch.plan.read_bytes for batch, _ in self._in_flight)
            held_bytes += sum(part.info.nbytes for part in window)
            if self._in_flight and held_bytes > AHEAD_BYTES:
                return
            self._in_flight.append((self._post(window), window))

    def _post(self, window: list[CopyPart]) -> Batch:
        infos = [part.info for part in window]
        if self.session.device != "cpu":
            return post(self.session, infos)
        waits = self.waited_seconds > self._copied_seconds
        found = self.session.arrange(ranges_of(infos), past_cache="" if waits else NO_WAITING)
        return _WindowBatch(self.session, *found, self._pool)

    def copy_next(
        self,
        advance: Callable[[int], None] | None = None,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        """Waits for the next window, copies it, and posts others.

        Args:
            advance: As for `Batch.wait`.
            watch: As for `Batch.wait`.

        Raises:
            GdsloadError: A read failed, or a copy was interrupted before.
        """
        if self.copying:
            # Tensors of the window have released their bytes: it cannot be copied again.
            source = self.session.checkpoint.source
            raise GdsloadError(f"{source}: copying to parameters was interrupted by an error")
        if not self._in_flight:  # the first one, or posting failed before
            self._advance()
        batch, window = self._in_flight[0]
        start = time.monotonic()
        batch.wait(advance, watch, [part.info for part in window])
        arrived = time.monotonic()
        self.waited_seconds += arrived - start
        self.copying = True
        self._write(window, batch)
        self._copied_seconds += time.monotonic() - arrived
        self._release_first()
        self.taken_bytes += sum(part.info.nbytes for part in window)
        self.copied += 1
        self.copying = self.writing = False
        self._advance()

    def _write(self, window: Sequence[CopyPart], batch: Batch) -> None:
        copies: list[Copy] = []
        copied: list[tuple[BufferView, int]] = []
        others = []
        for part in window:
            target = self._part_of(part.key)
            if part.at:
                target = target[part.at]
            view = batch.views.get(part.info.name)
            copy = None if view is None else self._copy_of(part, target, view)
            shares = self._shares_twin(part, copy)
            if copy is None or view is None:
                others.append((part, target))
                copy = self._touch_of(target)
            else:
                copied.append((view, part.info.nbytes))
            if copy is not None and not shares:
                copies.append(copy)
        region = None if self._fresh is None else self._fresh.handle()
        self.writing = bool(copies)
        count_pages(self.session.report, *self._copier.copy(copies, region))
        for view, nbytes in copied:
            view.free_pages(nbytes)  # of a prefetch; windows keep their memory
        # Compares what is on a device.
        tensors = batch.tensors_of([part.info for part, _ in others])
        self.writing = True
        for part, target in others:
            tensor = tensors.pop(part.info.name)
            with capture_relaxed("cpu" if target.is_cpu else str(target.device)), copying():
                target.copy_(tensor if part.index is None else tensor[part.index])

    def _shares_twin(self, part: CopyPart, copy: Copy | None) -> bool:
        """Whether a tied tensor already has the bytes that `copy` would write, so that this part
        may share its memory. If it no longer has them, the tensor gets memory of its own."""
        return False

    def _copy_of(self, part: CopyPart, target: torch.Tensor, view: BufferView) -> Copy | None:
        """A part as the copier takes it; None if it is for torch."""
        if (
            self.session.device != "cpu"
            or part.index is not None
            or not target.is_cpu
            or not target.is_contiguous()
            or target.is_conj()
            or target.is_neg()
        ):
            return None
        source = view.region.address + view.offset
        if target.dtype == known_dtype(part.info.dtype):
            return Copy(target.data_ptr(), source, part.info.nbytes, False)
        widens = part.info.dtype == "BF16" and target.dtype == known_dtype("F32")
        if not widens or source % 2 or target.data_ptr() % 4:
            return None
        return Copy(target.data_ptr(), source, 2 * part.info.nbytes, True)

    def _touch_of(self, target: torch.Tensor) -> Copy | None:
        """Fresh memory to be touched before torch writes to it; None if it is not fresh."""
        if self._fresh is None or not target.is_contiguous():
            return None
        return Copy(target.data_ptr(), 0, target.nbytes, False)

    def _release_first(self) -> None:
        batch, _ = self._in_flight.popleft()
        batch.views.clear()
        batch.release()

    def close(self) -> None:
        """Ends all reads and releases their memory. May be called again."""
        batches = [batch for batch, _ in self._in_flight]
        self._in_flight.clear()
        try:
            release_all(batches)
        finally:
            for batch in batches:
                batch.views.clear()
            self._pool.close()


def _windows_of(parts: Sequence[CopyPart], split_bytes: int) -> list[list[CopyPart]]:
    ordered = sorted(parts, key=lambda part: FILE_ORDER(part.info))
    rows = (row for part in ordered for row in _split(part, split_bytes))
    return list(grouped(rows, WINDOW_BYTES, size=lambda part: part.info.nbytes))


def _split(part: CopyPart, limit_bytes: int) -> Iterator[CopyPart]:
    """A part; by rows, and rows of these, if it is larger than a window."""
    info = part.info
    count = info.shape[0] if info.shape else 0
    row_bytes = info.nbytes // count if count else 0  # 0 also of F4: two values in one byte
    first, *inner = part.index or (slice(None),)
    if info.nbytes <= limit_bytes or not row_bytes or not isinstance(first, slice):
        yield part
        return
    rows, index = range(count)[first], tuple(inner) or None
    if row_bytes > limit_bytes and len(info.shape) > 1:
        for number, row in enumerate(rows):
            name = PartName(info.name, f"[{row}]")
            one = rows_of(info, row, row + 1)._replace(name=name, shape=info.shape[1:])
            yield from _split(CopyPart(one, part.key, (*part.at, number), index), limit_bytes)
        return
    if part.index is not None:
        index = (slice(None, None, rows.step), *inner)
    chunk = max(limit_bytes // row_bytes - 1, 0) // rows.step + 1
    for number in range(0, len(rows), chunk):
        some = rows[number : number + chunk]
        name = PartName(info.name, f"[{some[0]}:{some[-1] + 1}]")
        one = rows_of(info, some[0], some[-1] + 1)._replace(name=name)
        at = slice(number, number + len(some))
        yield CopyPart(one, part.key, (*part.at, at), index)
