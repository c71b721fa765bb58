"""Checks of the storage of a path: its filesystem, and whether direct I/O works."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from contextlib import suppress

from gdsload._native import system
from gdsload.checkpoint.file_io import open_regular
from gdsload.doctor.finding import NO, PARTLY, YES, Finding
from gdsload.errors import CheckpointError, StallError
from gdsload.system.mountinfo import mount_of
from gdsload.system.parallel import in_thread
from gdsload.system.storage import is_distant

# Of a temporary file: they say nothing about direct I/O. The last two: none can be without a name.
_CANNOT_CREATE = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT),
    *(errno.EOPNOTSUPP, errno.EISDIR),
)
# Of a direct read, or of opening a file for it (ENOENT: there is no /proc). All others are failures
# of the storage, such as EIO.
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.EACCES, errno.EPERM, errno.ENOENT)
ANSWER_SECONDS = 10.0  # more than a slow server needs
_LEVELS = 2  # directories of models have one level, a hub cache has more
_MOST_FOLDERS = 64  # of one level, so that a large tree costs little


def findings(path: str | os.PathLike[str]) -> list[Finding]:
    """The checks of a path; if its filesystem does not answer, one finding that says so.

    Raises:
        OSError: There is no such path, or this user may not see it.
    """
    name = os.fspath(path)

    def check() -> list[Finding]:
        os.stat(name)
        return [filesystem(name), direct_io(name)]

    try:
        return in_thread(check, name, stall_seconds=ANSWER_SECONDS)
    except StallError:
        why = f"it has not answered for {ANSWER_SECONDS:g} s"
        hint = "its server, daemon or disk hangs; a load would end with an error"
        untried = Finding(f"direct I/O on {name}", NO, "not tried")
        return [Finding(f"filesystem of {name}", NO, why, hint), untried]


def filesystem(path: str | os.PathLike[str], root: str = "/") -> Finding:
    """Kind of filesystem, device and mount point."""
    real = os.path.realpath(path)
    name = f"filesystem of {os.fspath(path)}"
    try:
        os.stat(real)
    except OSError as error:
        return Finding(name, NO, error.strerror or str(error))
    found = mount_of(real, root)
    if found is None:
        return Finding(name, PARTLY, "the mount is unknown")
    kind = found.kind
    detail = f"{kind} on {found.source}, mounted at {found.point}"
    if kind in ("tmpfs", "ramfs"):
        return Finding(name, PARTLY, f"{detail}: it lives in memory, there is no storage to read")
    if is_distant(kind):
        return Finding(name, PARTLY, f"{detail}: the network or a daemon limits its rate")
    return Finding(name, YES, detail)


def direct_io(path: str | os.PathLike[str]) -> Finding:
    """Whether direct I/O works, tried with one block.

    In a directory, a file of a checkpoint is tried, or any other file, if necessary one or two
    levels below it, or a temporary file.
    """
    name = f"direct I/O on {os.fspath(path)}"
    hint = "such files are read through the page cache; xfs and ext4 support direct I/O"
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            with suppress(PermissionError):  # `os.access` hides all other errors
                os.scandir(path).close()
    except OSError as error:
        return Finding(name, NO, str(error))
    if stat.S_ISDIR(mode) and not os.access(path, os.R_OK | os.X_OK):
        return Finding(name, NO, "this user may not read the directory")
    try:
        fd = (_sample if stat.S_ISDIR(mode) else _opened)(os.fspath(path))
    except CheckpointError as error:
        return Finding(name, NO, str(error))
    except OSError as error:
        if error.errno not in _CANNOT_CREATE:
            return Finding(name, NO, str(error))
        why = f"not tried: no readable file in it, and none can be created ({error.strerror})"
        return Finding(name, PARTLY, why, "name a directory or a file of a checkpoint")
    try:
        alignment = system.direct_alignment(fd)
        if alignment is not None and alignment[1] == 0:
            return Finding(name, NO, "the filesystem does not support it", hint)
        block = max(alignment or (mmap.PAGESIZE,))
        twin = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        try:
            os.preadv(twin, [mmap.mmap(-1, max(block, mmap.PAGESIZE))], 0)
        finally:
            os.close(twin)
    except OSError as error:
        if error.errno not in _REFUSALS:
            hint = "a load would end with an error: see dmesg, the health of the disk, its daemon"
            return Finding(name, NO, f"it cannot be read: {error.strerror}", hint)
        return Finding(name, NO, f"refused: {error.strerror}", hint)
    finally:
        os.close(fd)
    if alignment is None:
        return Finding(name, YES, f"works with {block} bytes; its alignment is unknown")
    return Finding(name, YES, f"works; memory aligned to {alignment[0]}, offset to {alignment[1]}")


def _opened(path: str) -> int:
    return open_regular(path)[0]


def _sample(path: str) -> int:
    """A descriptor of a regular file in a directory."""
    folders = [path]
    for _ in range(1 + _LEVELS):
        files: list[str] = []
        below: list[str] = []
        for folder in folders[:_MOST_FOLDERS]:
            with suppress(PermissionError), os.scandir(folder) as entries:
                for entry in entries:
                    with suppress(OSError):  # a loop of links
                        if entry.is_file():
                            files.append(entry.path)
                        elif entry.is_dir(follow_symlinks=False):
                            below.append(entry.path)
        for file in sorted(files, key=lambda each: (not each.endswith(".safetensors"), each)):
            with suppress(CheckpointError):
                return _opened(file)
        folders = sorted(below)
    return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_TMPFILE, 0o600)
