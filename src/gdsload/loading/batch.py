"""A batch: byte ranges that are read by one request, from posting the reads to the last byte.

    session.arrange(ranges) ──► Batch ──► wait ──► tensors_of ──► release

The session decides what has to be read (`session`). A batch takes the memory, follows the request,
turns failures into errors, and takes over ranges that a prefetch is still reading.

    class              reads into                                  module
    `Batch`            host buffers, the host pool, or blocks of   this one
                       a device, without torch
    `_WindowBatch`     memory that the next windows use again      `window_writer`
    `DeviceBatch`      tensors of a device                         `device_batch`
    `BlockBatch`       as `Batch`, for a load to a device          `device_batch`
    `TargetBatch`      tensors of the caller, on a device          `into`
    `PrefetchBatch`    as `Batch`, for a load that comes later     `readahead.prefetch_batch`
    `PageCacheWarmup`  nothing: only the page cache is filled      `readahead.prefetch_batch`
    `ReadWindow`       as `Batch`, taken slice by slice            `transformers.readahead_queue`
    `DeviceReadWindow` as `DeviceBatch`, taken slice by slice      `transformers.readahead_queue`

The constructor posts the reads, so a subclass sets its attributes before it calls the one of
`Batch`. It may override `tensors_of`, `state` and `release`, and `_make_tensors`, `_take_memory`,
`_before_reads` and `_note_progress`.
"""

from __future__ import annotations

import errno
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, ClassVar

from gdsload._native.ranges import bytes_of
from gdsload.backends import Backend, Memory, Registration
from gdsload.backends.base import Failure, Progress
from gdsload.checkpoint import Checkpoint, TensorInfo
from gdsload.errors import FileChanged, GdsloadError, PlacementError, ReadError, prefixed_with
from gdsload.loading.accounting import record_backend, record_request
from gdsload.loading.claims import LOST, READ, READING, Claim
from gdsload.loading.read_errors import read_error, stall_error, tensor_at
from gdsload.loading.session import Session
from gdsload.loading.torch_memory import copied, making, taking
from gdsload.memory import DRAM, page_cache
from gdsload.memory.host_buffers import BufferView, HostBuffers, current_pool
from gdsload.memory.tensors import make_tensors
from gdsload.planning.read_plan import ByteRange, ReadPlan
from gdsload.system.available import filled
from gdsload.system.cancellation import WAKE_SECONDS, check
from gdsload.system.stall import StallWatch

if TYPE_CHECKING:
    import torch

    from gdsload._native.memory import Pool
    from gdsload.loading.integrity import ChecksumBlock
    from gdsload.memory.host_pool import PoolBuffers
    from gdsload.planning.tensor_slices import TensorSlice

# After these errors of a disk the kernel keeps pages that it could not read.
_BAD_DISK = frozenset({errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN, errno.EILSEQ})
# A block to compare, the transfers that read it (first and last), and the range that it is in.
_Check = tuple[int, int, "ChecksumBlock", "ByteRange | TensorInfo"]
_offset, _last = attrgetter("offset"), itemgetter(1)


