"""A load, step by step: choose roads, plan, read, check, hand out.

A `Session` holds what the reads of one checkpoint share: the backend, the registered files, the
mappings of warm shards. A `Batch` is some pieces on their way. `load_file`, `stream` and
`safe_open` are built from these two; none of them knows an engine.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from gdsload._native.memory import Region
from gdsload.backends import Backend, Memory, Registration
from gdsload.backends.base import DRAM, Failure, Progress
from gdsload.checkpoint import Checkpoint, TensorInfo
from gdsload.errors import ReadError, StallError
from gdsload.loading.accounting import (
    describe,
    note,
    open_backend,
    read_error,
    silence_error,
    stall_error,
)
from gdsload.loading.claims import COMING, LOST, Claim, Offer, claim_pieces
from gdsload.loading.io_mode import CACHES, ShardAccess
from gdsload.memory import host_pool
from gdsload.memory.host_buffers import BufferView, HostBuffers, hand_over, map_shard
from gdsload.memory.host_pool import PoolBuffers, Segment
from gdsload.planning.read_plan import ByteRange, ReadPlan, Transfer, plan_reads
from gdsload.report import LoadReport
from gdsload.system import quiesce
from gdsload.system.gc_control import collector_paused
from gdsload.system.lifecycle import fork_safe_lock

if TYPE_CHECKING:
    import torch

__all__ = ["CACHES", "STALL_SECONDS", "Batch", "Session"]

# Without a single byte for this long, storage is taken for dead. Longer than an NFS server's
# restart usually takes.
STALL_SECONDS = 60.0
_LOOK_SECONDS = 0.1  # how long Ctrl-C may have to wait


class Session:
    """The open roads between one checkpoint and memory. Close it when the last batch is done."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        report: LoadReport,
        *,
        device: str = "cpu",
        backend: str = "auto",
        cache: str = "auto",
        options: Mapping[str, Any] | None = None,
        stall_seconds: float = STALL_SECONDS,
        adopt: bool = True,
        maps: bool = True,
        expected_bytes: int = 0,
    ) -> None:
        """Raises ValueError for an unknown `cache`; a backend is opened with the first read.

        `expected_bytes` is what it will be asked for in all, 0 for what the report wants: some
        backends are not worth opening for little. What a prefetch has of the same files is taken
        from it, unless `adopt` is False; what is warm is mapped, unless `maps` is False.
        """
        self._roads = ShardAccess(checkpoint, report, cache)
        self._opening = fork_safe_lock(self, "_opening")
        self.checkpoint = checkpoint
        self.report = report
        self.device = device
        self.cache = cache
        self.stall_seconds = stall_seconds
        self._wanted = backend
        self._expected_bytes = expected_bytes
        self.options = dict(options or {})
        self.backend: Backend | None = None  # while it is open
        self._mapped: dict[int, Region] = {}
        self._adopts = adopt and cache != "mapped"
        self._maps = maps
        self._pooled: dict[Segment, Region] = {}
        self._claims: dict[str, Claim] = {}
        self._givers: list[Offer] = []
        # Batches whose reads may still be under way. One that is collected is no longer counted.
        self.posted: weakref.WeakSet[Batch] = weakref.WeakSet()
        quiesce.register(self)
        if backend != "auto" or self.options:
            try:
                self.open()  # a backend asked for by name must work, also when all is warm
            except BaseException:
                self.close()
                raise

    def open(self) -> Backend:
        """The backend, opened by the first call. Raises BackendUnavailable."""
        with self._opening:
            if self.backend is None:
                expected = self._expected_bytes or self.report.wanted_bytes
                self.backend = open_backend(
                    self.device, self._wanted, self.options, self.report, expected
                )
                describe(self.report, self.backend)
            return self.backend

    @collector_paused()
    def sort(self, pieces: Sequence[ByteRange]) -> tuple[dict[str, BufferView], list[ByteRange]]:
        """Pieces that need no read of ours, with a prefetch or in the mapping of a warm shard; and
        those to be read. A prefetch's may still be on their way to their spots: the batch that gets
        them says when they are there (`Batch.settled`)."""
        views = self._adopt(pieces)
        if self.device == "cpu" or self._adopts:
            views.update(self._kept([piece for piece in pieces if piece.name not in views]))
        if self.device != "cpu":  # what is mapped is read through the ring, which is quicker
            return views, [piece for piece in pieces if piece.name not in views]
        by_shard: dict[int, list[ByteRange]] = defaultdict(list)
        for piece in pieces:
            if piece.name not in views:
                by_shard[piece.shard].append(piece)
        cold: set[int] = set()
        mapped_bytes = 0
        for shard, members in by_shard.items():
            if not self._maps or not self._roads.mapped(shard, members):
                cold.add(shard)
                continue
            if self.cache == "mapped":
                self._roads.read_ahead(shard, members)
            region = self._mapping(shard)
            for piece in members:
                views[piece.name] = BufferView(region, piece.offset)
                mapped_bytes += piece.nbytes
        if mapped_bytes:
            self.report.paths["mapped"] = self.report.paths.get("mapped", 0) + mapped_bytes
        return views, [p for p in pieces if p.shard in cold and p.name not in views]

    def _adopt(self, pieces: Sequence[ByteRange]) -> dict[str, BufferView]:
        """Claims what others have read ahead; it may still be on its way to these spots."""
        if not self._adopts:
            return {}
        claims, givers = claim_pieces(
            self.checkpoint,
            pieces,
            self.stall_seconds,
            mapped=self.device == "cpu" and self.cache != "direct",
            device=self.device,
        )
        self._givers += [giver for giver in givers if giver not in self._givers]
        self._claims.update(claims)
        return {
            name: claim.view or BufferView(self._mapping(claim.piece.shard), claim.piece.offset)
            for name, claim in claims.items()
        }

    def _kept(self, pieces: Sequence[ByteRange]) -> dict[str, BufferView]:
        """What an open pool holds of these."""
        if self.cache == "mapped":
            return {}
        # Whoever copies from there to a device can take the pinned memory itself.
        pinned = self.device != "cpu"
        views = host_pool.find(self.checkpoint, pieces, self._pooled, pinned=pinned)
        nbytes = sum(piece.nbytes for piece in pieces if piece.name in views)
        if nbytes:
            self.report.paths["pool"] = self.report.paths.get("pool", 0) + nbytes
        return views

    def claims_of(self, views: Mapping[str, BufferView]) -> dict[str, Claim]:
        """The claims behind these spots, once: their bytes may still be on the way."""
        return {name: self._claims.pop(name) for name in views if name in self._claims}

    def _mapping(self, shard: int) -> Region:
        if shard not in self._mapped:
            self._mapped[shard] = map_shard(self.checkpoint, shard)
        return self._mapped[shard]

    def plan(self, pieces: Sequence[ByteRange], *, window_bytes: int = 0) -> ReadPlan:
        """The reads for these pieces, with the road of each as the page cache is now."""
        for shard in sorted({piece.shard for piece in pieces}):
            self.register(shard)
        return plan_reads(
            pieces,
            [shard.size for shard in self.checkpoint.shards],
            self.open().limits(self.device),
            blocks=self._roads.blocks,
            window_bytes=window_bytes,
            io_mode_of=self._roads.io_mode_of,
        )

    def arrange(
        self, pieces: Sequence[ByteRange], *, window_bytes: int = 0
    ) -> tuple[ReadPlan, dict[str, BufferView]]:
        """The reads for what `sort` does not find in memory, and the spots of what it does."""
        with self.report.phase("plan"):
            views, to_read = self.sort(pieces)
            try:
                plan = self.plan(to_read, window_bytes=window_bytes) if to_read else ReadPlan()
            except BaseException:
                self.claims_of(views)  # no batch takes these claims
                raise
        return plan, views

    @property
    def files(self) -> list[Registration]:
        """A registration for each shard, as `Backend.prepare` takes them."""
        return self._roads.files

    def register(self, shard: int) -> None:
        """Opens a shard's roads, once."""
        self._roads.register(self.open(), shard)

    def start(self, pieces: Sequence[ByteRange], *, window_bytes: int = 0) -> Batch:
        """Puts pieces on their way and returns at once."""
        return Batch(self, *self.arrange(pieces, window_bytes=window_bytes))

    def busy(self) -> str:
        """For `quiesce`: what is under way."""
        return f"{self.checkpoint.source} is being read" if self.posted else ""

    def quiesce(self) -> None:
        """Gives back the backend and all that it needed; the next batch opens it again."""
        backend, self.backend = self.backend, None
        self._roads.close(backend)
        if backend is not None:
            backend.close()
        self._mapped.clear()
        self._pooled.clear()

    def resume(self) -> None:
        """Nothing is opened before it is needed."""

    def close(self) -> None:
        """Ends the backend and gives its descriptors back; mappings stay with their tensors.

        A prefetch that this session took from may let go of what was left of these files.
        """
        for giver in self._givers:
            giver.leave(shard.identity for shard in self.checkpoint.shards)
        self._givers.clear()
        quiesce.unregister(self)
        self.quiesce()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Batch:
    """Pieces on their way: memory, one request, and what became of it."""

    memory_of: ClassVar[type[HostBuffers]] = HostBuffers
    ahead: ClassVar[bool] = False  # whether it yields to what somebody waits for

    def __init__(
        self, session: Session, plan: ReadPlan, views: dict[str, BufferView],
        memory: list[Memory] | None = None,
    ) -> None:  # fmt: skip
        """`memory` is there for each target of the plan, where it was taken already."""
        self.session = session
        self.plan = plan
        self.views = views
        self.claims = session.claims_of(views)
        self._memory: list[Registration] = []
        self._intake: PoolBuffers | None = None  # of the pool, where there is one
        self._backend: Backend | None = None  # of the request
        self._request: Any = None
        self._arrived = bytearray(len(plan.transfers))  # 1: all bytes of the transfer are there
        self._failure: Failure | None = None  # the first one
        if plan.transfers:
            try:
                with session.report.phase("prepare"):
                    self._post(self._take_memory() if memory is None else memory)
            except BaseException:
                self.release()
                raise

    def settled(self, name: str) -> bool:
        """Whether a piece that a prefetch reads is at its spot; True for one that none does.

        What the prefetch has lost (it was cancelled, or failed) is read here, and waited for.
        """
        claim = self.claims.get(name)
        if claim is None:
            return True
        state = claim.state()
        if state == COMING:
            idle = claim.flight.idle_seconds()
            if idle > self.session.stall_seconds:
                raise silence_error(self.session.checkpoint, claim.piece, idle)
            return False
        if state == LOST:
            self._read_anew([c for c in self.claims.values() if c.state() == LOST])
        else:
            del self.claims[name]
            roads = self.session.report.paths
            roads["prefetched"] = roads.get("prefetched", 0) + claim.piece.nbytes
        return True

    def _read_anew(self, claims: Sequence[Claim]) -> None:
        pieces = [claim.piece for claim in claims]
        again = self._start_anew(pieces)
        try:
            again.wait()
            self.views.update(again.views)
        finally:
            again.release()
        for piece in pieces:
            del self.claims[piece.name]

    def _start_anew(self, pieces: Sequence[ByteRange]) -> Batch:
        return Batch(self.session, self.session.plan(pieces), {})

    def _take_memory(self) -> list[Memory]:
        """Memory for each target of the plan."""
        self._intake = host_pool.allocate(self.plan) if self.memory_of is HostBuffers else None
        arena = self._intake or self.memory_of(self.plan)
        self.views.update(arena.views(self.plan))
        return [Memory(DRAM, region.address, region.length, region) for region in arena.regions]

    def _post(self, memory: list[Memory]) -> None:
        backend = self._backend = self.session.open()
        for entry in memory:
            self._memory.append(backend.register(entry))
        self.session.posted.add(self)
        request = backend.prepare(self.plan.transfers, self.session.files, self._memory)
        self._request = request
        if self.ahead:
            backend.yield_to_loads(request, True)
        backend.post(request)
        # An engine that could not be opened after all has left its place to the next.
        describe(self.session.report, backend)

    @property
    def complete(self) -> bool:
        """Whether all transfers of the plan have arrived."""
        return self._failure is None and self._arrived.find(0) < 0

    def _note_progress(self) -> Progress | None:
        """Asks the backend for news. None after `release`.

        A backend reports a failure once. It is stored here, so that every later caller gets it too.
        """
        request, backend = self._request, self._backend
        if request is None or backend is None:
            return None
        progress = backend.check(request)
        failed = {failure.transfer for failure in progress.failures}
        for place in progress.settled:
            if place not in failed:
                self._arrived[place] = 1
        if progress.failures and self._failure is None:
            self._failure = progress.failures[0]
        return progress

    def _require_progress(self, progress: Progress | None) -> None:
        """Raises ReadError where a transfer has failed, or will not be read any more."""
        if self._failure is not None:
            raise self._error(self._failure)
        if (progress is None or progress.finished) and not self.complete:
            source = self.session.checkpoint.source
            raise ReadError(
                f"{source}: the request ended with {self._arrived.count(0)} reads undone",
                path=source,
            )

    def wait(
        self,
        moved: Callable[[int], None] | None = None,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        """Waits for all of it. `moved` is told of bytes as they land; `watch` is called ten times a
        second, and ends the wait by what it raises.

        Raises ReadError and its kinds, naming file, offset and tensor, with the first failure;
        StallError when no byte came for the session's `stall_seconds`.
        """
        with self.session.report.phase("wait for the prefetch") if self.claims else nullcontext():
            for claim in list(self.claims.values()):
                while not self.settled(claim.piece.name):
                    watch()
                    claim.pause(_LOOK_SECONDS)
                if moved is not None:
                    moved(claim.piece.nbytes)
        backend, request = self._backend, self._request
        if backend is None or request is None or self.complete:
            self._require_progress(None)
            return
        session, transfers = self.session, self.plan.transfers
        silent = False
        with session.report.phase("read"):
            while True:
                progress = self._note_progress()
                if moved is not None and progress is not None and progress.settled:
                    moved(sum(transfers[place].wanted for place in progress.settled))
                self._require_progress(progress)
                if progress is None or progress.finished:
                    return
                # Twice in a row: a process that was stopped for a while finds a long silence when
                # it goes on, though the bytes are about to be counted.
                if progress.idle_seconds > session.stall_seconds and not self.complete:
                    if silent:
                        first = transfers[self._arrived.find(0)]
                        raise self._stall(first, progress.idle_seconds)
                    silent = True
                else:
                    silent = False
                watch()
                backend.wait(request, _LOOK_SECONDS)

    def tensors_of(self, infos: Sequence[TensorInfo]) -> dict[str, torch.Tensor]:
        """Their tensors, once all of it is there: each owns its memory, and is given once."""
        # Given up first: where this is interrupted, tensors that were made drop their bytes.
        views, self.views = self.views, {}
        return hand_over(infos, views)

    def _error(self, failure: Failure) -> ReadError:
        return read_error(self.session.checkpoint, self.plan, failure)

    def _stall(self, transfer: Transfer, idle: float) -> StallError:
        return stall_error(self.session.checkpoint, self.plan, transfer, idle)

    def release(self) -> None:
        """Ends the request, finished or not, and notes in the report what it did. It gives back
        what was taken for it, also where the request was never made. May be called again."""
        session, backend = self.session, self._backend
        request, self._request = self._request, None
        released = False
        try:
            if request is not None and backend is not None:
                backend.release(request)
                session.posted.discard(self)
                note(session.report, backend, session.checkpoint, self.plan, request)
            released = True
        finally:
            session.posted.discard(self)
            memory, self._memory = self._memory, []
            for registration in memory:
                if backend is not None:
                    backend.deregister(registration)
            intake, self._intake = self._intake, None
            if intake is not None:
                checkpoint = session.checkpoint
                whole = released and self.complete and host_pool.unchanged(checkpoint)
                intake.end(checkpoint if whole else None)
