"""What is asked of a checkpoint's files before anything is measured: that their pages can leave the
page cache, that this process is told so, and that nobody changes them meanwhile.
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
    """Raises Refused for a file that is never cold, or whose coldness nobody tells us."""
    files = list(files)  # gone through twice
    for file in files:
        kind = machine.mount_of(file).get("filesystem")
        if kind in IN_MEMORY:
            raise Refused(
                f"{file}: it is on {kind}, which is memory: nothing there is ever cold, and no disk"
                " is read; take a checkpoint on a disk"
            )
    require_told(files)


def require_told(files: Iterable[Path]) -> None:
    """Raises Refused for a file whose part in the page cache this process is not told."""
    for file in files:
        try:
            page_cache.resident_bytes(file)
        except OSError as error:
            why = error.strerror
            if error.errno == errno.EPERM:
                why = f"{why}; take a copy of your own, or be root"
            raise Refused(
                f"{file}: what the page cache holds of it cannot be asked: {why}"
            ) from error


def holes(files: Iterable[Path]) -> str:
    """Words for files of which less is on the disk than they are long; empty for others."""
    found = [file.stat() for file in files]
    stored, length = sum(one.st_blocks * 512 for one in found), sum(one.st_size for one in found)
    if stored >= length:
        return ""
    return f"; only {stored:,} of them are on the disk, the rest are holes, or it is compressed"


def evict(files: Iterable[Path]) -> int:
    """Puts files out of the page cache, and what lies below them where their disk is a file: how
    many bytes of them are still there."""
    left = 0
    for file in files:
        left += page_cache.evict(file)
        below = machine.backing_file(file)
        if below is not None:
            with suppress(OSError):  # somebody else's: what it holds is no promise of ours
                page_cache.evict(below)
    return left


def identity(files: Iterable[Path]) -> Identity:
    """What changes when a file does. Raises Refused for one that is gone."""
    found = []
    for file in files:
        try:
            facts = file.stat()
        except OSError as error:
            raise Refused(f"{file}: {error.strerror}, while it was measured") from error
        found.append((str(file), facts.st_ino, facts.st_size, facts.st_mtime_ns))
    return tuple(found)
