"""Opens and reads small files safely: a regular file or an error, and no unbounded wait.

A FIFO or a device is refused without being opened. `parallel_map` works on many files in daemon
threads: slow storage is queried in parallel, a hung mount is reported, and Ctrl-C is handled at
once. Tensor data is not read here.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import TypeVar

from gdsload.errors import (
    CheckpointAccessError,
    CheckpointError,
    CheckpointNotFound,
    CheckpointUnreadable,
    ReadError,
    StallError,
)
from gdsload.system.cancellation import LoadCancelled, check
from gdsload.system.stall import StallWatch
from gdsload.system.threads import start_thread

Item = TypeVar("Item")
Result = TypeVar("Result")

STALL_SECONDS = 60.0  # longer than any NFS retry
_THREADS = 16  # requests in flight hide the latency of network storage; more gain nothing
_AHEAD = 32  # finished results that wait for the consumer: bounds the memory of headers
_WAKE_SECONDS = 0.1  # a Ctrl-C just before a wait begins is seen only when the wait ends
# Filesystems of a daemon or a network answer before this, or hang: the thread is then left behind.
_CLOSE_SECONDS = 1.0
_READ_BYTES = 64 << 20  # of one pread: below the kernel's limit of 2 GiB
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
        CheckpointUnreadable: The file cannot be opened.
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
        if isinstance(error, OSError):
            raise open_error(error, shown_as, named_by) from error
        raise
    return fd, status


def close_files(
    fds: Sequence[int], *, distant: bool = False, wait_seconds: float = _CLOSE_SECONDS
) -> None:
    """Closes descriptors that were only read from. Errors are ignored: the kernel has closed them.

    Args:
        fds: The descriptors, of one checkpoint.
        distant: Whether their filesystem may not answer: then a thread closes them.
        wait_seconds: How long the caller waits for this thread.
    """

    def close() -> None:
        for fd in fds:
            with suppress(OSError):
                os.close(fd)

    thread = start_thread(close, "gdsload-close") if distant and fds else None
    if thread is None:
        close()
    else:
        thread.join(wait_seconds)


def _require_regular(status: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for test, name in _KINDS if test(status.st_mode)), "something else")
        link = f"a link to {os.path.realpath(path)}, " if os.path.islink(path) else ""
        raise CheckpointError(f"{path}: this is {link}{kind}, not a regular file", path=path)


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
    return b"".join(parts)


def is_directory(path: str) -> bool:
    """os.path.isdir, which hides errors, with a CheckpointError if `path` cannot be examined."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
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
        import resource  # for this message only

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


def parallel_map(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    path_of: Callable[[Item], str],
    discard: Callable[[Result], None] = lambda _: None,
    stall_seconds: float = STALL_SECONDS,
) -> Generator[Result, None, None]:
    """Calls `work` for each item in parallel threads and yields the results in the items' order.

    It is not an Executor: that one waits for hung threads when the interpreter exits. If no thread
    can be started, the caller does the work and waits as long as the storage does.

    Args:
        work: Called once for each item.
        items: The items.
        path_of: The path of an item, for messages.
        discard: Called for each result that is not yielded because the caller stopped early.
        stall_seconds: The longest time in which no item is finished.

    Raises:
        StallError: No item was finished for `stall_seconds`. The hung thread is left behind and
            discards its result.
        LoadCancelled: The load was cancelled. Threads at work are left behind as well.
        BaseException: The first error of `work`, in the order of the items.
    """
    changed = threading.Condition()
    jobs = iter(enumerate(items))
    outcomes: dict[int, tuple[Result | None, BaseException | None]] = {}
    crashes: list[BaseException] = []  # of threads, outside `work`
    finished = 0
    stopped = False

    def run() -> None:
        nonlocal finished
        try:
            while True:
                # An error refers to this frame. If the frame went on to refer to it, what the work
                # held, such as connections, would stay until the garbage is collected.
                result: Result | None = None
                error: BaseException | None = None
                with changed:
                    changed.wait_for(lambda: stopped or len(outcomes) < _AHEAD)
                    job = None if stopped else next(jobs, None)
                if job is None:
                    return
                try:
                    result = work(job[1])
                except BaseException as caught:
                    error = caught
                with changed:
                    if not stopped:
                        outcomes[job[0]] = result, error
                        finished += 1
                        changed.notify_all()
                        continue
                if error is None:
                    discard(result)  # type: ignore[arg-type]
        except BaseException as crash:  # for example no memory: the caller must not wait
            crashes.append(crash)

    threads: list[threading.Thread] = []
    join_seconds = 1.0  # for threads still at work when the caller stops
    try:
        for _ in range(min(_THREADS, len(items))):
            thread = start_thread(run, "gdsload-open")
            if thread is None:  # the process may start no more threads
                break
            threads.append(thread)
        if not threads:
            for item in items:
                yield work(item)
            return
        for number, item in enumerate(items):
            with changed:
                before, start, watch = finished, time.monotonic(), StallWatch()
                while number not in outcomes:
                    changed.wait(min(_WAKE_SECONDS, stall_seconds))
                    if crashes:
                        raise crashes[0]
                    check()
                    if finished != before:
                        before, start = finished, time.monotonic()
                    if watch.stalled(time.monotonic() - start, stall_seconds):
                        join_seconds = 0.0
                        path = path_of(item)
                        raise StallError(
                            f"{path}: the storage has not answered for {stall_seconds:g} s",
                            path=path,
                        )
                result, error = outcomes.pop(number)
                changed.notify_all()
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # as in `run`
            yield result  # type: ignore[misc]
    except (KeyboardInterrupt, LoadCancelled):
        join_seconds = 0.2  # somebody waits for the end
        raise
    finally:
        with changed:
            stopped = True
            changed.notify_all()
        deadline = time.monotonic() + join_seconds
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for result, error in outcomes.values():
            if error is None:
                discard(result)  # type: ignore[arg-type]
        outcomes.clear()
