"""The I/O mode of each byte of a checkpoint, and the descriptors that direct reads need.

cache      wholly in the page cache      partly, or not at all
"auto"     mapped                        read into the page cache and mapped, if there is room;
                                         otherwise buffered where warm, direct where cold
others     as the name says, whatever the page cache holds

Files elsewhere, such as in an object store, are not in the page cache and are never mapped.

Not responsible for: whether reads fill the page cache (`page_cache_fill`), which bytes are read
(`session`), and mapping them (`memory.host_buffers`).
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

from gdsload._native import system
from gdsload.backends import Backend, OpenFile, Registration
from gdsload.backends.base import NO_FILE
from gdsload.checkpoint import Checkpoint, Shard
from gdsload.checkpoint.file_io import close_files
from gdsload.errors import CheckpointError, ReadError
from gdsload.loading.page_cache_fill import WITHOUT_BACKEND_BYTES, PageCacheFill
from gdsload.loading.settings import ReadSettings
from gdsload.memory import page_cache
from gdsload.planning.read_plan import (
    DEFAULT_BLOCK_BYTES,
    ByteRange,
    MergedRange,
    merged_ranges_of,
)
from gdsload.report import LoadReport
from gdsload.system.parallel import parallel_map
from gdsload.system.storage import Storage, remote_storage, storage_of

_COPY_BYTES = 128 << 10


class ShardAccess:
    """The shards of one checkpoint: their I/O modes, and their registrations with a backend.

    Attributes:
        cache: One of `CACHES`.
        blocks: By shard, the alignment in bytes of direct reads.
        report: Gets the reasons for refusals.
        fill: Whether reads fill the page cache.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        report: LoadReport,
        settings: ReadSettings,
    ) -> None:
        self._remote = checkpoint.remote
        if self._remote and settings.cache == "mapped":
            raise CheckpointError(
                f"{checkpoint.source}: cache='mapped', but only files of this machine can be mapped"
            )
        self.cache = settings.cache
        self.blocks = [DEFAULT_BLOCK_BYTES] * len(checkpoint.shards)
        self._checkpoint = checkpoint
        self.report = report
        self._registered: list[Registration | None] = [None] * len(checkpoint.shards)
        self._direct_fds: list[int] = []
        self._residency: dict[int, str] = {}  # by shard
        self._unreadable: set[int] = set()  # shards that did not get into the page cache
        self._storage: dict[int, Storage] = {}  # by device number
        self._drops = settings.page_cache == "drop" and not self._remote
        self.fill = PageCacheFill(checkpoint, settings)
        # What was not in the page cache: a descriptor that is closed here, and (offset, length).
        self._absent: list[tuple[int, list[tuple[int, int]]]] = []
        self._distant = any(shard.distant for shard in checkpoint.shards)
        # For a `safe_open` that nobody closes: it waits for nothing where garbage is collected.
        lists = self._direct_fds, self._absent
        unclosed = weakref.finalize(self, _drop_and_close, *lists, self._distant, wait_seconds=0.0)
        unclosed.atexit = False

    @property
    def files(self) -> list[Registration]:
        """A registration for each shard, as `Backend.prepare` takes them."""
        return [entry or NO_FILE for entry in self._registered]

    def fill_if_small(self, ranges_of: Mapping[int, Sequence[ByteRange]]) -> None:
        """Reads cold ranges of a small checkpoint on local storage into the page cache, so that
        they are mapped. A shard that fails is left to a backend. `ranges_of`: ranges by shard."""
        if not self.fill.small:
            return
        shards = self._checkpoint.shards
        cold = [
            (shard, merged_ranges_of(ranges))
            for shard, ranges in ranges_of.items()
            if not shards[shard].distant and not self.mapped(shard, ranges)
        ]

        def fill(cold: Sequence[tuple[int, Sequence[MergedRange]]]) -> None:
            for shard, ranges in cold:
                _will_need(shards[shard].fd, ranges)
            buffer = bytearray(_COPY_BYTES)
            for shard, ranges in cold:
                try:
                    for each in ranges:
                        for offset in range(each.offset, each.end, _COPY_BYTES):
                            os.preadv(shards[shard].fd, [buffer], offset)
                except OSError:
                    self._unreadable.add(shard)

        if cold:
            self.report.page_cache = (
                f"filled: up to {WITHOUT_BACKEND_BYTES:,} bytes are read into it"
            )
            # In a thread, so that a disk that hangs cannot block Ctrl-C.
            path = shards[cold[0][0]].path
            seconds = self._checkpoint.stall_seconds
            list(parallel_map(fill, [cold], path_of=lambda _: path, stall_seconds=seconds))

    def mapped(self, shard: int, ranges: Sequence[ByteRange]) -> bool:
        """Whether to map these ranges of a shard."""
        if self.cache not in ("auto", "mapped") or self._remote or shard in self._unreadable:
            return False
        if self.cache == "mapped":
            return True
        fd = self._checkpoint.shards[shard].fd
        # A fault on a page that is not there would be a round trip of distant storage.
        distant = self._storage_of(shard).distant
        warm = page_cache.wholly_resident if distant else page_cache.mostly_resident
        return all(warm(fd, each.offset, each.length) for each in merged_ranges_of(ranges))

    def io_mode_of(self, shard: int, offset: int, length: int) -> str:
        """The cheapest I/O mode for a transfer that does not fill the page cache."""
        if self._remote:
            return "buffered"
        if self.cache != "auto":
            return "buffered" if self.cache == "buffered" else "direct"
        opened = self._checkpoint.shards[shard]
        if shard not in self._residency:
            self._residency[shard] = page_cache.residency(opened.fd, opened.size)
        if self._residency[shard] != "some":
            return "buffered" if self._residency[shard] == "all" else "direct"
        length = min(length, opened.size - offset)
        warm = page_cache.wholly_resident(opened.fd, offset, length)
        return "buffered" if warm else "direct"

    def register(self, backend: Backend, shard: int) -> None:
        """Registers a shard with the backend, once. Raises ReadError if cache="direct" and the
        file cannot be read directly."""
        if self._registered[shard] is not None:
            return
        opened = self._checkpoint.shards[shard]
        if opened.remote is not None:
            storage = self._storage_of(shard)
            file = OpenFile(opened.path, -1, opened.size, storage=storage, remote=opened.remote)
            self._registered[shard] = backend.register(file)
            return
        if self._drops:
            self._note_absent(opened)
        direct_fd = self._open_direct(shard) if self.cache in ("auto", "direct") else -1
        try:
            self._registered[shard] = backend.register(
                OpenFile(
                    *(opened.path, opened.fd, opened.size, direct_fd, self.blocks[shard]),
                    self._storage_of(shard),
                )
            )
        except BaseException:
            if direct_fd >= 0:
                self._direct_fds.remove(direct_fd)
                close_files([direct_fd], distant=opened.distant)
            raise

    def _storage_of(self, shard: int) -> Storage:
        opened = self._checkpoint.shards[shard]
        device = opened.identity.dev
        if device not in self._storage:
            # Headers are read at once. The fastest of them waited for the storage alone.
            latency = min(
                each.first_read_seconds
                for each in self._checkpoint.shards
                if each.identity.dev == device
            )
            self._storage[device] = (
                storage_of(opened.filesystem, opened.preferred_bytes, latency)
                if opened.remote is None
                else remote_storage(opened.remote.scheme, latency)
            )
        return self._storage[device]

    @property
    def filesystem(self) -> str:
        """The type of the distant filesystem that was looked at first, or ""."""
        return next(filter(None, (storage.kind for storage in self._storage.values())), "")

    def _open_direct(self, shard: int) -> int:
        """A second descriptor of a shard, for direct reads; -1 with the reason in the report."""
        opened = self._checkpoint.shards[shard]
        if not opened.distant:
            found = _open_direct(opened)
        else:  # in a thread, which may hang
            (found,) = parallel_map(
                _open_direct,
                [opened],
                path_of=lambda shard: shard.path,
                discard=_close_direct,
                stall_seconds=self._checkpoint.stall_seconds,
            )
        direct_fd, self.blocks[shard], refusal, code = found
        if direct_fd is not None:
            self._direct_fds.append(direct_fd)
            return direct_fd
        if self.cache == "direct":
            raise ReadError(
                f"{opened.path}: cache='direct', but {refusal}",
                path=opened.path,
                errno=code,
                hint="cache='auto' reads it through the page cache",
            )
        self.report.refusals[f"direct I/O on {opened.name}"] = refusal
        return -1

    def _note_absent(self, shard: Shard) -> None:
        """Notes what `close` drops. The kernel tells it only to those who may write to the file."""
        try:
            absent = list(page_cache.absent_ranges(shard.fd, 0, shard.size))
            self._absent.append((os.dup(shard.fd), absent))
        except OSError as error:
            self.report.refusals[f"page_cache='drop' on {shard.name}"] = str(error.strerror)

    def close(self, backend: Backend | None) -> None:
        """Gives registrations back, closes the backend and the direct descriptors, and drops from
        the page cache what was not there before. A later `register` starts anew."""
        registered, self._registered = self._registered, [None] * len(self._registered)
        with ExitStack() as stack:
            stack.callback(_drop_and_close, self._direct_fds, self._absent, self._distant)
            if backend is not None:
                stack.callback(backend.close)  # its threads may still read from the descriptors
                for registration in registered:
                    if registration is not None:
                        backend.deregister(registration)


