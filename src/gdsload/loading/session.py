"""A session: everything that the reads of one checkpoint share. It holds the backend, the
registered files, the mappings of warm shards, and decides for each byte range whether it is read.

    ranges ──► prefetched? ──► in the host pool? ──► in the page cache? ──► read plan
               claim it        view it               map the shard         read by a `Batch`

`Session.plan` also asks what is to fill the page cache (`page_cache_fill`). Not responsible for:
memory and requests (`batch`), the I/O modes of other reads, and file descriptors (`io_mode`).
"""

from __future__ import annotations

import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from gdsload._native.memory import Region
from gdsload._native.ranges import bytes_of
from gdsload.backends import Backend, Registration, choose
from gdsload.backends.base import MAPPED_PATH
from gdsload.backends.registry import REMOTE
from gdsload.checkpoint import Checkpoint
from gdsload.errors import BackendUnavailable, CheckpointError, PlacementError
from gdsload.loading.accounting import record_backend
from gdsload.loading.claims import READ, Claim, Offer, claim_ranges, nothing, withdraw
from gdsload.loading.io_mode import ShardAccess
from gdsload.loading.settings import ReadSettings
from gdsload.memory.host_buffers import BufferView, current_pool, map_shard
from gdsload.planning.read_plan import (
    GAP_BYTES,
    REMOTE_GAP_BYTES,
    ByteRange,
    Limits,
    ReadPlan,
    plan_reads,
)
from gdsload.report import LoadReport
from gdsload.system import quiesce
from gdsload.system.available import require_room
from gdsload.system.device_name import device_kind
from gdsload.system.gc_control import collector_paused
from gdsload.system.lifecycle import fork_safe_lock

if TYPE_CHECKING:
    import torch

    from gdsload._native.cuda import Block
    from gdsload.loading.batch import Batch
    from gdsload.loading.integrity import Verifier
    from gdsload.memory.host_pool import HostPool

# Memory of one read in a plan, and the number of reads that fits everywhere.
PLANNED_READ_BYTES = 256
_FEW_READS = 100_000


def verifier_of(
    checkpoint: Checkpoint,
    verify: str | os.PathLike[str],
    report: LoadReport,
    advance: Callable[[int], None] = lambda _: None,
) -> Verifier | None:
    """What compares the bytes of a load; None if nothing is compared in memory. Modules for
    checksums are only imported if they are wanted. `advance` and errors are as those of
    `integrity.open_verifier`."""
    if verify == "size":
        return None
    from gdsload.loading.integrity import open_verifier

    return open_verifier(checkpoint, verify, report, advance)


def remote_backend_of(checkpoint: Checkpoint) -> str:
    """The name of the backend that reads a remote checkpoint; "" for local files."""
    remote = checkpoint.shards[0].remote  # then all are remote
    return "" if remote is None else remote.backend


def _by_shard(
    ranges: Sequence[ByteRange], without: Container[str] = ()
) -> dict[int, list[ByteRange]]:
    """The ranges of each shard, but for those of these names."""
    found: dict[int, list[ByteRange]] = defaultdict(list)
    for each in ranges:
        if each.name not in without:
            found[each.shard].append(each)
    return found


def require_room_to_plan(nbytes: int, limits: Limits) -> None:
    """Raises PlacementError if the plan itself would not fit into memory."""
    reads = nbytes // limits.max_request
    if reads > _FEW_READS:
        require_room(reads * PLANNED_READ_BYTES, "bytes are needed to plan the reads")


def _drop_rest(offers: list[Offer], checkpoint: Checkpoint) -> None:
    """Drops what is left of these offers: the load that has claimed from them has ended."""
    for offer in offers:
        offer.drop_rest(shard.original for shard in checkpoint.shards)
        if offer.empty:
            withdraw(offer)
    offers.clear()


_inherited: list[Backend] = []  # from the parent of this process


