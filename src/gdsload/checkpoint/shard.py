"""One file of a checkpoint: its descriptor, and the identity of the version that was opened.

After opening, the file is not opened by name again, except after `Shard.quiesce`, and then only if
it is still the same version: header and data come from one version. Finding shards and parsing
headers is done elsewhere.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from gdsload.checkpoint.file_io import open_regular
from gdsload.errors import CheckpointError, FileChanged


class Identity(NamedTuple):
    """Tells one version of a file from another; the fields are those of fstat."""

    dev: int
    ino: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Identity:
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )


class Shard:
    """One open file. It owns its descriptor; close() or garbage collection releases it.

    Attributes:
        path: The path as the user gave it, for messages.
        name: The name by which an index refers to the file.
        identity: The version of the file, taken from the descriptor when it was opened.
        size: The size of the file in bytes.
        data_start: The first byte after the header.
        metadata: The `__metadata__` of the header.
        first_read_seconds: Seconds of the first read: the latency of distant storage, unless the
            page cache had it.
    """

    def __init__(self, fd: int, identity: Identity, *, path: str, name: str) -> None:
        self._fd = fd
        self._quiesced = False  # whether the descriptor is released by quiesce()
        # The process may change its directory before it opens the file again.
        self._reopened_path = path
        with suppress(OSError):  # the current directory was deleted
            self._reopened_path = os.path.join(os.getcwd(), path)
        self.path = path
        self.name = name
        self.identity = identity
        self.size = identity.size
        self.data_start = 0
        self.metadata: dict[str, str] = {}
        self.first_read_seconds = 0.0

    @property
    def fd(self) -> int:
        """The descriptor, open for buffered reading. Raises CheckpointError if closed."""
        if self._quiesced:
            self._fd, _ = open_regular(self._reopened_path, shown_as=self.path)
            self._quiesced = False
            try:
                self.verify_unchanged()
            except FileChanged:
                self.close()
                raise
        if self._fd < 0:
            raise CheckpointError(f"{self.path}: the checkpoint is closed", path=self.path)
        return self._fd

    @property
    def closed(self) -> bool:
        return self._fd < 0 and not self._quiesced

    def quiesce(self) -> None:
        """Closes the descriptor until it is needed again.

        The file is then opened by name. FileChanged is raised if that is another version of it.
        """
        if not self.closed:
            self.close()
            self._quiesced = True

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
            status = os.fstat(fd)
        except OSError as error:
            raise FileChanged(
                f"{self.path}: fstat failed: {error.strerror}", path=self.path
            ) from error
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
        fd, self._fd, self._quiesced = self._fd, -1, False
        if fd >= 0:
            os.close(fd)

    def __del__(self, _close: Callable[[int], None] = os.close) -> None:
        # The default value keeps os.close alive while the interpreter shuts down.
        fd = getattr(self, "_fd", -1)
        if fd >= 0:
            self._fd = -1
            _close(fd)

    def __reduce__(self) -> str:
        raise TypeError("a Shard owns a file descriptor and cannot be copied or pickled")
