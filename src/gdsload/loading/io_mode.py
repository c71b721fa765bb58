"""The I/O mode of each byte of a checkpoint, and the descriptors that direct reads need.

cache      wholly in the page cache      partly, or not at all
"auto"     mapped                        read into the page cache and mapped, if there is room;
                                         otherwise buffered where warm, direct where cold
others     as the name says, whatever the page cache holds

Remote files, such as in an object store, are not in the page cache and are never mapped.

Not responsible for: whether reads of a backend fill the page cache (`page_cache_fill`), which bytes
are read (`session`), and mapping them (`memory.host_buffers`).
"""

from __future__ import annotations

import errno
import os
import resource
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import NamedTuple

from gdsload._native import system
from gdsload.backends import Backend, OpenFile, Registration
from gdsload.backends.base import NO_FILE
from gdsload.checkpoint import Checkpoint, Shard
from gdsload.checkpoint.file_io import close_files
from gdsload.errors import CheckpointError, ReadError, StallError
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
from gdsload.system.parallel import in_thread, note_progress, parallel_map
from gdsload.system.storage import Storage, reads_in_flight, remote_storage, storage_of

_COPY_BYTES = 128 << 10
_ALIGN_BYTES = 8  # to which safetensors aligns the data of a file
# Of the descriptors of the process, for the shards and their direct reads. Imports need some, too.
_DESCRIPTOR_PERCENT = 75
_FEW_DESCRIPTORS = "the process may open too few files (ulimit -n)"


class _Direct(NamedTuple):
    """A descriptor for direct reads of a shard, or why there is none."""

    fd: int | None
    block: int  # bytes; direct reads start and end on a multiple of it, in file and memory
    refusal: str = ""
    errno: int = errno.EINVAL  # of the refusal


