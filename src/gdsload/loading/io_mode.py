"""Which road each byte of a checkpoint takes, and the descriptors that its roads need.

cache      wholly in the page cache      partly, or not at all
"auto"     mapped                        copied where warm, direct where cold
others     as the name says, whatever the page cache holds
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from gdsload._native import system
from gdsload.backends import Backend, OpenFile, Registration
from gdsload.backends.base import NO_FILE
from gdsload.checkpoint import Checkpoint, Shard
from gdsload.errors import ReadError
from gdsload.memory import page_cache
from gdsload.planning.read_plan import DEFAULT_BLOCK_BYTES, ByteRange, merged_ranges_of
from gdsload.report import LoadReport

CACHES = ("auto", "direct", "buffered", "mapped")


class ShardAccess:
    """The shards of one checkpoint, registered with a backend as they are first read."""

    def __init__(self, checkpoint: Checkpoint, report: LoadReport, cache: str) -> None:
        if cache not in CACHES:
            raise ValueError(f"cache={cache!r} is none of {', '.join(CACHES)}")
        self.cache = cache
        self.blocks = [DEFAULT_BLOCK_BYTES] * len(checkpoint.shards)
        self._checkpoint = checkpoint
        self._report = report
        self._known: list[Registration | None] = [None] * len(checkpoint.shards)
        self._twins: list[int] = []
        self._warm: dict[int, bool] = {}

    @property
    def files(self) -> list[Registration]:
        """A registration for each shard, as `Backend.prepare` takes them."""
        return [entry or NO_FILE for entry in self._known]

    def mapped(self, shard: int, pieces: Sequence[ByteRange]) -> bool:
        """Whether these pieces of a shard are mapped rather than read."""
        if self.cache != "auto":
            return self.cache == "mapped"
        fd = self._checkpoint.shards[shard].fd
        return all(
            page_cache.mostly_resident(fd, extent.offset, extent.length)
            for extent in merged_ranges_of(pieces)
        )

    def read_ahead(self, shard: int, pieces: Sequence[ByteRange]) -> None:
        """Starts the kernel reading what was mapped cold: page faults would come one by one."""
        fd = self._checkpoint.shards[shard].fd
        with suppress(OSError):  # only a hint
            for extent in merged_ranges_of(pieces):
                os.posix_fadvise(fd, extent.offset, extent.length, os.POSIX_FADV_WILLNEED)

    def io_mode_of(self, shard: int, offset: int, length: int) -> str:
        """The cheapest road for a transfer: warm bytes are copied, cold ones go direct."""
        if self.cache != "auto":
            return "buffered" if self.cache == "buffered" else "direct"
        opened = self._checkpoint.shards[shard]
        if shard not in self._warm:
            self._warm[shard] = page_cache.partly_resident(opened.fd)
        if not self._warm[shard]:
            return "direct"
        length = min(length, opened.size - offset)
        return "buffered" if page_cache.wholly_resident(opened.fd, offset, length) else "direct"

    def register(self, backend: Backend, shard: int) -> None:
        """Makes a shard known to the backend, once."""
        if self._known[shard] is not None:
            return
        opened = self._checkpoint.shards[shard]
        direct = self._direct_twin(shard) if self.cache in ("auto", "direct") else -1
        try:
            self._known[shard] = backend.register(
                OpenFile(opened.path, opened.fd, opened.size, direct, self.blocks[shard])
            )
        except BaseException:
            if direct >= 0:
                self._twins.remove(direct)
                os.close(direct)
            raise

    def _direct_twin(self, shard: int) -> int:
        """A descriptor for direct reads of a shard, or -1 with the reason in the report."""
        opened = self._checkpoint.shards[shard]
        twin, self.blocks[shard], refusal = open_direct(opened)
        if twin is None:
            if self.cache == "direct":
                raise ReadError(
                    f"{opened.path}: cache='direct', but {refusal}",
                    path=opened.path,
                    errno=errno.EINVAL,
                    hint="cache='auto' reads it through the page cache",
                )
            self._report.refusals[f"direct I/O on {opened.name}"] = refusal
            return -1
        self._twins.append(twin)
        return twin

    def close(self, backend: Backend | None) -> None:
        """Gives registrations and twins back. May be called again; registering starts anew."""
        for registration in self._known:
            if registration is not None and backend is not None:
                backend.deregister(registration)
        self._known = [None] * len(self._known)
        for twin in self._twins:
            os.close(twin)
        self._twins.clear()


class DirectFile(NamedTuple):
    """A second descriptor of a file, which bypasses the page cache and is its taker's to close; or
    None and the reason. Direct reads start and end on multiples of `block` bytes, in the file and
    in memory."""

    fd: int | None
    block: int
    refusal: str


def open_direct(shard: Shard) -> DirectFile:
    """Opens a shard's twin; where there can be none, it says why."""
    alignment = system.direct_alignment(shard.fd)
    if alignment is not None and alignment[1] == 0:
        refusal = "its filesystem says that it does no direct I/O"
        return DirectFile(None, DEFAULT_BLOCK_BYTES, refusal)
    block = max(alignment) if alignment is not None else DEFAULT_BLOCK_BYTES
    try:
        twin, refusal = shard.reopen_direct(), "its filesystem does no direct I/O"
    except OSError as error:
        twin, refusal = None, f"it cannot be opened for direct I/O: {error.strerror}"
    return DirectFile(twin, block, refusal)
