"""Checks of what the kernel allows this process, and of the available memory."""

from __future__ import annotations

import errno
import glob
import mmap
import os
import re
import resource
from collections.abc import Iterator

from gdsload._native import system
from gdsload.backends.posix.backend import RING_BYTES
from gdsload.doctor.finding import NO, PARTLY, YES, Finding
from gdsload.system.available import available_bytes
from gdsload.system.capabilities import CAP_IPC_LOCK, has_capability
from gdsload.system.kernel_files import read_text

_DAMON, _DAMON_RECLAIM = "sys/kernel/mm/damon/admin", "sys/module/damon_reclaim/parameters"


def locked_memory(root: str = "/") -> Finding:
    """Whether staging rings can be registered with io_uring, which locks their memory."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if has_capability(CAP_IPC_LOCK, root):
        return Finding("memlock", YES, "no limit (CAP_IPC_LOCK)")
    if soft == resource.RLIM_INFINITY:
        return Finding("memlock", YES, "no limit")
    if soft >= RING_BYTES:
        return Finding("memlock", YES, f"limit {soft:,} bytes")
    detail = f"limit {soft:,} bytes: a ring of {RING_BYTES:,} is used without registration"
    return Finding("memlock", PARTLY, detail, "ulimit -l unlimited (Docker: --ulimit memlock=-1)")


def huge_pages(root: str = "/") -> Finding:
    """Transparent huge pages, which loads to DRAM touch where they are cheaper than small ones."""
    path = "sys/kernel/mm/transparent_hugepage/enabled"
    state = re.search(r"\[(\w+)\]", read_text(root, path))
    if state is None:
        return Finding("huge pages", NO, "this kernel has no transparent huge pages")
    if state[1] == "never":
        return Finding("huge pages", NO, "never", f"echo madvise > /{path}")
    return Finding("huge pages", YES, state[1])


def page_cache() -> Finding:
    """Which system call reports the pages of a file in the page cache."""
    try:
        # A file of its own: kernels refuse the pages of others' files.
        with open(os.memfd_create("gdsload-doctor"), "r+b") as file:
            file.truncate(mmap.PAGESIZE)
            return _page_cache_of(file.fileno())
    except OSError as error:
        return Finding("page cache", PARTLY, f"cannot be asked: no memory file: {error.strerror}")


def _page_cache_of(fd: int) -> Finding:
    """The same, of a file of one page."""
    try:
        system.cachestat(fd, 0, mmap.PAGESIZE)
        return Finding("page cache", YES, "cachestat")
    except OSError as error:
        why, missing = f"cachestat: {error.strerror}", error.errno == errno.ENOSYS
    try:
        system.mincore_pages(fd, 0, mmap.PAGESIZE)
    except OSError as error:
        detail = f"{why}; mincore: {error.strerror}; every file is treated as cold"
        return Finding("page cache", NO, detail)
    hint = "kernel 6.5 has cachestat" if missing else "let the sandbox allow cachestat"
    return Finding("page cache", PARTLY, f"mincore, which is slower ({why})", hint)


def idle_page_cache(root: str = "/") -> Finding:
    """Whether the kernel keeps pages that nobody uses until memory is short.

    On some virtual machines it is told to free pages that were not accessed for a while (DAMON).
    """
    seconds = [*_damon_schemes(root)]
    if seconds:
        when = f"is freed {min(seconds):.0f} s after the last access, also if memory is free"
    elif os.geteuid() and _damon_runs(root):
        when = "may be freed while memory is free: run as root to see when"
    else:
        return Finding("idle page cache", YES, "stays until memory is short")
    hint = "keep a process running that uses the weights"
    return Finding("idle page cache", PARTLY, f"{when} (DAMON)", hint)


def _damon_runs(root: str) -> bool:
    """Whether a thread of DAMON exists. Its settings can be read by root alone."""
    pattern = os.path.join(root, "proc", "[0-9]*", "comm")
    return any(read_text("/", name).startswith("kdamond") for name in glob.iglob(pattern))


def _damon_schemes(root: str) -> Iterator[float]:
    """The age in seconds at which each active scheme of DAMON frees pages of the machine."""
    if read_text(root, f"{_DAMON_RECLAIM}/enabled") == "Y":
        yield _number(root, f"{_DAMON_RECLAIM}/min_age") / 1e6
    pattern = os.path.join(root, _DAMON, "kdamonds", "*", "contexts", "*", "schemes", "*")
    for scheme in glob.iglob(pattern):
        context = os.path.dirname(os.path.dirname(scheme))
        kdamond = os.path.dirname(os.path.dirname(context))
        active = read_text(kdamond, "state"), read_text(context, "operations")
        if active == ("on", "paddr") and read_text(scheme, "action") == "pageout":
            interval = _number(context, "monitoring_attrs/intervals/aggr_us")
            yield _number(scheme, "access_pattern/age/min") * interval / 1e6


def _number(root: str, path: str) -> int:
    """The number in a file; 0 if there is none."""
    text = read_text(root, path)
    return int(text) if text.isdigit() else 0


def memory() -> Finding:
    """Memory that a load may use: of the machine, or less if a cgroup limits it."""
    nbytes = available_bytes()
    if nbytes is None:
        return Finding("memory", PARTLY, "the available memory is unknown")
    return Finding("memory", YES, f"{nbytes / 1e9:.2f} GB available, limits of cgroups included")