class ShardAccess:
    """The shards of one checkpoint: their I/O modes, and their registrations with a backend.

    Attributes:
        cache: One of `CACHES`.
        blocks: By shard, the alignment in bytes of direct reads.
        report: Gets the reasons for refusals.
        fill: Whether reads fill the page cache.
        copies: Whether all that is mapped may be copied from there.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        report: LoadReport,
        settings: ReadSettings,
        *,
        copies: bool = False,
    ) -> None:
        """Opens nothing. Raises CheckpointError if remote files are to be mapped."""
        self._remote, self.copies = checkpoint.remote, copies
        if self._remote and settings.cache == "mapped":
            title = checkpoint.source
            raise CheckpointError(
                f"{title}: cache='mapped', but only local files can be mapped", path=title
            )
        self.cache = settings.cache
        self.blocks = [DEFAULT_BLOCK_BYTES] * len(checkpoint.shards)
        self._checkpoint = checkpoint
        self.report = report
        self._registered: list[Registration | None] = [None] * len(checkpoint.shards)
        self._direct_fds: dict[int, int] = {}  # by shard
        self._residency: dict[int, str] = {}  # by shard
        self._unreadable: set[int] = set()  # shards that did not get into the page cache
        self._storage: dict[int, Storage] = {}  # by device number
        self._must_drop = settings.page_cache == "drop"
        # btrfs reads compressed files, and into memory that nobody has touched, by the page cache.
        direct = settings.cache in ("auto", "direct")
        self._drops = not self._remote and (
            self._must_drop or (direct and checkpoint.shards[0].fstype == "btrfs")
        )
        self.fill = PageCacheFill(checkpoint, settings)
        # What was not in the page cache: a descriptor that is closed here, and (offset, length).
        self._absent: list[tuple[int, list[tuple[int, int]]]] = []
        self._may_hang = any(shard.may_hang for shard in checkpoint.shards)
        # For a `safe_open` that nobody closes: it waits for nothing where garbage is collected.
        left = self._direct_fds, self._absent
        unclosed = weakref.finalize(self, _drop_and_close, *left, self._may_hang, wait_seconds=0.0)
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

        def fill() -> None:
            for shard, ranges in cold:
                _will_need(shards[shard].fd, ranges)
            buffer = bytearray(_COPY_BYTES)
            for shard, ranges in cold:
                try:
                    for each in ranges:
                        for offset in range(each.offset, each.end, _COPY_BYTES):
                            os.preadv(shards[shard].fd, [buffer], offset)
                            note_progress()
                except OSError:
                    self._unreadable.add(shard)

        if cold:
            self.report.page_cache = (
                f"filled: checkpoints of up to {WITHOUT_BACKEND_BYTES:,} bytes always are"
            )
            path = shards[cold[0][0]].path
            in_thread(fill, path, stall_seconds=self._checkpoint.stall_seconds)

    def mapped(self, shard: int, ranges: Sequence[ByteRange]) -> bool:
        """Whether to map these ranges of a shard."""
        if self.cache not in ("auto", "mapped") or self._remote or shard in self._unreadable:
            return False
        if self.cache == "mapped":
            return True
        return self._checkpoint.answer_to(partial(self._is_warm, shard, ranges), [shard])

    def _is_warm(self, shard: int, ranges: Sequence[ByteRange]) -> bool:
        """Whether the page cache holds these ranges of a shard, nearly all of them."""
        opened = self._checkpoint.shards[shard]
        # A fault on a page that is not there would be a round trip of distant storage.
        warm = page_cache.wholly_resident if opened.distant else page_cache.mostly_resident
        merged = merged_ranges_of(ranges)
        if not all(warm(opened.fd, each.offset, each.length) for each in merged):
            return False
        if not (opened.distant or self._completed(shard, ranges, merged)):
            return False
        # The kernel also counts pages that are still being read, and pages whose read-ahead failed,
        # of which it reports no error. Where either is possible, `has_arrived` confirms the range.
        has_read = self._registered[shard] is not None
        return not (opened.distant or has_read or reads_in_flight(opened.identity.dev)) or all(
            page_cache.has_arrived(opened.fd, each.offset, each.length) for each in merged
        )

    def _completed(
        self, shard: int, ranges: Sequence[ByteRange], merged: Sequence[MergedRange]
    ) -> bool:
        """Reads the absent pages of ranges that are mostly in the page cache: a copy from a mapping
        would end the process by SIGBUS if the disk failed on such a page. Large ranges are checked
        only if the load copies from them, as it does of tensors at unaligned offsets: asking about
        each of their pages takes too long otherwise. Windows of a `WindowWriter` are never large.

        False if a page cannot be read: the backend then reads the shard and reports the error.
        """
        opened = self._checkpoint.shards[shard]

        def complete(each: MergedRange) -> None:
            try:
                system.populate(opened.fd, each.offset, each.length)
            except OSError:
                self._unreadable.add(shard)

        copies = self.copies or any(each.offset % _ALIGN_BYTES for each in ranges)
        partly = [
            each
            for each in merged
            if (copies or not page_cache.is_large(each.length))
            and not page_cache.wholly_resident(opened.fd, each.offset, each.length)
        ]
        # In threads, so that a disk that hangs cannot block Ctrl-C.
        seconds = self._checkpoint.stall_seconds
        for _ in parallel_map(
            complete, partly, path_of=lambda _: opened.path, stall_seconds=seconds
        ):
            note_progress()
        return shard not in self._unreadable

    def io_mode_of(self, shard: int, offset: int, length: int) -> str:
        """The cheapest I/O mode for a transfer that does not fill the page cache. Distant storage
        may be asked, in this thread."""
        if self._remote:
            return "buffered"
        if self.cache != "auto":
            return "direct" if self.cache == "direct" else "buffered"
        opened = self._checkpoint.shards[shard]
        if shard not in self._residency:
            self._residency[shard] = page_cache.residency(opened.fd, opened.size)
            note_progress()
        if self._residency[shard] != "some":
            return "buffered" if self._residency[shard] == "all" else "direct"
        length = min(length, opened.size - offset)
        warm = page_cache.wholly_resident(opened.fd, offset, length)
        note_progress()
        return "buffered" if warm else "direct"

    def register(self, backend: Backend, *shards: int) -> None:
        """Registers shards with the backend, each once. Raises ReadError if cache="direct" and a
        file cannot be read directly."""
        new = [shard for shard in shards if self._registered[shard] is None]
        if self.cache in ("auto", "direct") and not self._remote:
            self._open_direct([shard for shard in new if shard not in self._direct_fds])
            if not self._drops and not self._direct_fds.keys() >= set(new):
                self.fill.refuse_direct(self.report, some=bool(self._direct_fds))
        for shard in new:
            self._register(backend, shard)

    def fit_blocks(self, shards: Iterable[int], most: int) -> None:
        """Reads files through the page cache whose direct reads would be longer than `most` bytes.
        Raises ReadError if cache="direct"."""
        for shard in shards:
            if self.blocks[shard] > most:
                why = f"a direct read has {self.blocks[shard]:,} bytes, and at most {most:,} here"
                self._note_direct(shard, _Direct(None, DEFAULT_BLOCK_BYTES, why))

    def _register(self, backend: Backend, shard: int) -> None:
        opened = self._checkpoint.shards[shard]
        if opened.remote is not None:
            storage = self._storage_of(shard)
            file = OpenFile(opened.path, -1, opened.size, storage=storage, remote=opened.remote)
            self._registered[shard] = backend.register(file)
            return
        if self._drops:
            self._note_absent(shard)
        try:
            self._registered[shard] = backend.register(
                OpenFile(
                    opened.path,
                    opened.fd,
                    opened.size,
                    self._direct_fds.get(shard, -1),
                    self.blocks[shard],
                    self._storage_of(shard),
                )
            )
        except BaseException:
            if shard in self._direct_fds:
                close_files([self._direct_fds.pop(shard)], may_hang=opened.may_hang)
            raise

    def _storage_of(self, shard: int) -> Storage:
        opened = self._checkpoint.shards[shard]
        device = opened.identity.dev
        if device not in self._storage:
            # Headers are read at once. The fastest of them waited for the storage alone. Those that
            # were in the page cache did not wait.
            latency = min(
                (
                    each.first_read_seconds
                    for each in self._checkpoint.shards
                    if each.identity.dev == device and each.first_read_seconds
                ),
                default=0.0,
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

    def _open_direct(self, shards: Sequence[int]) -> None:
        """Opens second descriptors of shards, for direct reads; the report has the reason where
        there is none. Those that may hang are opened in parallel threads."""
        opened, room = self._checkpoint.shards, self._room_for_direct()
        for shard in shards[room:]:
            refused = _Direct(None, self.blocks[shard], _FEW_DESCRIPTORS, errno.EMFILE)
            self._note_direct(shard, refused)
        hanging = [shard for shard in shards[:room] if opened[shard].may_hang]
        for shard in shards[:room]:
            if not opened[shard].may_hang:
                self._note_direct(shard, _reopened(opened[shard]))
        opening = parallel_map(
            _reopened,
            [opened[shard] for shard in hanging],
            path_of=lambda shard: shard.path,
            discard=_close_direct,
            stall_seconds=self._checkpoint.stall_seconds,
        )
        with closing(opening):
            for shard, found in zip(hanging, opening, strict=True):
                self._note_direct(shard, found)

    def _room_for_direct(self) -> int:
        """How many direct descriptors may be opened, so that the process keeps some for others. All
        if only direct reads are wanted."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if most == resource.RLIM_INFINITY or self.cache == "direct":
            return len(self.blocks)
        taken = (2 if self._drops else 1) * len(self.blocks) + len(self._direct_fds)
        return max(0, most * _DESCRIPTOR_PERCENT // 100 - taken)

    def _note_direct(self, shard: int, found: _Direct) -> None:
        opened = self._checkpoint.shards[shard]
        self.blocks[shard] = found.block
        if found.fd is not None:
            self._direct_fds[shard] = found.fd
        elif self.cache == "direct":
            raise ReadError(
                f"{opened.path}: cache='direct', but {found.refusal}",
                path=opened.path,
                errno=found.errno,
                hint="cache='auto' reads it through the page cache",
            )
        else:
            self.report.refusals[f"direct I/O on {opened.name}"] = found.refusal

    def _note_absent(self, shard: int) -> None:
        """Notes what `close` drops. The kernel tells it only to those who may write to the file."""
        opened = self._checkpoint.shards[shard]
        try:
            question = partial(page_cache.absent_ranges, opened.fd, opened.size)
            absent = self._checkpoint.answer_to(question, [shard])
            self._absent.append((os.dup(opened.fd), absent))
        except StallError:
            raise
        except OSError as error:
            self.report.refusals[f"page_cache='drop' on {opened.name}"] = str(error.strerror)

    def forget_backend(self) -> None:
        """In a child of a fork: files are registered anew with another backend."""
        self._registered = [None] * len(self._registered)

    def close(self, backend: Backend | None) -> None:
        """Gives registrations back, closes the backend and the direct descriptors, and drops from
        the page cache what was not there before. A later `register` starts anew."""
        registered, self._registered = self._registered, [None] * len(self._registered)
        if self.fill.active() and not self._must_drop:
            self._absent[:] = [(fd, []) for fd, _ in self._absent]
        with ExitStack() as stack:
            stack.callback(_drop_and_close, self._direct_fds, self._absent, self._may_hang)
            if backend is not None:
                stack.callback(backend.close)  # its threads may still read from the descriptors
                for registration in registered:
                    if registration is not None:
                        backend.deregister(registration)


def _drop_and_close(
    direct_fds: dict[int, int],
    absent: list[tuple[int, list[tuple[int, int]]]],
    may_hang: bool,
    **wait: float,
) -> None:
    """Drops ranges from the page cache, closes all descriptors, and forgets them."""
    dropped, left = list(absent), [*direct_fds.values(), *(fd for fd, _ in absent)]
    absent.clear()
    direct_fds.clear()
    try:
        for fd, ranges in dropped:
            for offset, length in ranges:
                with suppress(OSError):  # only a hint
                    os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)
    finally:  # also if Ctrl-C ends it
        close_files(left, may_hang=may_hang, **wait)


def _will_need(fd: int, ranges: Sequence[MergedRange]) -> None:
    """Makes the kernel start to read into the page cache."""
    for each in ranges:
        with suppress(OSError):  # only a hint
            os.posix_fadvise(fd, each.offset, each.length, os.POSIX_FADV_WILLNEED)


def _close_direct(found: _Direct) -> None:
    if found.fd is not None:
        close_files([found.fd], may_hang=True)


def _reopened(shard: Shard) -> _Direct:
    """Opens a shard again with O_DIRECT."""
    alignment = system.direct_alignment(shard.fd)
    if alignment is not None and alignment[1] == 0:
        why = "its filesystem says that it does no direct I/O"
        return _Direct(None, DEFAULT_BLOCK_BYTES, why)
    block = max(alignment) if alignment is not None else DEFAULT_BLOCK_BYTES
    try:
        fd = shard.reopen_direct()
    except OSError as error:
        # By its descriptor: not the file is missing then.
        cause = "/proc is not mounted" if error.errno == errno.ENOENT else error.strerror
        why = f"it cannot be opened for direct I/O: {cause}"
        return _Direct(None, block, why, error.errno or 0)
    return _Direct(fd, block, "its filesystem does no direct I/O" if fd is None else "")