class Session(quiesce.Holder):
    """The open files and the backend of one checkpoint. Close it after its last batch."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        report: LoadReport,
        settings: ReadSettings,
        *,
        device: str = "cpu",
        claim: bool = True,
        pool: bool = True,
        maps: bool = True,
        copies: bool = False,
        expected_bytes: int = 0,
        verifier: Verifier | None = None,
    ) -> None:
        """The backend is opened by the first read, or here if it was asked for by name.

        Args:
            checkpoint: The checkpoint. It must stay open as long as the session.
            report: Where the session counts bytes and notes its choices.
            settings: How its bytes are read. If `verify` is not "size", nothing is mapped.
            device: Where the reads go: "cpu" or "cuda:N".
            claim: Take over what a prefetch has read of these files, or is reading.
            pool: Take over what the host pool holds, and memory of it. Its tensors view another
                mapping of the memory than reads write to.
            maps: Map ranges that the page cache holds, instead of reading them. Otherwise no memory
                of the load is of a file.
            copies: Whether bytes of mappings will be copied while the session is open: a page that
                cannot be read must be an error before that.
            expected_bytes: Bytes that will be read in all; 0 means `report.wanted_bytes`. Backends
                that take long to open are not used for small loads.
            verifier: Compares all bytes that its batches read. Nothing is mapped then: a mapped
                file may change after it was compared.

        Raises:
            BackendUnavailable: A backend that was asked for by name does not work here.
            CheckpointError: Remote files are to be mapped.
        """
        cache = settings.cache
        self._access = ShardAccess(checkpoint, report, settings, copies=copies)
        self._opening = fork_safe_lock(self, "_opening")
        self.checkpoint = checkpoint
        self.report = report
        self.device = device
        self.cache = cache
        self.stall_seconds = settings.stall_seconds
        self.backend: Backend | None = None  # while it is open
        self._pid = 0  # of the process that opened it
        self.failovers: dict[str, int] = {}  # of this backend, that reports have
        self.watch: Callable[[], object] = nothing  # called while a prefetch is waited for
        self._settings = settings
        self._remote = remote_backend_of(checkpoint)
        self._expected_bytes, self._beside_bytes = expected_bytes, 0
        self._claiming = claim and cache != "mapped"
        self.uses_pool = pool
        self.verifier = verifier
        self._maps = maps and settings.verify == "size" and verifier is None
        self._may_fill = settings.page_cache in ("auto", "fill") and self._maps and device == "cpu"
        self._mapped: dict[int, Region] = {}  # by shard
        # Mappings of prefetches: `maps` needs them as long as tensors view them.
        self._claimed_mappings: dict[int, set[Region | Block]] = {}  # by shard
        self._pooled: dict[Any, Region] = {}  # by segment of the host pool
        self._offers: list[Offer] = []  # that ranges were claimed from
        # Also for a `safe_open` that nobody closes.
        self._drop_unclaimed = weakref.finalize(self, _drop_rest, self._offers, checkpoint)
        self._drop_unclaimed.atexit = False
        # Batches whose reads may be in flight. A batch that is collected does not count any more.
        self.posted: weakref.WeakSet[Batch] = weakref.WeakSet()
        quiesce.register(self)
        if settings.backend != "auto" or settings.options:
            try:
                self.open()  # it must work, even if the page cache holds everything
            except BaseException:
                self.close()
                raise

    @contextmanager
    def reporting_to(self, report: LoadReport) -> Iterator[None]:
        """Uses another report inside the block. Blocks may be nested, since an observer of a read
        may read too. The choice, rates and refusals so far are copied to the new report."""
        before = self.report
        self._report_to(report)
        try:
            yield
        finally:
            self._report_to(before)

    def _report_to(self, report: LoadReport) -> None:
        before, self.report = self.report, report
        if self.backend is not None:
            self.failovers = dict(self.backend.status().failovers)
        report.verify = before.verify
        report.choice = before.choice
        report.rates.update(before.rates)
        report.refusals.update(before.refusals)
        self._access.report = report

    def expect(self, nbytes: int, beside_bytes: int = 0) -> None:
        """Notes the bytes that will be read in all, if that is known only after the checkpoint was
        opened, and those of memory that they will be copied to."""
        self._expected_bytes, self._beside_bytes = nbytes, beside_bytes

    def open(self) -> Backend:
        """The backend; the first call opens it, and so does the first one in a child of a fork.

        Raises BackendUnavailable, also in such a child if the backend reads to a device or from
        remote files: their libraries do not survive a fork.
        """
        with self._opening:
            if self.backend is not None and self._pid != os.getpid():
                self._leave_to_parent(self.backend)
            if self.backend is None:
                self.backend, self.failovers = self._opened_backend(), {}
                self._pid = os.getpid()
                record_backend(self, self.backend)
            return self.backend

    def _leave_to_parent(self, backend: Backend) -> None:
        """In a child of a fork: forgets the backend, whose threads stayed in the parent."""
        if self._remote or self.device != "cpu":
            why = "it was opened before a fork: its threads stayed in the parent process"
            text = f"{self.checkpoint.source}: {why}; open it in the child"
            raise BackendUnavailable(text, {backend.name: why})
        _inherited.append(backend)  # never closed: it would wait for its threads
        self.backend = None
        self.posted.clear()
        self._access.forget_backend()

    def _opened_backend(self) -> Backend:
        """A new backend. "auto" is, into a CUDA device, the backend that measures and fails over;
        into DRAM, the first backend that works."""
        device, wanted, options = self.device, self._settings.backend, self._settings.options
        if wanted in REMOTE and self.checkpoint.shards[0].cached:
            wanted = "auto"  # the local cache has all of what it would read
        why = ""
        if self._remote and wanted not in ("auto", self._remote):
            why = f"these are remote files: backend {self._remote!r} reads them"
        elif wanted in REMOTE and not self._remote:
            why = "it reads only remote files"
        if why:
            text = f"backend {wanted!r}: {self.report.source}: {why}"
            raise BackendUnavailable(text, {wanted: why})
        if self._remote:
            return choose(device, self._remote, options).backend(**options)
        if device_kind(device) == "cuda":
            from gdsload.backends.auto.backend import AutoBackend  # imports CUDA

            if wanted == "auto" and AutoBackend.probe(device).usable:
                expected = self._expected_bytes or self.report.wanted_bytes
                return AutoBackend(device, expected, **options)
        choice = choose(device, wanted, options)
        self.report.refusals.update(choice.refusals)
        if wanted != "auto":
            self.report.choice = f"{wanted}: asked for by name"
        return choice.backend(**options)

    def arrange(
        self, ranges: Sequence[ByteRange], *, window_bytes: int = 0, past_cache: str = ""
    ) -> tuple[ReadPlan, dict[str, BufferView], dict[str, Claim]]:
        """The reads for ranges that are not in memory, views of those that are, and the claims of
        those that are from a prefetch.

        A prefetch may still be reading: `Batch.settle` tells when the bytes of a claim are there.
        `window_bytes` limits the bytes of a window of the plan; 0: one window. Reads into the page
        cache are one window in any case. `past_cache` is the reason why these reads should not fill
        the page cache, for the report; "" if they may. It does not count if the caller of the load
        asked for `page_cache="fill"`. What has no room in memory is mapped, if it may be, and read
        when it is used.
        """

        def plan_rest() -> ReadPlan:
            to_read = [each for each in ranges if each.name not in views] if views else ranges
            if not to_read:
                return ReadPlan()
            return self.plan(to_read, window_bytes=window_bytes, past_cache=past_cache)

        with self.report.phase("plan"):
            views, claims = self._views_of(ranges)
            plan = plan_rest()
            if self._has_no_room(plan):
                views |= self._mapped_views(_by_shard(ranges, views))
                plan = plan_rest()
        if self.checkpoint.shards[0].cached:  # then all are
            self.report.cached_bytes += sum(each.nbytes for each in ranges)
        return plan, views, claims

    def _views_of(
        self, ranges: Sequence[ByteRange]
    ) -> tuple[dict[str, BufferView], dict[str, Claim]]:
        """Views of the ranges that need no read: prefetched, in the host pool, or mapped; and the
        claims of those that are prefetched."""
        views, claims = self._prefetched(ranges) if self._claiming else ({}, {})
        pool = current_pool() if self.uses_pool else None
        if self.cache == "mapped" or not (self.device == "cpu" or self._claiming):
            pool = None
        with collector_paused():
            if pool is not None:
                views |= self._in_pool(pool, [each for each in ranges if each.name not in views])
            # For a device, reading warm ranges through the ring is faster than mapping them.
            if self._maps and self.device == "cpu":
                views |= self._in_page_cache([each for each in ranges if each.name not in views])
        return views, claims

    def _prefetched(
        self, ranges: Sequence[ByteRange]
    ) -> tuple[dict[str, BufferView], dict[str, Claim]]:
        # Of a remote file, a mapping is one of a copy, which may change unnoticed.
        owned = self.cache in ("direct", "buffered") or not self._maps or bool(self._remote)
        found, offers = claim_ranges(
            self.checkpoint,
            ranges,
            self.stall_seconds,
            self.report,
            mapped=self.device == "cpu" and not owned,
            owned=owned,
            device=self.device,
            watch=self.watch,
        )
        self._offers += [offer for offer in offers if offer not in self._offers]
        views: dict[str, BufferView] = {}
        claims: dict[str, Claim] = {}
        for name, claim in found.items():
            if claim.view is None and not self._can_map_claim(claim):
                continue  # it is in the page cache at most, and is read from there
            views[name] = claim.view or BufferView(
                self.mapping_of(claim.range.shard), claim.range.offset
            )
            claims[name] = claim
            if claim.of_file:
                mappings = self._claimed_mappings.setdefault(claim.range.shard, set())
                mappings.add(views[name].region)
        return views, claims

    def _can_map_claim(self, claim: Claim) -> bool:
        """Whether to map a range that a prefetch reads into the page cache. That of a distant file
        may be gone again, and a fault on a page that is not there would be a round trip."""
        shard = claim.range.shard
        may_be_gone = self.checkpoint.shards[shard].distant and claim.state() == READ
        if may_be_gone and not self._access.mapped(shard, [claim.range]):
            return False
        return self._can_map(shard)

    def _in_pool(self, pool: HostPool, ranges: Sequence[ByteRange]) -> dict[str, BufferView]:
        # A copy to a device can start from the pinned memory itself.
        pinned = self.device != "cpu"
        views = pool.find(self.checkpoint, ranges, self._pooled, pinned=pinned)
        self.count_bytes("pool", sum(each.nbytes for each in ranges if each.name in views))
        return views

    def _in_page_cache(self, ranges: Sequence[ByteRange]) -> dict[str, BufferView]:
        by_shard = _by_shard(ranges)
        if current_pool() is None:
            self._access.fill_if_small(by_shard)
        warm = {s: members for s, members in by_shard.items() if self._access.mapped(s, members)}
        return self._mapped_views(warm)

    def _has_no_room(self, plan: ReadPlan) -> bool:
        """Whether memory is too small for what a load that may map files would read to it. A
        prefetch is refused instead: mapping would read nothing."""
        if not (self._access.fill.lacks_room and self._claiming):
            return False
        try:
            require_room(plan.buffer_bytes)
        except PlacementError as error:
            self.report.refusals["memory"] = f"{error}; the files are mapped instead"
            return True
        return False

    def _mapped_views(self, ranges_of: Mapping[int, Sequence[ByteRange]]) -> dict[str, BufferView]:
        """Views of mappings, for ranges by shard. Shards that cannot be mapped are left out."""
        views: dict[str, BufferView] = {}
        for shard, members in ranges_of.items():
            if self._can_map(shard):
                region = self.mapping_of(shard)
                for each in members:
                    views[each.name] = BufferView(region, each.offset)
                self.count_bytes(MAPPED_PATH, sum(each.nbytes for each in members))
        return views

    def count_bytes(self, path: str, nbytes: int) -> None:
        """Adds bytes to an I/O path of the report."""
        if nbytes:
            self.report.paths[path] = self.report.paths.get(path, 0) + nbytes

    def mapping_of(self, shard: int) -> Region:
        """A private mapping of a whole shard."""
        if shard not in self._mapped:
            self._mapped[shard] = map_shard(self.checkpoint, shard)
        return self._mapped[shard]

    def _can_map(self, shard: int) -> bool:
        """Maps a shard; False, with the reason in the report, if it can be read without that."""
        try:
            self.mapping_of(shard)
        except CheckpointError as error:
            if self.cache == "mapped":
                raise
            self.report.refusals[f"mapping on {self.checkpoint.shards[shard].name}"] = str(error)
            return False
        return True

    def plan(
        self, ranges: Sequence[ByteRange], *, window_bytes: int = 0, past_cache: str = ""
    ) -> ReadPlan:
        """The reads for these ranges. The page cache, as it is now, decides their I/O modes.

        Raises PlacementError if the plan itself does not fit into memory: a sparse file may declare
        a tensor of any size.
        """
        shards = {each.shard for each in ranges}
        self.register(*sorted(shards))
        backend = self.open()
        limits = backend.limits(self.device)
        if self.device != "cpu":  # there a read is to a slot of a ring
            self._access.fit_blocks(shards, limits.max_request)
        nbytes = bytes_of(list(ranges))
        require_room_to_plan(nbytes, limits)
        self.report.filesystem, self.report.depth = self._access.filesystem, limits.depth
        io_mode = ""  # that of all reads
        if not (self._remote or "direct" in limits.io_modes):
            self._refuse_direct(backend.name)
            io_mode = "buffered"
        if self._fills(shards, limits, past_cache):
            io_mode = "mapped"
            window_bytes = 0  # the kernel reads ahead in file order, whatever is wanted first
            request_bytes = self._access.fill.request_bytes(nbytes, limits.depth)
            limits = Limits(request_bytes, limits.block, limits.depth)
        planned = partial(
            plan_reads,
            ranges,
            [shard.size for shard in self.checkpoint.shards],
            limits,
            blocks=self._access.blocks,
            window_bytes=window_bytes,
            gap_bytes=REMOTE_GAP_BYTES if self._remote else GAP_BYTES,
            io_mode_of=(lambda *_: io_mode) if io_mode else self._access.io_mode_of,
        )
        with collector_paused():  # not by a thread, which may be left behind
            return planned() if io_mode else self.checkpoint.answer_to(planned, shards)

    def _refuse_direct(self, name: str) -> None:
        """Notes that the backend does no direct reads. Raises BackendUnavailable if
        cache="direct"."""
        why = "it does no direct reads"
        if self.cache == "direct":
            text = f"backend {name!r}: {self.report.source}: cache='direct', but {why}"
            raise BackendUnavailable(text, {name: why})
        self.report.refusals["direct I/O"] = f"backend {name!r}: {why}"

    def _fills(self, shards: Iterable[int], limits: Limits, past_cache: str) -> bool:
        """Whether reads of these shards fill the page cache."""
        if not (self._may_fill and "mapped" in limits.io_modes):
            return False
        fill = self._access.fill
        if current_pool() is None:
            fill.decide(self._expected_bytes or self.report.wanted_bytes, self._beside_bytes)
            if fill.active(past_cache) and not all(map(self._can_map, shards)):
                fill.refuse("a file cannot be mapped")
            fill.note(self.report, past_cache)
        return fill.active(past_cache)

    def will_copy(self) -> None:
        """From now on, bytes of mappings may be copied: see `copies`."""
        self._access.copies = True

    def maps(self, tensor: torch.Tensor, shard: int) -> bool:
        """Whether a tensor views a mapping of its shard, and takes no memory of its own. The
        mapping may be one of a prefetch."""
        if not tensor.is_cpu:
            return False
        mappings = [*self._claimed_mappings.get(shard, ())]  # other threads may read
        if (own := self._mapped.get(shard)) is not None:
            mappings.append(own)
        address = tensor.data_ptr()
        return any(
            region.address <= address < region.address + region.length for region in mappings
        )

    def is_mapping(self, view: BufferView, shard: int) -> bool:
        """Whether a view is of a mapping of its shard, whose bytes change with the file."""
        own = view.region is self._mapped.get(shard)
        return own or view.region in self._claimed_mappings.get(shard, ())

    @property
    def files(self) -> list[Registration]:
        """A registration for each shard, as `Backend.prepare` takes them."""
        return self._access.files

    def register(self, *shards: int) -> None:
        """Registers shards with the backend, each once."""
        if shards:
            self._access.register(self.open(), *shards)

    def busy(self) -> str:
        """Why the session cannot quiesce now, or ""."""
        return f"{self.checkpoint.source} is being read" if self.posted else ""

    def quiesce(self) -> None:
        """Closes the backend and the files; the next batch opens them again."""
        backend, self.backend = self.backend, None
        try:
            self._access.close(backend)
        finally:
            self._mapped.clear()
            self._claimed_mappings.clear()
            self._pooled.clear()

    def close(self) -> None:
        """Closes the backend and the files. Mappings live on in their tensors.

        A prefetch that this session claimed from may free the rest of these files.
        """
        self._drop_unclaimed()
        self.watch = nothing  # its owner may hold tensors
        quiesce.unregister(self)
        self.quiesce()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
