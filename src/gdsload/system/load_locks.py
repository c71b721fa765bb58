"""Tells loads of one file, in all processes of this machine, of one another.

Each load holds a shared lock on a byte far behind the end of the file. If the kernel would refuse
an exclusive lock on that byte, another load of the file runs, or has left mappings. Nothing is
written. The kernel releases the lock when the file is closed and no tensor is mapped from it any
more, or the process dies. Not responsible for what loads do together (`gdsload.loading.io_mode`).
"""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import suppress

from gdsload._native.mapped import LOAD_LOCK_OFFSET, is_shared as others

__all__ = ["announce", "others"]

_FLOCK = struct.Struct("@hhqqi0q")  # type, whence, start, length, process
_SHARED_LOCK = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, LOAD_LOCK_OFFSET, 1, 0)


def announce(fd: int) -> bool:
    """Announces a load: whether others of the file go on, or have left mappings of it.

    Of two loads that begin at the same time, both see each other. False where the filesystem has no
    locks. The lock belongs to the open file description: loads that share `fd` count as one.
    """
    with suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _SHARED_LOCK)
    return others(fd)
