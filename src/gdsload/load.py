"""A load, step by step: choose roads, plan, read, check, hand out.

A `Session` holds what the reads of one checkpoint share: the backend, the registered files, the
mappings of warm shards. A `Batch` is some pieces on their way. `load_file`, `stream` and
`safe_open` are built from these two; none of them knows an engine.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from gdsload import residency
from gdsload._native import system
from gdsload._native.memory import Region
from gdsload.arena import Arena, Spot, map_shard
from gdsload.backends import Backend, Memory, OpenFile, Registration, choose
from gdsload.backends.base import DRAM, Failure
from gdsload.checkpoint import Checkpoint
from gdsload.collector import collector_paused
from gdsload.errors import CuFileError, PlacementError, ReadError, ShortRead, StallError
from gdsload.plan import (
    DEFAULT_BLOCK_BYTES,
    Piece,
    ReadPlan,
    Transfer,
    extents_of,
    plan_reads,
)
from gdsload.report import LoadReport, Span

log = logging.getLogger("gdsload")

CACHES = ("auto", "direct", "buffered", "mapped")
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
    ) -> None:
        """Raises ValueError for an unknown `cache`; a backend is opened with the first read."""
        if cache not in CACHES:
            raise ValueError(f"cache={cache!r} is none of {', '.join(CACHES)}")
        self.checkpoint = checkpoint
        self.report = report
        self.device = device
        self.cache = cache
        self.stall_seconds = stall_seconds
        self._wanted = backend
        self._options = dict(options or {})
        self._backend: Backend | None = None
        self._files: list[Registration | None] = [None] * len(checkpoint.shards)
        self._twins: list[int] = []
        self._blocks = [DEFAULT_BLOCK_BYTES] * len(checkpoint.shards)
        self._mapped: dict[int, Region] = {}
        self._warm: dict[int, bool] = {}
        if backend != "auto" or self._options:
            self._open_backend()  # what was asked for by name must work, also when all is warm

    @property
    def backend(self) -> Backend:
        return self._backend or self._open_backend()

    def _open_backend(self) -> Backend:
        choice = choose(self.device, self._wanted, self._options)
        backend = choice.backend(**self._options)
        self._backend = backend
        self.report.refusals.update(choice.refusals)
        self.report.refusals.update(getattr(backend, "refusals", {}))
        self.report.backend = backend.name
        self.report.engine = getattr(backend, "engine", "")
        return backend

    @collector_paused()
    def sort(self, pieces: Sequence[Piece]) -> tuple[dict[str, Spot], list[Piece]]:
        """Pieces that are there already, in the mapping of a warm shard; and those to be read."""
        by_shard: dict[int, list[Piece]] = defaultdict(list)
        for piece in pieces:
            by_shard[piece.shard].append(piece)
        spots: dict[str, Spot] = {}
        cold: set[int] = set()
        mapped_bytes = 0
        for shard, members in by_shard.items():
            if not self._is_mapped(shard, members):
                cold.add(shard)
                continue
            if shard not in self._mapped:
                self._mapped[shard] = map_shard(self.checkpoint, shard)
            if self.cache == "mapped":
                self._read_ahead(shard, members)
            region = self._mapped[shard]
            for piece in members:
                spots[piece.name] = Spot(region, piece.offset)
                mapped_bytes += piece.nbytes
        if mapped_bytes:
            self.report.roads["mapped"] = self.report.roads.get("mapped", 0) + mapped_bytes
        return spots, [piece for piece in pieces if piece.shard in cold]

    def _is_mapped(self, shard: int, pieces: Sequence[Piece]) -> bool:
        if self.device != "cpu":
            return False
        if self.cache != "auto":
            return self.cache == "mapped"
        fd = self.checkpoint.shards[shard].fd
        return all(
            residency.mostly_resident(fd, extent.offset, extent.length)
            for extent in extents_of(pieces)
        )

    def _read_ahead(self, shard: int, pieces: Sequence[Piece]) -> None:
        """Starts the kernel reading what was mapped cold: page faults would come one by one."""
        fd = self.checkpoint.shards[shard].fd
        with suppress(OSError):  # only a hint
            for extent in extents_of(pieces):
                os.posix_fadvise(fd, extent.offset, extent.length, os.POSIX_FADV_WILLNEED)

    def _road_of(self, shard: int, offset: int, length: int) -> str:
        """The cheapest road for a transfer: warm bytes are copied, cold ones go direct."""
        if self.cache != "auto":
            return "buffered" if self.cache == "buffered" else "direct"
        opened = self.checkpoint.shards[shard]
        if shard not in self._warm:
            self._warm[shard] = _some_resident(opened.fd)
        if not self._warm[shard]:
            return "direct"
        length = min(length, opened.size - offset)
        return "buffered" if residency.wholly_resident(opened.fd, offset, length) else "direct"

    def plan(self, pieces: Sequence[Piece], *, window_bytes: int = 0) -> ReadPlan:
        """The reads for these pieces, with the road of each as the page cache is now."""
        for shard in sorted({piece.shard for piece in pieces}):
            self._register(shard)
        return plan_reads(
            pieces,
            [shard.size for shard in self.checkpoint.shards],
            self.backend.limits(self.device),
            blocks=self._blocks,
            window_bytes=window_bytes,
            road_of=self._road_of,
        )

    def _register(self, shard: int) -> Registration:
        known = self._files[shard]
        if known is not None:
            return known
        opened = self.checkpoint.shards[shard]
        direct = -1
        if self.cache in ("auto", "direct"):
            direct = self._direct_twin(shard)
        registration = self.backend.register(
            OpenFile(opened.path, opened.fd, opened.size, direct, self._blocks[shard])
        )
        self._files[shard] = registration
        return registration

    def _direct_twin(self, shard: int) -> int:
        """A descriptor for direct reads of a shard, or -1 with the reason in the report."""
        opened = self.checkpoint.shards[shard]
        alignment = system.direct_alignment(opened.fd)
        refusal = ""
        twin: int | None = None
        if alignment is not None and alignment[1] == 0:
            refusal = "its filesystem says that it does no direct I/O"
        else:
            if alignment is not None:
                self._blocks[shard] = max(alignment)
            try:
                twin = opened.reopen_direct()
                refusal = "its filesystem does no direct I/O"
            except OSError as error:
                refusal = f"it cannot be opened for direct I/O: {error.strerror}"
        if twin is None:
            if self.cache == "direct":
                raise ReadError(
                    f"{opened.path}: cache='direct', but {refusal}",
                    path=opened.path,
                    errno=errno.EINVAL,
                    hint="cache='auto' reads it through the page cache",
                )
            self.report.refusals[f"direct I/O on {opened.name}"] = refusal
            return -1
        self._twins.append(twin)
        return twin

    def start(self, pieces: Sequence[Piece], *, window_bytes: int = 0) -> Batch:
        """Puts pieces on their way and returns at once."""
        with self.report.phase("plan"):
            spots, to_read = self.sort(pieces)
            plan = self.plan(to_read, window_bytes=window_bytes) if to_read else ReadPlan()
        return Batch(self, plan, spots)

    def close(self) -> None:
        """Ends the backend and gives its descriptors back; mappings stay with their tensors."""
        if self._backend is not None:
            for registration in self._files:
                if registration is not None:
                    self._backend.deregister(registration)
            self._backend.close()
            self._backend = None
        self._files = [None] * len(self._files)
        for twin in self._twins:
            os.close(twin)
        self._twins.clear()
        self._mapped.clear()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Batch:
    """Pieces on their way: memory, one request, and what became of it."""

    def __init__(self, session: Session, plan: ReadPlan, spots: dict[str, Spot]) -> None:
        self.session = session
        self.plan = plan
        self.spots = spots
        self._memory: list[Registration] = []
        self._request: Any = None
        if plan.transfers:
            with session.report.phase("prepare"):
                self._post(self._take_memory())

    def _take_memory(self) -> list[Memory]:
        """Memory for each target of the plan."""
        arena = Arena(self.plan)
        self.spots.update(arena.spots(self.plan))
        return [Memory(DRAM, region.address, region.length, region) for region in arena.regions]

    def _post(self, memory: list[Memory]) -> None:
        backend, plan = self.session.backend, self.plan
        self._memory = [backend.register(entry) for entry in memory]
        files = [entry or _NO_FILE for entry in self.session._files]
        self._request = backend.prepare(plan.transfers, files, self._memory)
        backend.post(self._request)
        # An engine that could not be opened after all has left its place to the next.
        self.session.report.engine = getattr(backend, "engine", "")
        self.session.report.refusals.update(getattr(backend, "refusals", {}))

    def wait(self, moved: Callable[[int], None] | None = None) -> None:
        """Waits for all of it. `moved` is told of bytes as they land.

        Raises ReadError and its kinds, naming file, offset and tensor, with the first failure;
        StallError when no byte came for the session's `stall_seconds`.
        """
        if self._request is None:
            return
        session, backend, transfers = self.session, self.session.backend, self.plan.transfers
        waiting = set(range(len(transfers)))
        silent = False
        with session.report.phase("read"):
            while True:
                progress = backend.check(self._request)
                waiting.difference_update(progress.settled)
                if moved is not None and progress.settled:
                    moved(sum(transfers[place].wanted for place in progress.settled))
                if progress.failures:
                    raise self._error(progress.failures[0])
                if progress.finished:
                    break
                # Twice in a row: a process that was stopped for a while finds a long silence when
                # it goes on, though the bytes are about to be counted.
                if progress.idle_seconds > session.stall_seconds and waiting:
                    if silent:
                        raise self._stall(transfers[min(waiting)], progress.idle_seconds)
                    silent = True
                else:
                    silent = False
                backend.wait(self._request, _LOOK_SECONDS)
        if waiting:
            raise ReadError(
                f"{session.checkpoint.source}: the request ended with {len(waiting)} reads undone",
                path=session.checkpoint.source,
            )

    def _error(self, failure: Failure) -> ReadError:
        transfer = self.plan.transfers[failure.transfer]
        path = self.session.checkpoint.shards[transfer.shard].path
        tensor = self._tensor_at(transfer)
        facts: dict[str, Any] = {
            "path": path,
            "offset": transfer.offset,
            "wanted": transfer.wanted,
            "got": failure.got,
        }
        if failure.errno == 0 and not failure.text:
            return ShortRead(
                f"{path}: the file ended at byte {transfer.offset + failure.got}, while bytes up to"
                f" {transfer.offset + transfer.wanted} were read for tensor {tensor!r}",
                hint="it was truncated after it was opened",
                **facts,
            )
        if failure.code:
            return CuFileError(
                f"{path}: reading {transfer.wanted} bytes at {transfer.offset} failed after"
                f" {failure.got}: {failure.text} (tensor {tensor!r})",
                code=failure.code,
                **facts,
            )
        why = failure.text or os.strerror(failure.errno)
        return ReadError(
            f"{path}: reading {transfer.wanted} bytes at {transfer.offset} failed after"
            f" {failure.got}: {why} (tensor {tensor!r})",
            errno=failure.errno or None,
            **facts,
        )

    def _stall(self, transfer: Transfer, idle: float) -> StallError:
        path = self.session.checkpoint.shards[transfer.shard].path
        return StallError(
            f"{path}: no byte has come for {idle:.0f} s while {transfer.wanted} bytes at"
            f" {transfer.offset} were read for tensor {self._tensor_at(transfer)!r}",
            path=path,
            offset=transfer.offset,
            wanted=transfer.wanted,
            errno=errno.ETIMEDOUT,
            hint="stall_seconds sets the limit",
        )

    def _tensor_at(self, transfer: Transfer) -> str:
        for name, home in self.plan.homes.items():
            if home.first <= transfer.tag <= home.last:
                return name
        return "?"

    def release(self) -> None:
        """Ends the request, finished or not, and notes in the report what it did."""
        request, self._request = self._request, None
        if request is None:
            return
        backend, report = self.session.backend, self.session.report
        backend.release(request)
        for road, size in backend.roads(request).items():
            report.roads[road] = report.roads.get(road, 0) + size
        report.requests += len(self.plan.transfers)
        report.read_bytes += self.plan.read_bytes
        native = getattr(request, "native", None)
        if native is not None:
            _, _, short_reads, retries = native.counts()
            report.short_reads += short_reads
            report.retries += retries
            report.spans += [
                Span(f"read {transfer.length >> 10} KiB at {transfer.offset}",
                     f"requests of {self.session.checkpoint.shards[transfer.shard].name}",
                     posted * 1e-9, done * 1e-9)
                for transfer, (posted, done, _) in zip(
                    self.plan.transfers, native.trace(), strict=True
                )
                if done
            ]  # fmt: skip
        populator = getattr(request, "populator", None)
        if populator is not None:
            huge, small, _ = populator.counts()
            report.pages["huge"] = report.pages.get("huge", 0) + huge
            report.pages["small"] = report.pages.get("small", 0) + small
        for registration in self._memory:
            backend.deregister(registration)
        self._memory = []


# Stands in a request for a shard that none of its transfers read.
_NO_FILE = Registration(OpenFile("", -1, 0), (-1, -1))


def _some_resident(fd: int) -> bool:
    try:
        return residency.resident_bytes(fd) > 0
    except OSError:
        return False


def require_device(device: object) -> str:
    """The name of a device that is there, "cuda:0" for 0; torch is asked for all but the CPU.

    Raises PlacementError, before a byte is read, for what is no device or not on this machine.
    """
    if isinstance(device, int) and not isinstance(device, bool):
        device = f"cuda:{device}"
    text = str(device)
    if text in ("cpu", "cpu:0"):
        return "cpu"
    import torch

    if not isinstance(device, (str, torch.device)):
        raise PlacementError(f"{device!r} is not a device")
    try:
        torch.empty(0, device=text)
    except Exception as error:  # RuntimeError, AssertionError and others, by torch's version
        why = str(error).partition("\n")[0] or repr(error)
        raise PlacementError(f"device {text!r} cannot be used: {why}") from error
    return text