def assembled(tensor_slice: TensorSlice, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensor of a slice, from the tensors of its parts, or from one of all parts."""
    import torch

    if len(parts) == 1:
        tensor = parts[0]
    else:
        nbytes = sum(part.nbytes for part in parts)
        with making(nbytes, parts[0], f"the slice {tensor_slice.key}"):
            tensor = torch.stack(list(parts))
    if tensor_slice.shape is not None:
        tensor = tensor.view(tensor_slice.shape)
    # A copy if the index drops something: a view would keep the rest alive.
    return tensor if tensor_slice.index is None else copied(tensor[tensor_slice.index])


def release_all(batches: Iterable[Batch]) -> None:
    """Releases batches: all of them, also if one raises, or Ctrl-C ends one."""
    with ExitStack() as stack:
        for batch in batches:
            stack.callback(batch.release)


class Batch:
    """Byte ranges that are being read: their memory, one request, and its result."""

    ahead: ClassVar[bool] = False  # True: the reads yield to those of a load

    def __init__(
        self,
        session: Session,
        plan: ReadPlan,
        views: dict[str, BufferView],
        claims: dict[str, Claim],
        *,
        slices: Sequence[TensorSlice] = (),
    ) -> None:
        """Posts the reads and returns without waiting for them.

        Args:
            session: The open session. Its checkpoint stays open until `release`.
            plan: The reads, from `Session.arrange`.
            views: Ranges that need no read, from `Session.arrange`. The batch adds its own.
            claims: Those of them that a prefetch reads, or has read, from `Session.arrange`.
            slices: The tensor slices of the ranges, for a batch that reads into tensors.
        """
        self.session = session
        self.plan = plan
        self.views = views
        self.claims = claims
        self._taken_over: list[ByteRange] = []  # that were claims
        self._make_tensors(slices)
        self._memory: list[Registration] = []
        # Tells the host pool, once, whether all bytes have arrived in the memory that it lent.
        self._end_intake: Callable[[Checkpoint | None], None] | None = None
        self._backend: Backend | None = None  # of the request
        self._request: Any = None
        self._arrived = bytearray(len(plan.transfers))  # 1: all bytes of the transfer are there
        self._failure: Failure | None = None  # the first one
        self._read_watch, self._claim_watch = StallWatch(), StallWatch()
        self._failed: set[int] = set()  # transfers
        self._unreadable: set[int] = set()  # shards
        self._idle_seconds = 0.0
        self._anew: list[Batch] = []  # they read what a prefetch had lost
        self._verified = session.verifier is None  # True: no byte differs from its checksum
        if plan.transfers:
            try:
                with session.report.phase("prepare"):
                    self._post(self._take_memory())
            except BaseException:
                self.release()
                raise

    def _make_tensors(self, slices: Sequence[TensorSlice]) -> None:
        """Makes the tensors that are read into, if they are made before the reads."""

    def _take_memory(self) -> list[Memory]:
        """Memory for each target of the plan; views of what is read to it are added to `views`.
        Raises PlacementError."""
        if self.session.device != "cpu":
            from gdsload.loading.device_blocks import in_blocks  # imports CUDA

            return in_blocks(self)
        pool = current_pool() if self.session.uses_pool else None
        intake = None if pool is None else pool.allocate(self.plan)
        self._end_intake = None if intake is None else intake.end
        return self._in_buffers(intake or self._host_buffers())

    def _host_buffers(self, pool: Pool | None = None) -> HostBuffers:
        """Memory for the targets of the plan, from `pool` first. Raises PlacementError."""
        with prefixed_with(self.session.checkpoint.source):
            return HostBuffers(self.plan, self.session.mapping_of, pool)

    def require_pool(self) -> None:
        """Raises PlacementError if the bytes are not read into the host pool."""
        if self.plan.transfers and self._end_intake is None:
            span = sum(target.length for target in self.plan.targets)
            raise PlacementError(
                f"{self.plan.read_bytes:,} bytes, which are spread over {span:,} bytes of files, do"
                " not fit into the host pool: it is too small, in use, or closed"
            )

    def _in_buffers(self, buffers: HostBuffers | PoolBuffers) -> list[Memory]:
        """The memory of these buffers; their views are added to those of the batch."""
        self.views.update(buffers.views())
        return [
            Memory(DRAM, start.region.address + start.offset, target.length, start.region)
            for target, start in zip(self.plan.targets, buffers.starts, strict=True)
        ]

    def _post(self, memory: list[Memory]) -> None:
        backend = self._backend = self.session.open()
        for entry in memory:
            self._memory.append(backend.register(entry))
        self.session.posted.add(self)
        request = backend.prepare(self.plan.transfers, self.session.files, self._memory)
        self._request = request
        if self.ahead:
            backend.yield_to_loads(request, True)
        self._before_reads()
        backend.post(request)
        # The engine may be another one since `prepare`.
        record_backend(self.session, backend)

    def _before_reads(self) -> None:
        """Called when all is ready, just before the reads are posted."""

    def has_arrived(self, first: int, last: int) -> bool:
        """Whether all bytes of these transfers are there."""
        return self._arrived.find(0, first, last + 1) < 0

    def state(self, first: int, last: int) -> str:
        """READING, READ or LOST for these transfers."""
        if self.has_arrived(first, last):
            return READ
        progress = self._note_progress()
        if self.has_arrived(first, last):
            return READ
        ended = progress is None or progress.finished
        lost = ended or any(first <= failed <= last for failed in self._failed)
        return LOST if lost else READING

    def wait_for(self, first: int, last: int, seconds: float) -> None:
        """Waits, without the GIL, until these transfers have ended, at most `seconds`."""
        # Another thread may release it at any time: then this returns at once.
        request, backend = self._request, self._backend
        if request is not None and backend is not None:
            backend.wait(request, seconds, first, last)

    def idle_seconds(self) -> float:
        """Seconds without a byte read, when the backend was last asked."""
        return self._idle_seconds

    def is_there(self, name: str) -> bool:
        """Whether a prefetch has read a range; True for ranges that no prefetch reads."""
        claim = self.claims.get(name)
        return claim is None or claim.state() == READ

    def settle(self, name: str) -> bool:
        """Takes a range over from its prefetch if its bytes are there. Does not wait.

        If the prefetch has lost ranges (it failed or was cancelled), their reads are posted anew.

        Returns:
            Whether the bytes are there; True for ranges that no prefetch reads.

        Raises:
            ReadError: The range was lost, and reading it anew failed; later calls raise it again.
            StallError: No byte was read for the session's `stall_seconds`.
        """
        claim = self.claims.get(name)
        if claim is None:
            return True
        state, anew = claim.state(), claim.batch in self._anew
        if state == READING:
            idle_seconds = claim.batch.idle_seconds()
            if self._claim_watch.stalled(idle_seconds, self.session.stall_seconds):
                context = f"in the {'load' if anew else 'prefetch'} that reads tensor {name!r}"
                where = claim.range[1:]
                raise stall_error(self.session.checkpoint, *where, idle_seconds, context)
            return False
        if state == LOST:
            if anew:
                claim.batch._require_progress(None)
            self._post_anew()
            return False
        del self.claims[name]
        self._taken_over.append(claim.range)
        if not anew:
            self.session.count_bytes("prefetched", claim.range.nbytes)
        elif claim.batch.complete:
            claim.batch.release()
        return True

    def _post_anew(self) -> None:
        """Posts the reads of all ranges that prefetches have lost. They stay claims: on a batch of
        their own."""
        lost = [
            name
            for name, claim in self.claims.items()
            if claim.batch not in self._anew and claim.state() == LOST
        ]
        for name in lost:  # their memory may be needed for them again
            self.views.pop(name, None)
            self.claims[name].free_pages()
            self.claims[name] = self.claims[name]._replace(view=None)
        plan = self.session.plan([self.claims[name].range for name in lost])
        batch = Batch(self.session, plan, {}, {})
        self._anew.append(batch)
        for name in lost:
            first, last = batch.plan.locations[name][2:]
            self.claims[name] = self.claims[name]._replace(batch=batch, first=first, last=last)
        self.views.update(batch.views)
        batch.views.clear()  # a tensor that is freed must free its memory

    @property
    def landed_bytes(self) -> int:
        """Bytes of transfers that have arrived."""
        transfers, arrived = self.plan.transfers, bytes(self._arrived)
        return sum(each.wanted for each, here in zip(transfers, arrived, strict=True) if here)

    @property
    def complete(self) -> bool:
        """Whether all transfers of the plan have arrived."""
        return self._failure is None and self._arrived.find(0) < 0

    def _note_progress(self) -> Progress | None:
        """Asks the backend what has settled. None after `release`.

        A backend reports a failure once. It is stored here, so that every later caller gets it too.
        """
        request, backend = self._request, self._backend
        if request is None or backend is None:
            return None
        progress = backend.check(request)
        self._idle_seconds = progress.idle_seconds
        self._failed.update(failure.transfer for failure in progress.failures)
        self._unreadable.update(
            self.plan.transfers[failure.transfer].shard
            for failure in progress.failures
            if failure.errno in _BAD_DISK
        )
        for number in progress.settled:
            if number not in self._failed:
                self._arrived[number] = 1
        if progress.failures and self._failure is None:
            self._failure = progress.failures[0]
        return progress

    def _require_progress(self, progress: Progress | None) -> None:
        """Raises ReadError if a transfer has failed, or if one will never be read."""
        if self._failure is not None:
            raise self._error(self._failure)
        if (progress is None or progress.finished) and not self.complete:
            source = self.session.checkpoint.source
            raise ReadError(
                f"{source}: the request ended with {self._arrived.count(0)} reads unfinished",
                path=source,
            )

    def wait(
        self,
        advance: Callable[[int], None] | None = None,
        watch: Callable[[], None] = lambda: None,
        parts: Sequence[ByteRange | TensorInfo] = (),
    ) -> None:
        """Waits until all bytes have arrived.

        Args:
            advance: Called with the number of bytes that have arrived since the last call; first
                with that of `parts` in memory, such as mapped ones.
            watch: Called ten times a second. An exception from it ends the wait.
            parts: The ranges of this batch. If the session has a verifier, those in host memory
                are compared while later ones are read.

        Raises:
            IntegrityError: Bytes differ from their checksum; later calls raise it again.
            ReadError: A read failed. The error names file, offset and tensor; later calls raise it
                again.
            StallError: No byte arrived for the session's `stall_seconds`.
            LoadCancelled: The load was cancelled.
        """
        phase = self.session.report.phase
        advance = advance or (lambda nbytes: None)
        claimed_bytes = sum(claim.range.nbytes for claim in self.claims.values())
        in_memory = bytes_of([*parts]) - self.plan.wanted_bytes - claimed_bytes
        if in_memory > 0:
            advance(in_memory)
        with phase("wait for the prefetch") if self.claims else nullcontext():
            self._await_claims(advance, watch)
        to_check = self._to_check(parts)
        ended = self._request is None or self.complete
        with nullcontext() if ended else phase("read"):
            while not ended and (progress := self._note_progress()) is not None:
                advance(sum(self.plan.transfers[number].wanted for number in progress.settled))
                self._require_progress(progress)
                if progress.finished:
                    break
                self._check_arrived(to_check, watch)
                self._require_bytes(progress)
                watch()
                check()
                first, last = to_check[0][:2] if to_check else (0, -1)
                self.wait_for(first, last, WAKE_SECONDS)
            self._require_progress(None)
            self._check_arrived(to_check, watch)
        self._verified |= bool(parts)

    def _await_claims(self, advance: Callable[[int], None], watch: Callable[[], None]) -> None:
        """Waits for what prefetches read, and takes it over. Errors are as those of `wait`."""
        for name, claim in list(self.claims.items()):
            while not self.settle(name):
                watch()
                check()
                self.claims[name].wait_for(WAKE_SECONDS)
            advance(claim.range.nbytes)

    def _to_check(self, parts: Sequence[ByteRange | TensorInfo]) -> deque[_Check]:
        """The blocks of these parts, and the transfers that read each, in the order of arrival."""
        verifier, transfers = self.session.verifier, self.plan.transfers
        checks: list[_Check] = []
        if verifier is None or self.session.device != "cpu":
            return deque()
        for part in parts:
            location = self.plan.locations.get(part.name)
            blocks = list(verifier.blocks_of(part))
            compared = sum(block.nbytes for block in blocks)
            self.session.report.unverified_bytes += part.nbytes - compared
            for block in blocks:
                first, last = 0, -1
                if location is not None:
                    low, high, end = location.first, location.last + 1, block.offset + block.nbytes
                    first = bisect_right(transfers, block.offset, low, high, key=_offset) - 1
                    last = bisect_left(transfers, end, low, high, key=_offset) - 1
                checks.append((first, last, block, part))
        return deque(sorted(checks, key=_last))

    def _check_arrived(self, checks: deque[_Check], watch: Callable[[], None]) -> None:
        """Compares the first blocks that have arrived, and removes them. Raises IntegrityError."""
        verifier = self.session.verifier
        while checks and verifier is not None:
            first, last, block, part = checks[0]
            if not self.has_arrived(first, last):
                return
            verifier.check_in_memory(block, part, self.views[part.name])
            self.session.report.verified_bytes += block.nbytes
            checks.popleft()
            watch()

    def tensors_of(self, infos: Sequence[TensorInfo]) -> dict[str, torch.Tensor]:
        """The tensors by name, after `wait`. Each owns its memory and is handed out once."""
        # The views go first: if this is interrupted, tensors that exist already free their bytes.
        views, self.views = self.views, {}
        with taking(bytes_of([*infos]), "cpu", "a copy of misaligned tensors"):
            return make_tensors(infos, views)

    def _error(self, failure: Failure) -> ReadError | FileChanged:
        return read_error(self.session.checkpoint, self.plan, failure)

    def _require_bytes(self, progress: Progress) -> None:
        """Raises StallError if the reads in flight have stalled."""
        idle_seconds = progress.idle_seconds
        stalled = self._read_watch.stalled(idle_seconds, self.session.stall_seconds)
        if stalled and not self.complete:
            transfer = self.plan.transfers[self._arrived.find(0)]
            where = transfer.shard, transfer.offset, transfer.wanted
            context = f"while {transfer.wanted} bytes at {transfer.offset} were read for tensor"
            context += f" {tensor_at(self.plan, transfer)!r}"
            if progress.device_busy:
                context += f": it was read, and {self.session.device} is busy with other work"
            raise stall_error(self.session.checkpoint, *where, idle_seconds, context)

    def release(self) -> None:
        """Ends all reads, finished or not. May be called again."""
        try:
            release_all(self._anew)
            self._free_prefetched()
        finally:
            self._end_request()

    def _free_prefetched(self) -> None:
        """Frees the pages of prefetched ranges that became no tensors: others that did may lie in
        the same memory."""
        views = self.views
        if not views:
            return
        for name, claim in self.claims.items():
            if views.pop(name, None) is not None:
                claim.free_pages()
        for name, _, _, nbytes in self._taken_over:
            if (view := views.pop(name, None)) is not None:
                view.free_pages(nbytes)

    def _forget_pages(self) -> None:
        """After a disk has failed, leaves no pages of its file that a later load could map."""
        shards, self._unreadable = self._unreadable, set()
        for shard in shards:
            opened = self.session.checkpoint.shards[shard]
            if opened.remote is None and not opened.closed:
                with suppress(GdsloadError, OSError):
                    page_cache.forget(opened.fd)

    def _end_request(self) -> None:
        """Ends the request, finished or not, and adds its counts to the report. Gives memory back,
        also if no request was made. May be called again."""
        session, backend = self.session, self._backend
        request, self._request = self._request, None
        released = False
        try:
            if request is not None and backend is not None:
                backend.release(request)
                session.posted.discard(self)
                record_request(session, backend, self.plan, request, landed_bytes=self.landed_bytes)
            released = True
        finally:
            session.posted.discard(self)
            memory, self._memory = self._memory, []
            targets = [entry.what for entry in memory if isinstance(entry.what, Memory)]
            filled(each.region for each in targets if each.kind == DRAM and each.region)
            for registration in memory:
                if backend is not None:
                    backend.deregister(registration)
            end_intake, self._end_intake = self._end_intake, None
            if end_intake is not None:
                whole = False
                with suppress(GdsloadError):
                    session.checkpoint.verify_unchanged()
                    whole = released and self.complete and self._verified
                end_intake(session.checkpoint if whole else None)
            self._forget_pages()