def _drop_and_close(
    direct_fds: list[int],
    absent: list[tuple[int, list[tuple[int, int]]]],
    distant: bool,
    **wait: float,
) -> None:
    """Drops ranges from the page cache, closes all descriptors, and empties the lists."""
    dropped, left = list(absent), direct_fds + [fd for fd, _ in absent]
    absent.clear()
    direct_fds.clear()
    try:
        for fd, ranges in dropped:
            for offset, length in ranges:
                with suppress(OSError):  # only a hint
                    os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)
    finally:  # also if Ctrl-C ends it
        close_files(left, distant=distant, **wait)


def _will_need(fd: int, ranges: Sequence[MergedRange]) -> None:
    """Makes the kernel start to read into the page cache."""
    for each in ranges:
        with suppress(OSError):  # only a hint
            os.posix_fadvise(fd, each.offset, each.length, os.POSIX_FADV_WILLNEED)


def _close_direct(found: tuple[int | None, int, str, int]) -> None:
    if found[0] is not None:
        close_files([found[0]], distant=True)


def _open_direct(shard: Shard) -> tuple[int | None, int, str, int]:
    """Opens a shard again with O_DIRECT: the descriptor or None, the block size in bytes, and the
    reason for None with its errno. Direct reads start and end on a multiple of the block, in file
    and memory."""
    alignment = system.direct_alignment(shard.fd)
    if alignment is not None and alignment[1] == 0:
        why = "its filesystem says that it does no direct I/O"
        return None, DEFAULT_BLOCK_BYTES, why, errno.EINVAL
    block = max(alignment) if alignment is not None else DEFAULT_BLOCK_BYTES
    try:
        return shard.reopen_direct(), block, "its filesystem does no direct I/O", errno.EINVAL
    except OSError as error:
        why = f"it cannot be opened for direct I/O: {error.strerror}"
        return None, block, why, error.errno or 0
