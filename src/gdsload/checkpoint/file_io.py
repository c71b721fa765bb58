"""Opens and reads small files safely: a regular file or an error, and no unbounded wait.

A FIFO or a device is refused without being opened. Tensor data is not read here.
"""

from __future__ import annotations

import errno
import os
import resource  # not when it is needed: no file can be opened then
import stat
from collections.abc import Sequence
from contextlib import suppress

from gdsload.errors import (
    CheckpointAccessError,
    CheckpointError,
    CheckpointNotFound,
    CheckpointUnreadable,
    ReadError,
)
from gdsload.system.parallel import note_progress
from gdsload.system.threads import start_thread

# Filesystems of a daemon or a network answer before this, or hang: the thread is then left behind.
_CLOSE_SECONDS = 1.0
_READ_BYTES = 4 << 20  # of one pread, after which progress is noted
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


def open_regular(
    path: str, *, shown_as: str | None = None, named_by: str | None = None
) -> tuple[int, os.stat_result]:
    """Opens a regular file for reading.

    The type is checked before opening, because opening a device can have side effects, and again
    afterwards, because the file may have been replaced in between. Opening never waits for the
    other end of a FIFO.

    Args:
        path: The file. Symbolic links are followed, wherever they lead.
        shown_as: The path to show in messages, if not `path`.
        named_by: The index that named the file, for messages.

    Returns:
        The descriptor, which the caller closes, and its status.

    Raises:
        CheckpointError: `path` is not a regular file.
        CheckpointUnreadable: It is a directory, or cannot be opened.
    """
    shown_as = shown_as or path
    fd = -1
    try:
        _require_regular(os.stat(path), shown_as)
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY
        try:
            fd = os.open(path, flags | os.O_NONBLOCK)
        except BlockingIOError:  # somebody has a lease on it, as a file server: it gives it back
            fd = os.open(path, flags)
        status = os.fstat(fd)
        _require_regular(status, shown_as)
        os.set_blocking(fd, True)
    except BaseException as error:
        if fd >= 0:
            os.close(fd)
        if isinstance(error, OSError) and not isinstance(error, CheckpointUnreadable):
            raise open_error(error, shown_as, named_by) from error
        raise
    return fd, status


def close_files(
    fds: Sequence[int], *, may_hang: bool = False, wait_seconds: float = _CLOSE_SECONDS
) -> None:
    """Closes descriptors that were only read from. Errors are ignored: the kernel has closed them.

    Args:
        fds: The descriptors, of one checkpoint.
        may_hang: Whether their filesystem may not answer: then a thread closes them.
        wait_seconds: How long the caller waits for this thread.
    """

    left = list(fds)

    def close() -> None:
        try:
            while left:
                with suppress(OSError):
                    os.close(left.pop())
        except BaseException:  # Ctrl-C: the others are closed as well
            close()
            raise

    thread = start_thread(close, "gdsload-close") if may_hang and fds else None
    if thread is None:
        close()
    else:
        thread.join(wait_seconds)


def _require_regular(status: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for test, name in _KINDS if test(status.st_mode)), "something else")
        link = f"a link to {os.path.realpath(path)}, " if os.path.islink(path) else ""
        text = f"{path}: this is {link}{kind}, not a regular file"
        if stat.S_ISDIR(status.st_mode):  # an OSError, as of safetensors
            raise CheckpointUnreadable(text, path=path, errno=errno.EISDIR)
        raise CheckpointError(text, path=path)


def read_small(path: str, limit: int, hint: str = "") -> bytes:
    """All bytes of a small file.

    Raises:
        CheckpointError: It is no regular file, or has more than `limit` bytes (the message ends
            with `hint`), or ended early.
        CheckpointUnreadable: It is a directory, or cannot be opened.
        ReadError: A read failed.
    """
    fd, status = open_regular(path)
    try:
        if status.st_size > limit:
            raise CheckpointError(
                f"{path}: it has {status.st_size} bytes, more than the limit of {limit}{hint}",
                path=path,
            )
        return read_exactly(fd, 0, status.st_size, path)
    finally:
        close_files([fd])


def read_exactly(fd: int, offset: int, wanted: int, path: str) -> bytes:
    """Reads `wanted` bytes at byte `offset`, in as many reads as it takes.

    Raises:
        ReadError: A read failed.
        CheckpointError: The file ended early.
    """
    parts, got = [], 0
    while got < wanted:
        try:
            part = os.pread(fd, min(wanted - got, _READ_BYTES), offset + got)
        except OSError as error:
            raise ReadError(
                f"{path}: reading {wanted} bytes at {offset} failed after {got}: {error.strerror}",
                path=path,
                offset=offset,
                wanted=wanted,
                got=got,
                errno=error.errno,
            ) from error
        if not part:
            raise CheckpointError(
                f"{path}: the file ended at byte {offset + got} and was read up to byte"
                f" {offset + wanted}: it was truncated",
                path=path,
            )
        parts.append(part)
        got += len(part)
        note_progress()
    return b"".join(parts)


def is_directory(path: str) -> bool:
    """os.path.isdir, which hides errors, with a CheckpointError if `path` cannot be examined."""
    return stat.S_ISDIR(_mode_of(path))


def is_file(path: str) -> bool:
    """os.path.isfile, as `is_directory` is os.path.isdir."""
    return stat.S_ISREG(_mode_of(path))


def _mode_of(path: str) -> int:
    """0 if there is no such path."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except OSError as error:
        raise open_error(error, path) from error


def open_error(error: OSError, path: str, named_by: str | None = None) -> CheckpointError:
    """The CheckpointError for a file or directory that could not be opened."""
    code = error.errno
    kind: type[CheckpointUnreadable] = CheckpointUnreadable
    text = f"{path}: it cannot be opened: {error.strerror}"
    if code in (errno.ENOENT, errno.ENOTDIR):
        kind = CheckpointNotFound
        if os.path.islink(path):
            text = f"{path}: this is a link to {os.path.realpath(path)}, which does not exist"
        elif named_by:
            text = (
                f"{path}: the index {named_by} names this shard, but it does not exist (an"
                " unfinished download?)"
            )
        else:
            text = f"No such file or directory: {path}"  # the wording of safetensors
    elif code == errno.ELOOP:
        text = f"{path}: it cannot be opened: its symbolic links form a loop, or are too many"
    elif code in (errno.EACCES, errno.EPERM):
        kind = CheckpointAccessError
        text = f"{path}: permission denied ({_access_hint(path)})"
    elif code == errno.EMFILE:
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        text = f"{path}: this process may open no more than {soft} files (`ulimit -n` raises it)"
    elif code == errno.ENFILE:
        text = f"{path}: this system may open no more files"
    return kind(text, path=path, errno=code)


def _access_hint(path: str) -> str:
    try:
        status = os.stat(path)
    except OSError:
        return "this user may not enter a directory above it"
    mode = stat.S_IMODE(status.st_mode)
    hint = f"mode {mode:04o}, owned by user {status.st_uid}"
    if stat.S_ISREG(status.st_mode) and not mode & 0o044 and status.st_uid != os.geteuid():
        hint += ": safetensors writes files that only their owner can read; `chmod a+r` opens it"
    return hint
