"""Tells loads of one file, in all processes of this machine, of one another.

Each load holds a shared lock on a byte far behind the end of the file. Whoever could not lock that
byte exclusively is not alone. Nothing is written. The kernel releases the lock when the file is
closed and no tensor is mapped from it any more, or the process dies. Not responsible for what loads
do together (`gdsload.loading.io_mode`).
"""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import suppress

from gdsload._native.mapped import LOAD_LOCK_OFFSET

_FLOCK = struct.Struct("@hhqqi0q")  # type, whence, start, length, process


def announce(fd: int) -> bool:
    """Announces a load: whether others of the file go on, or have left mappings of it.

    Of two loads that begin at the same time, both see each other. False where the filesystem has no
    locks. The lock belongs to the open file description: loads that share `fd` count as one.
    """
    with suppress(OSError):
        _lock(fd, fcntl.F_OFD_SETLK, fcntl.F_RDLCK)
    return others(fd)


def others(fd: int) -> bool:
    """Whether other loads of the file have announced themselves."""
    try:
        return _lock(fd, fcntl.F_OFD_GETLK, fcntl.F_WRLCK) != fcntl.F_UNLCK
    except OSError:
        return False


def _lock(fd: int, command: int, kind: int) -> int:
    """Calls fcntl, and returns the kind of lock that the kernel answers with."""
    answer: bytes = fcntl.fcntl(fd, command, _FLOCK.pack(kind, os.SEEK_SET, LOAD_LOCK_OFFSET, 1, 0))
    return int(_FLOCK.unpack(answer)[0])
