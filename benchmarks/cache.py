"""Checks of a checkpoint's files before a measurement: that their pages can leave the page cache,
that this process can see that, and that the files do not change meanwhile.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from gdsload.memory import page_cache

from . import machine
from .records import Refused

IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")

Identity = tuple[tuple[str, int, int, int], ...]


def require_cold_can_be(files: Iterable[Path]) -> None:
    """Raises Refused for a file that is never cold, or whose residency is unknown."""
    files = list(files)  # gone through twice
    for file in files:
        kind = machine.mount_of(file).get("filesystem")
        if kind in IN_MEMORY:
            raise Refused(
                f"{file}: it is on {kind}, which is memory: nothing there is ever cold, and no disk"
                " is read; take a checkpoint on a disk"
            )
    require_visible(files)


def require_visible(files: Iterable[Path]) -> None:
    """Raises Refused for a file whose residency the kernel does not show to this process."""
    for file in files:
        try:
            page_cache.resident_bytes(file)
        except OSError as error:
            why = error.strerror
            if error.errno == errno.EPERM:
                why = f"{why}; take a copy of your own, or be root"
            raise Refused(f"{file}: its residency in the page cache is unknown: {why}") from error


def holes(files: Iterable[Path]) -> str:
    """A note on sparse or compressed files; "" for others."""
    found = [file.stat() for file in files]
    stored, length = sum(one.st_blocks * 512 for one in found), sum(one.st_size for one in found)
    if stored >= length:
        return ""
    return f"; only {stored:,} of them are on the disk, the rest are holes, or it is compressed"


def evict(files: Iterable[Path]) -> int:
    """Evicts files, and the backing file of their loop device, from the page cache.

    Returns the bytes of the files that are still resident."""
    left = 0
    for file in files:
        left += page_cache.evict(file)
        below = machine.backing_file(file)
        if below is not None:
            with suppress(OSError):  # it belongs to another user
                page_cache.evict(below)
    return left


def identity(files: Iterable[Path]) -> Identity:
    """Facts that change when a file does. Raises Refused for a missing file."""
    found = []
    for file in files:
        try:
            facts = file.stat()
        except OSError as error:
            raise Refused(f"{file}: {error.strerror}, while it was measured") from error
        found.append((str(file), facts.st_ino, facts.st_size, facts.st_mtime_ns))
    return tuple(found)
