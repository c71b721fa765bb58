"""What the kernel allows this process, and how much memory there is."""

from __future__ import annotations

import errno
import mmap
import os
import re
import resource
import sys

from gdsload._native import system
from gdsload.backends.posix.backend import DEPTH, REQUEST_BYTES
from gdsload.doctor.finding import NO, PARTLY, YES, Finding, read_text
from gdsload.memory.available import available_bytes

_CAP_IPC_LOCK = 14


def io_uring_allowed(root: str = "/") -> Finding:
    """The switch kernel.io_uring_disabled; a sandbox may forbid io_uring besides."""
    name, hint = "io_uring_disabled", "sysctl kernel.io_uring_disabled=0"
    value = read_text(root, "proc/sys/kernel/io_uring_disabled")
    if value is None:
        return Finding(name, YES, "this kernel has no such switch")
    if value == "0":
        return Finding(name, YES, "0: every process may use io_uring")
    if value == "1":
        return Finding(name, PARTLY, "1: only its group and CAP_SYS_ADMIN may use io_uring", hint)
    return Finding(name, NO, f"{value}: no process may use io_uring", hint)


def aio_contexts(root: str = "/") -> Finding:
    """Room for the events of Linux AIO on this machine."""
    used, most = (read_text(root, f"proc/sys/fs/aio-{which}") for which in ("nr", "max-nr"))
    if used is None or most is None:
        return Finding("aio-max-nr", NO, "this kernel has no Linux AIO")
    room = int(most) - int(used)
    detail = f"{used} of {most} events taken"
    if room < DEPTH:
        return Finding("aio-max-nr", NO, detail, f"sysctl fs.aio-max-nr={2 * int(most)}")
    return Finding("aio-max-nr", YES, detail)


def locked_memory(root: str = "/") -> Finding:
    """Whether rings of staging memory can be registered with io_uring, which locks them."""
    wanted = DEPTH * REQUEST_BYTES
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    capable = re.search(
        r"^CapEff:\s*(\w+)", read_text(root, "proc/self/status") or "", re.MULTILINE
    )
    if capable and int(capable[1], 16) >> _CAP_IPC_LOCK & 1:
        return Finding("memlock", YES, "no limit (CAP_IPC_LOCK)")
    if soft == resource.RLIM_INFINITY:
        return Finding("memlock", YES, "no limit")
    detail = f"{soft:,} bytes may be locked"
    if soft >= wanted:
        return Finding("memlock", YES, detail)
    return Finding(
        "memlock", PARTLY, f"{detail}: a ring of {wanted:,} is read into without registering it",
        "ulimit -l unlimited (Docker: --ulimit memlock=-1)",
    )  # fmt: skip


def huge_pages(root: str = "/") -> Finding:
    """Transparent huge pages, which halve the cost of memory where the machine has them free."""
    where = "sys/kernel/mm/transparent_hugepage/enabled"
    state = re.search(r"\[(\w+)\]", read_text(root, where) or "")
    if state is None:
        return Finding("huge pages", NO, "this kernel has no transparent huge pages")
    if state[1] == "never":
        return Finding("huge pages", NO, "never", f"echo madvise > /{where}")
    return Finding("huge pages", YES, state[1])


def page_cache() -> Finding:
    """How the page cache is asked what it holds of a file."""
    fd = os.open(sys.executable, os.O_RDONLY | os.O_CLOEXEC)
    try:
        system.cachestat(fd, 0, mmap.PAGESIZE)
        return Finding("page cache", YES, "cachestat")
    except OSError as error:
        why = f"cachestat: {error.strerror}"
        try:
            system.mincore_pages(fd, 0, mmap.PAGESIZE)
        except OSError as other:
            detail = f"{why}; mincore: {other.strerror}; every file is taken for cold"
            return Finding("page cache", NO, detail)
        blocked = error.errno == errno.ENOSYS
        hint = "kernel 6.5 has cachestat" if blocked else "let the sandbox allow cachestat"
        return Finding("page cache", PARTLY, f"mincore, which is slower ({why})", hint)
    finally:
        os.close(fd)


def drop_caches(root: str = "/") -> Finding:
    """Whether the page cache of the machine may be dropped, for measurements."""
    if os.access(os.path.join(root, "proc/sys/vm/drop_caches"), os.W_OK):
        return Finding("drop_caches", YES, "this process may drop the page cache")
    return Finding(
        "drop_caches", PARTLY, "not permitted: `gdsload load --cold` evicts the files instead",
        "run it as root, outside of a container",
    )  # fmt: skip


def memory() -> Finding:
    """Memory that a load may take: the machine's, or less where a cgroup allows less."""
    room = available_bytes()
    if room is None:
        return Finding("memory", PARTLY, "the system does not say how much is available")
    return Finding("memory", YES, f"{room / 1e9:.2f} GB available, limits of cgroups included")
