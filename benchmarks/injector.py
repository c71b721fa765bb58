"""Makes system calls of a process fail, controlled by its supervisor.

The kernel hands each chosen call of a process to its supervisor (seccomp's user notification, Linux
5.7), which lets it go on or answers with an error. Calls are counted over all threads, so that the
k-th one is the same call from run to run as far as threads allow. Those of its child processes are
not counted, and go on. Neither strace nor a privilege is
needed; `why_not` names a container whose runtime forbids `seccomp`.

    process: confine() ──descriptor──► supervisor: Calls ──► go on, or -errno
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import struct
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress

# Numbers by machine; a call that a machine does not have is left out.
_X86_64 = {
    "read": 0, "write": 1, "fstat": 5, "poll": 7, "mmap": 9, "mprotect": 10, "pread64": 17,
    "pwrite64": 18, "writev": 20, "madvise": 28, "socket": 41, "connect": 42, "sendto": 44,
    "recvfrom": 45, "socketpair": 53, "setsockopt": 54, "vfork": 58, "fcntl": 72, "flock": 73,
    "fdatasync": 75, "ftruncate": 77, "mkdir": 83, "statfs": 137, "io_setup": 206,
    "io_getevents": 208, "io_submit": 209, "getdents64": 217, "epoll_wait": 232, "epoll_ctl": 233,
    "openat": 257, "newfstatat": 262, "utimensat": 280, "fallocate": 285, "pipe2": 293,
    "memfd_create": 319, "preadv2": 327, "statx": 332, "io_uring_setup": 425, "io_uring_enter": 426,
    "io_uring_register": 427, "clone3": 435, "cachestat": 451,
}  # fmt: skip
_AARCH64 = {
    "io_setup": 0, "io_submit": 2, "io_getevents": 4, "epoll_ctl": 21, "fcntl": 25, "flock": 32,
    "statfs": 43, "ftruncate": 46, "fallocate": 47, "openat": 56, "pipe2": 59, "getdents64": 61,
    "read": 63, "write": 64, "writev": 66, "pread64": 67, "pwrite64": 68, "newfstatat": 79,
    "fstat": 80, "fdatasync": 83, "utimensat": 88, "socket": 198, "socketpair": 199, "connect": 203,
    "sendto": 206, "recvfrom": 207, "setsockopt": 208, "mmap": 222, "mprotect": 226, "madvise": 233,
    "memfd_create": 279, "preadv2": 286, "statx": 291, "io_uring_setup": 425, "io_uring_enter": 426,
    "io_uring_register": 427, "clone3": 435, "cachestat": 451,
}  # fmt: skip
NUMBERS = {"x86_64": _X86_64, "aarch64": _AARCH64}.get(platform.machine(), {})

_SECCOMP = {"x86_64": 317, "aarch64": 277}.get(platform.machine(), -1)
_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER = 1
_FLAGS = 1 << 0 | 1 << 3 | 1 << 4  # all threads, a listener, an errno if a thread has another one
_LOAD_NUMBER, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # instructions of the filter
_NOTIFY, _ALLOW = 0x7FC00000, 0x7FFF0000
_RECEIVE, _ANSWER, _GO_ON = 0xC0502100, 0xC0182101, 1
_NOTICE_BYTES = 80  # struct seccomp_notif: id, thread, flags, number, machine, ip, six arguments
# Their first argument is a descriptor. On one of the kernel's own objects, such as an eventfd that
# wakes a thread, they cannot fail.
_ON_DESCRIPTORS = {NUMBERS[name] for name in ("read", "write", "recvfrom", "sendto") if NUMBERS}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def confine(calls: Iterable[str]) -> int:
    """Hands these calls of all threads of this process to the owner of the descriptor that this
    returns. It cannot be undone. Raises OSError."""
    numbers = [NUMBERS[call] for call in calls]
    rows = [(_LOAD_NUMBER, 0, 0, 0)]
    for number in numbers:
        rows += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _NOTIFY)]
    rows.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in rows))
    program = _Program(len(rows), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    listener: int = libc.syscall(_SECCOMP, _SET_MODE_FILTER, _FLAGS, ctypes.byref(program))
    if listener < 0:
        raise OSError(ctypes.get_errno(), "seccomp(SECCOMP_SET_MODE_FILTER)")
    return listener


def why_not() -> str:
    """What keeps this machine from injecting; empty where it can. A child process tries it."""
    if _SECCOMP < 0:
        return f"no numbers of system calls for {platform.machine()}"
    pid = os.fork()
    if pid == 0:
        try:
            confine(["memfd_create"])
        except OSError as error:
            os._exit(error.errno or 255)
        except BaseException:
            os._exit(255)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    known = errno.errorcode.get(code, str(code))
    return f"the kernel, or a sandbox, refuses seccomp's user notification: {known}" if code else ""


class Calls:
    """The supervisor's end: answers calls, and counts those that come while it is armed.

    Args:
        listener: The descriptor that `confine` returned.
        pid: The process.
        control: Its descriptor for messages to the supervisor: calls on it go on, uncounted.
    """

    def __init__(self, listener: int, pid: int, control: int = -1) -> None:
        self.listener, self._pid, self._control = listener, pid, control
        self.arm(0, 0, 0)
        self.armed = False

    def arm(
        self, error: int, first: int, last: int, act: Callable[[], object] | None = None
    ) -> None:
        """From now on the calls `first` to `last`, counted from 1, fail with the errno `error`; 0:
        they return 0 and do nothing. With `act`, they wait for it and go on."""
        self.armed = True
        self.seen: Counter[int] = Counter()  # by number
        self.failed = 0
        self._error, self._first, self._last, self._act = error, first, last, act

    def answer(self) -> None:
        """Takes one call that waits, and answers it; nothing where its process has gone."""
        notice = bytearray(_NOTICE_BYTES)
        with suppress(OSError):
            fcntl.ioctl(self.listener, _RECEIVE, notice)
            key, thread, _, number, _, _, first = struct.unpack_from("=QIIiIQQ", notice)
            reply = struct.pack("=QqiI", key, 0, 0, _GO_ON)
            if self.armed and self._counts(thread, number, first):
                self.seen[number] += 1
                if self._first <= self.seen.total() <= self._last:
                    self.failed += 1
                    if self._act is not None:
                        self._act()
                    else:
                        reply = struct.pack("=QqiI", key, 0, -self._error, 0)
            fcntl.ioctl(self.listener, _ANSWER, bytearray(reply))

    def _counts(self, thread: int, number: int, first: int) -> bool:
        if not os.path.exists(f"/proc/{self._pid}/task/{thread}"):  # of a child process
            return False
        if number not in _ON_DESCRIPTORS:
            return True
        try:
            target = os.readlink(f"/proc/{self._pid}/fd/{first}")
        except OSError:  # not a descriptor
            return True
        return first != self._control and not target.startswith("anon_inode:")
