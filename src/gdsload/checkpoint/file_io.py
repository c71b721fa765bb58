"""How files are opened and read at the door: a regular file or an error, and never a wait for ever.

A FIFO or a device is refused without being opened. Work on many files runs in daemon threads, so
that slow storage is asked in parallel, a hung one is reported, and Ctrl-C always gets through.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import stat
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

from gdsload.errors import (
    CheckpointAccessError,
    CheckpointError,
    CheckpointNotFound,
    CheckpointUnreadable,
    ReadError,
    StallError,
)
from gdsload.system.threads import start_thread

Item = TypeVar("Item")
Result = TypeVar("Result")

STALL_SECONDS = 60.0  # without one file opened or one header read: longer than any NFS retry
_THREADS = 16  # requests in flight hide the latency of network storage; more gain nothing there
_AHEAD = 32  # results that may wait for their consumer: bounds the memory that headers take
_WAKE_SECONDS = 0.1  # a Ctrl-C that comes just before a wait begins is seen only when it ends
_NO_ITEM = -1  # the number of what ends a thread between two items
_READ_BYTES = 64 << 20  # of one read: below the 2 GiB at which the kernel cuts


def open_regular(
    path: str, *, shown_as: str | None = None, named_by: str | None = None
) -> tuple[int, os.stat_result]:
    """Opens `path` for reading if it is a regular file: descriptor and status.

    Messages call it `shown_as`, and say that the index `named_by` asked for it.

    It is looked at before it is opened, because opening a device can have effects, and again after,
    because it may have been replaced in between. Neither waits for the far end of a FIFO.
    """
    shown_as = shown_as or path
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        _check_regular(os.stat(path), shown_as)
        fd = os.open(path, flags)
    except OSError as error:
        raise refused(error, shown_as, named_by) from error
    try:
        status = os.fstat(fd)
        _check_regular(status, shown_as)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_NONBLOCK)
    except OSError as error:
        os.close(fd)
        raise refused(error, shown_as, named_by) from error
    except BaseException:
        os.close(fd)
        raise
    return fd, status


_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


def _check_regular(status: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for test, name in _KINDS if test(status.st_mode)), "something else")
        link = f"a link to {os.path.realpath(path)}, " if os.path.islink(path) else ""
        raise CheckpointError(f"{path}: this is {link}{kind}, not a regular file", path=path)


def read_exactly(fd: int, offset: int, wanted: int, path: str) -> bytes:
    """`wanted` bytes at `offset`, however many reads it takes.

    Raises ReadError when the system does, CheckpointError when the file ends early.
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
                f"{path}: the file ended at byte {offset + got}, while it was read up to byte"
                f" {offset + wanted}: it was truncated",
                path=path,
            )
        parts.append(part)
        got += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def raise_if_forbidden(path: str) -> None:
    """exists() says False for what may not be looked at: that is another error than not there."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise refused(error, path) from error


def refused(error: OSError, path: str, named_by: str | None = None) -> CheckpointError:
    """The error for a file or directory that the system did not open."""
    code = error.errno
    if code in (errno.ENOENT, errno.ENOTDIR):
        if os.path.islink(path):
            text = f"{path}: this is a link to {os.path.realpath(path)}, which is not there"
        elif named_by:
            text = (
                f"{path}: the index {named_by} names this shard, but it is not there (an unfinished"
                " download?)"
            )
        else:
            text = f"No such file or directory: {path}"  # as safetensors says it
        return CheckpointNotFound(text, path=path, errno=code)
    if code == errno.ELOOP:
        return CheckpointUnreadable(
            f"{path}: it cannot be opened: symbolic links that lead in a circle, or too many of"
            " them",
            path=path,
            errno=code,
        )
    if code in (errno.EACCES, errno.EPERM):
        return CheckpointAccessError(
            f"{path}: permission denied{_owner_hint(path)}", path=path, errno=code
        )
    if code in (errno.EMFILE, errno.ENFILE):
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        whose = f"this process ({soft}; `ulimit -n` raises it)"
        text = f"{path}: all files that {whose if code == errno.EMFILE else 'this system'} may"
        return CheckpointUnreadable(f"{text} hold open are in use", path=path, errno=code)
    return CheckpointUnreadable(
        f"{path}: it cannot be opened: {error.strerror}", path=path, errno=code
    )


def _owner_hint(path: str) -> str:
    try:
        status = os.stat(path)
    except OSError:
        return " (a directory above it is closed to this user)"
    closed = stat.S_ISREG(status.st_mode) and not status.st_mode & 0o044
    if closed and status.st_uid != os.geteuid():
        return (
            f" (mode {stat.S_IMODE(status.st_mode):04o}, owned by user {status.st_uid}: safetensors"
            " writes files that only their owner can read; `chmod a+r` opens it)"
        )
    return f" (mode {stat.S_IMODE(status.st_mode):04o}, owned by user {status.st_uid})"


def each(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    what: Callable[[Item], str],
    discard: Callable[[Result], None] = lambda _: None,
    stall_seconds: float = STALL_SECONDS,
) -> Generator[Result, None, None]:
    """work(item) for each item, in parallel threads; yields the results in the items' order.

    The first error is raised as it came. When the caller stops early, results that nobody will see
    are given to `discard`. Raises StallError, naming the file `what(item)`, when nothing finishes
    for `stall_seconds`; the thread that hangs is left behind and discards what it gets. Where no
    thread can be started the caller does the work, and waits as long as the storage does.
    """
    lock, room = threading.Lock(), threading.Semaphore(_AHEAD)
    done: SimpleQueue[tuple[int, Result | None, BaseException | None]] = SimpleQueue()
    jobs = iter(enumerate(items))
    stopped = False

    def run() -> None:
        try:
            serve()
        except BaseException as error:  # no memory to go on: the caller must not wait for it
            done.put((_NO_ITEM, None, error))

    def serve() -> None:
        while True:
            room.acquire()
            with lock:
                job = None if stopped else next(jobs, None)
            if job is None:
                room.release()
                return
            result: Result | None = None
            error: BaseException | None = None
            try:
                result = work(job[1])
            except BaseException as caught:
                error = caught
            with lock:
                if not stopped:
                    done.put((job[0], result, error))
                    continue
            if error is None:
                discard(result)  # type: ignore[arg-type]

    threads: list[threading.Thread] = []
    early: dict[int, tuple[Result | None, BaseException | None]] = {}
    patience = 1.0  # seconds given to threads that are still at work when the caller stops
    try:
        for _ in range(min(_THREADS, len(items))):
            thread = start_thread(run, "gdsload-open")
            if thread is None:  # no more threads for this process: the first ones will do
                break
            threads.append(thread)
        if not threads:
            for item in items:
                yield work(item)
            return
        for number, item in enumerate(items):
            deadline = time.monotonic() + stall_seconds
            while number not in early:
                try:
                    index, result, error = done.get(timeout=min(_WAKE_SECONDS, stall_seconds))
                except Empty:
                    if time.monotonic() < deadline:
                        continue
                    patience = 0.0
                    raise StallError(
                        f"{what(item)}: the storage has not answered for {stall_seconds:g} s",
                        path=what(item),
                    ) from None
                if index == _NO_ITEM and error is not None:
                    raise error
                deadline = time.monotonic() + stall_seconds
                early[index] = result, error
            result, error = early.pop(number)
            if error is not None:
                raise error
            room.release()
            yield result  # type: ignore[misc]
    except KeyboardInterrupt:
        patience = 0.2  # somebody waits for the prompt
        raise
    finally:
        with lock:
            stopped = True
            room.release(_THREADS)
        deadline = time.monotonic() + patience
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with suppress(Empty):
            while True:
                index, result, error = done.get_nowait()
                early[index] = result, error
        for result, error in early.values():
            if error is None:
                discard(result)  # type: ignore[arg-type]
