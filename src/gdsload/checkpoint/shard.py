"""One file of a checkpoint, and the identity of the version that was opened.

    Shard          a file of this machine: it has a descriptor
    RemoteShard    a remote file, such as in an object store

After opening, the file is not opened by name again, except after `quiesce_shards`, and then only if
it is still the same version: header and data come from one version. Finding shards and parsing
headers is done elsewhere.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import NamedTuple

from gdsload._native import system
from gdsload.checkpoint.file_io import close_files, open_regular, read_exactly
from gdsload.errors import CheckpointError, FileChanged
from gdsload.remote.directory import RemoteDirectory
from gdsload.remote.file import RemoteFile
from gdsload.system.lifecycle import fork_safe_lock
from gdsload.system.parallel import in_thread
from gdsload.system.storage import OVERLAY, is_distant

_openings = count(1)
_lock = fork_safe_lock(sys.modules[__name__])


class Identity(NamedTuple):
    """Tells one version of a file from another; all fields but the last are those of fstat.

    For a remote file `remote` is its key and version, and `ino` differs for each opening if the
    version does not stand for the bytes.
    """

    dev: int
    ino: int
    size: int
    mtime_ns: int
    ctime_ns: int
    remote: tuple[str, str] = ("", "")

    @classmethod
    def of(cls, status: os.stat_result) -> Identity:
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )

    @classmethod
    def of_remote(cls, size: int, remote: tuple[str, str], opening: int = 0) -> Identity:
        return cls(-1, opening, size, 0, 0, remote)


class Shard:
    """One open file. It owns its descriptor; close() or garbage collection releases it.

    Attributes:
        path: The path as the user gave it, for messages.
        name: The name by which an index refers to the file.
        identity: The version of the file, taken from the descriptor when it was opened.
        remote: The remote file that it stands for; None for a file of this machine.
        directory: The remote directory that it is in, also of a copy in the local cache.
        origin: Of a copy in the local cache: the key and the version of the remote file.
        size: The size of the file in bytes.
        fstype: The type of its filesystem, such as "nfs4" or "btrfs"; "" if its device number is
            that of a disk, or if the type is not known.
        preferred_bytes: The size of a read that its filesystem prefers.
        data_start: The first byte after the header.
        metadata: The `__metadata__` of the header; None if it has none.
        first_read_seconds: Seconds of the first read: the latency of distant storage; 0.0 if the
            page cache of this machine had its first page.
    """

    remote: RemoteFile | None = None
    directory: RemoteDirectory | None = None
    origin: tuple[str, str] = ("", "")

    def __init__(
        self,
        fd: int,
        identity: Identity,
        *,
        path: str,
        name: str,
        fstype: str = "",
        preferred_bytes: int = 0,
    ) -> None:
        self._fd = fd
        self._quiesced = False  # whether the descriptor is released by quiesce()
        # The process may change its directory before it opens the file again.
        self.absolute_path = path
        with suppress(OSError):  # the current directory was deleted
            self.absolute_path = os.path.join(os.getcwd(), path)
        self.path = path
        self.name = name
        self.identity = identity
        self.size = identity.size
        self.fstype = fstype
        self.preferred_bytes = preferred_bytes
        self.data_start = 0
        self.metadata: dict[str, str] | None = None
        self.first_read_seconds = 0.0

    @property
    def fd(self) -> int:
        """The descriptor, open for buffered reading. Raises CheckpointError if closed."""
        if self._quiesced:
            self._reopen()
        if self._fd < 0:
            raise CheckpointError(f"{self.path}: the checkpoint is closed", path=self.path)
        return self._fd

    def _reopen(self) -> None:
        opened = partial(open_regular, self.absolute_path, shown_as=self.path)
        if self.may_hang:
            fd, status = in_thread(
                opened, self.path, discard=lambda late: close_files([late[0]], may_hang=True)
            )
        else:
            fd, status = opened()
        try:
            if self.cached:
                with suppress(OSError):  # the filesystem has no locks
                    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # the cache does not remove it
                    status = os.fstat(fd)
            self._require_same(status)
            with _lock:  # another thread may have opened it meanwhile
                if self._quiesced:
                    self._fd, fd, self._quiesced = fd, -1, False
        finally:
            if fd >= 0:
                os.close(fd)

    @property
    def closed(self) -> bool:
        return self._fd < 0 and not self._quiesced

    def require_open(self) -> None:
        """Raises CheckpointError if it is closed."""
        _ = self.fd

    @property
    def cached(self) -> bool:
        """Whether it is a copy in the local cache."""
        return self.directory is not None and self.remote is None

    @property
    def original_path(self) -> str:
        """The path or URL of the file that `original` identifies."""
        return self.origin[0] or self.path

    @property
    def original(self) -> Identity:
        """The identity of its bytes: that of the remote file if it is a copy, else its own."""
        return Identity.of_remote(self.size, self.origin) if self.cached else self.identity

    @property
    def filesystem(self) -> str:
        """The type of its filesystem if this is distant, else ""."""
        return self.fstype if self.distant else ""

    @property
    def distant(self) -> bool:
        """Whether a network or a daemon, which may not answer, is between it and its storage."""
        return is_distant(self.fstype)

    @property
    def may_hang(self) -> bool:
        """Whether system calls on it may wait without end. Lower layers of overlays are distant,
        perhaps."""
        return self.distant or self.fstype == OVERLAY

    @property
    def on_disk(self) -> bool:
        """Whether it is on a disk of this machine."""
        return not (self.remote or self.distant) and bool(os.major(self.identity.dev))

    def read(self, offset: int, nbytes: int) -> bytes:
        """Reads a few bytes, such as the header.

        Raises:
            ReadError: The read failed.
            CheckpointError: The file ended early, or is closed.
        """
        return read_exactly(self.fd, offset, nbytes, self.path)

    def reopen_direct(self) -> int | None:
        """Opens the same file for direct I/O, by its descriptor and not by its name.

        Returns:
            A descriptor that the caller closes, or None if the file system has no direct I/O.

        Raises:
            OSError: Opening failed for another reason.
        """
        try:
            fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return None
            raise
        try:
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) != self.identity[:2]:
                raise OSError(errno.ESTALE, "reopening gave another file", self.path)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def verify_unchanged(self) -> None:
        """Raises FileChanged if the file is no longer the version that was opened."""
        fd = self.fd
        try:
            if self.distant:
                system.refresh_attributes(fd)
            status = os.fstat(fd)
        except OSError as error:
            raise FileChanged(
                f"{self.path}: fstat failed: {error.strerror}", path=self.path
            ) from error
        self._require_same(status)

    def _require_same(self, status: os.stat_result) -> None:
        now = Identity.of(status)
        if now == self.identity:
            return
        if now.size != self.size:
            change = f"its size went from {self.size} to {now.size} bytes"
        elif now.mtime_ns != self.identity.mtime_ns:
            change = "it was written to (its modification time moved)"
        elif now[:2] != self.identity[:2]:
            change = "it became another file"
        elif status.st_nlink == 0:
            change = "it was deleted or replaced"
        else:
            change = "its status changed (ctime moved: mode, owner, links or times)"
        raise FileChanged(
            f"{self.path}: the file changed while it was read: {change}", path=self.path
        )

    def close(self) -> None:
        """Closes the descriptor. May be called again."""
        close_shards([self])

    def _leave_fd(self, *, quiesced: bool) -> int:
        """The descriptor, which the caller closes; -1 if there is none. From now on the shard is
        quiesced or closed: closing the descriptor may take long, or be interrupted."""
        fd, self._fd, self._quiesced = self._fd, -1, quiesced
        return fd

    def __del__(
        self,
        _close: Callable[[int], None] = os.close,
        _finalizing: Callable[[], bool] = sys.is_finalizing,
    ) -> None:
        # Default values keep functions alive while the interpreter shuts down, when the names of
        # this module may be gone.
        fd = getattr(self, "_fd", -1)
        if fd < 0:
            return
        self._fd = -1
        if getattr(self, "may_hang", False) and not _finalizing():
            close_files([fd], may_hang=True, wait_seconds=0.0)
            return
        try:  # noqa: SIM105
            _close(fd)
        except OSError:
            pass

    def __reduce__(self) -> str:
        raise TypeError("a Shard owns a file descriptor and cannot be copied or pickled")


def close_shards(shards: Iterable[Shard]) -> None:
    """Closes shards of one checkpoint. May be called again."""
    _release(shards, quiesced=False)


def quiesce_shards(shards: Iterable[Shard]) -> None:
    """Releases the descriptors or connections of shards until they are needed again.

    Files are then opened by name. FileChanged is raised if one is another version.
    """
    _release([shard for shard in shards if not shard.closed], quiesced=True)


def _release(shards: Iterable[Shard], *, quiesced: bool) -> None:
    quick: list[int] = []
    slow: list[int] = []  # those that may hang
    try:
        for shard in shards:
            if shard.remote is not None:
                if quiesced:
                    shard.remote.quiesce()
                else:
                    shard.close()
            elif (fd := shard._leave_fd(quiesced=quiesced)) >= 0:
                (slow if shard.may_hang else quick).append(fd)
    finally:  # also if Ctrl-C ends it: nobody else knows these
        try:
            if quick:
                close_files(quick)
        finally:
            if slow:
                close_files(slow, may_hang=True)


class RemoteShard(Shard):
    """One open remote file. It has no descriptor.

    Attributes:
        remote: The file.
        directory: The directory that it is in.
    """

    remote: RemoteFile
    directory: RemoteDirectory

    def __init__(self, directory: RemoteDirectory, name: str) -> None:
        """Opens it. Raises CheckpointError."""
        started = time.monotonic()
        file = directory.open(name)
        seconds = time.monotonic() - started
        self.remote = file
        self.directory = directory
        self._closed = False
        number = 0 if file.version_is_exact else next(_openings)
        identity = Identity.of_remote(file.size, (file.key, file.version), number)
        super().__init__(-1, identity, path=file.url, name=name)
        self.first_read_seconds = seconds

    @property
    def fd(self) -> int:
        raise CheckpointError(f"{self.path}: this is not a file of this machine", path=self.path)

    @property
    def closed(self) -> bool:
        return self._closed

    def require_open(self) -> None:
        if self._closed:
            raise CheckpointError(f"{self.path}: the checkpoint is closed", path=self.path)

    def read(self, offset: int, nbytes: int) -> bytes:
        self.require_open()
        return self.remote.read(offset, nbytes)

    def reopen_direct(self) -> int | None:
        """None: there is no direct I/O."""

    def verify_unchanged(self) -> None:
        self.require_open()
        self.remote.verify_unchanged()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.remote.close()

    def __reduce__(self) -> str:
        raise TypeError("a Shard owns a connection and cannot be copied or pickled")
