"""One file of a checkpoint: its descriptor, and what tells this version of it from another.

From here on nobody opens a file by its name again, except after `Shard.rest`, and then only to find
the same file: header and data come from the same version.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import NamedTuple

from gdsload.checkpoint.file_io import open_regular
from gdsload.errors import CheckpointError, FileChanged

# A direct read aligned to this is accepted by every file system we know, whatever a page is.
_DIRECT_ALIGN_BYTES = 4096


class Identity(NamedTuple):
    """What tells one version of a file from another, as fstat gives it."""

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
    """One opened file. It owns its descriptor: close() gives it back, and so does the collector.

    `path` is for messages, `name` is what an index calls the file, `size` and `data_start` are in
    bytes, `identity` was taken on the descriptor when it was opened.
    """

    __slots__ = (
        "__weakref__", "_fd", "_resting", "data_start", "identity", "metadata", "name", "path",
        "size",
    )  # fmt: skip

    def __init__(self, fd: int, identity: Identity, *, path: str, name: str) -> None:
        self._fd = fd
        self._resting = ""  # where it was, while the descriptor is given back for some time
        self.path = path
        self.name = name
        self.identity = identity
        self.size = identity.size
        self.data_start = 0
        self.metadata: dict[str, str] = {}

    @property
    def fd(self) -> int:
        """The descriptor, open for buffered reading. Raises CheckpointError once closed."""
        if self._resting:
            self._reopen()
        if self._fd < 0:
            raise CheckpointError(f"{self.path}: the checkpoint is closed", path=self.path)
        return self._fd

    @property
    def closed(self) -> bool:
        return self._fd < 0 and not self._resting

    def quiesce(self) -> None:
        """Gives the descriptor back until it is next asked for. It is then opened by name, and
        FileChanged is raised where that is no longer the same version of the same file."""
        if not self.closed:
            where = self._resting or os.path.abspath(self.path)
            self.close()
            self._resting = where

    def _reopen(self) -> None:
        fd, _ = open_regular(self._resting, shown_as=self.path)
        self._fd, self._resting = fd, ""
        try:
            self.verify_unchanged()
        except FileChanged:
            self.close()
            raise

    def reopen_direct(self) -> int | None:
        """A descriptor of the same file that bypasses the page cache; the caller closes it.

        It is opened through the descriptor, never by name. None where the file system does not
        do direct reads; raises OSError when it fails otherwise.
        """
        try:
            twin = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return None
            raise
        try:
            status = os.fstat(twin)
            if (status.st_dev, status.st_ino) != self.identity[:2]:
                raise OSError(errno.ESTALE, "reopening gave another file", self.path)
        except BaseException:
            os.close(twin)
            raise
        return twin

    def direct_alignment(self) -> tuple[int, int]:
        """Bytes that address, and offset and length, of a direct read must be multiples of."""
        statx: Callable[..., object] | None = getattr(os, "statx", None)  # Python 3.15
        mask = getattr(os, "STATX_DIOALIGN", None)
        if statx is None or mask is None:
            return _DIRECT_ALIGN_BYTES, _DIRECT_ALIGN_BYTES
        status = statx(self.fd, mask)
        memory = getattr(status, "stx_dio_mem_align", None) or _DIRECT_ALIGN_BYTES
        return memory, getattr(status, "stx_dio_offset_align", None) or _DIRECT_ALIGN_BYTES

    def verify_unchanged(self) -> None:
        """Raises FileChanged when the file is no longer what was opened."""
        try:
            status = os.fstat(self.fd)
        except OSError as error:
            raise FileChanged(
                f"{self.path}: the file cannot be looked at any more: {error.strerror}",
                path=self.path,
            ) from error
        now = Identity.of(status)
        if now == self.identity:
            return
        if now.size != self.size:
            what = f"its size went from {self.size} to {now.size} bytes"
        elif now.mtime_ns != self.identity.mtime_ns:
            what = "it was written to (its modification time moved)"
        elif now[:2] != self.identity[:2]:
            what = "it became another file"
        elif status.st_nlink == 0:
            what = "it was deleted or replaced"
        else:
            what = "its status changed (ctime moved: mode, owner, links or times)"
        raise FileChanged(
            f"{self.path}: the file changed while it was read: {what}", path=self.path
        )

    def close(self) -> None:
        """Gives the descriptor back. May be called again."""
        fd, self._fd, self._resting = self._fd, -1, ""
        if fd >= 0:
            os.close(fd)

    def __del__(self, _close: Callable[[int], None] = os.close) -> None:
        # The default keeps os.close alive while the interpreter goes down.
        fd = getattr(self, "_fd", -1)
        if fd >= 0:
            self._fd = -1
            _close(fd)

    def __reduce__(self) -> str:
        raise TypeError("a Shard owns a file descriptor and cannot be copied or pickled")

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"fd {self._fd}"
        return f"<Shard {self.path} ({self.size} bytes, {state})>"
