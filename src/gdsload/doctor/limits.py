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
from gdsload.doctor.finding import NO, PARTLY, YES, Finding, read_text
from gdsload.system.available import available_bytes

_CAP_IPC_LOCK = 14
_ALL_USERS = ["0", "0", "4294967295"]  # the uid_map of the first user namespace


def locked_memory(root: str = "/") -> Finding:
    """Whether staging rings can be registered with io_uring, which locks their memory."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    capable = re.search(r"^CapEff:\s*(\w+)", read_text(root, "proc/self/status"), re.MULTILINE)
    # In a user namespace of its own, a process has capabilities that the kernel ignores here.
    owner = read_text(root, "proc/self/uid_map").split()
    host = not owner or owner == _ALL_USERS
    if host and capable and int(capable[1], 16) >> _CAP_IPC_LOCK & 1:
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
    # A file of its own: kernels refuse the pages of others' files.
    with open(os.memfd_create("gdsload-doctor"), "r+b") as file:
        file.truncate(mmap.PAGESIZE)
        try:
            system.cachestat(file.fileno(), 0, mmap.PAGESIZE)
            return Finding("page cache", YES, "cachestat")
        except OSError as error:
            why, missing = f"cachestat: {error.strerror}", error.errno == errno.ENOSYS
        try:
            system.mincore_pages(file.fileno(), 0, mmap.PAGESIZE)
        except OSError as error:
            detail = f"{why}; mincore: {error.strerror}; every file is treated as cold"
            return Finding("page cache", NO, detail)
    hint = "kernel 6.5 has cachestat" if missing else "let the sandbox allow cachestat"
    return Finding("page cache", PARTLY, f"mincore, which is slower ({why})", hint)


def idle_page_cache(root: str = "/") -> Finding:
    """Whether the kernel keeps pages that nobody uses until memory is short.

    Some hosts of virtual machines have the kernel return pages that were not accessed for a while
    (DAMON), also with much memory free.
    """
    seconds = [*_damon_schemes(root)]
    if not seconds:
        return Finding("idle page cache", YES, "stays until memory is short")
    detail = f"is returned {min(seconds):.0f} s after the last access, unless it is mapped (DAMON)"
    return Finding("idle page cache", PARTLY, detail, "keep a process that has loaded the weights")


def _damon_schemes(root: str) -> Iterator[float]:
    """The age in seconds at which each active scheme of DAMON returns pages."""
    module = "sys/module/damon_reclaim/parameters/"
    if read_text(root, module + "enabled") == "Y":
        yield _number(root, module + "min_age") / 1e6
    base = "sys/kernel/mm/damon/admin/kdamonds"
    pattern = os.path.join(root, base, "*", "contexts", "*", "schemes", "*")
    for scheme in glob.iglob(pattern):
        context = os.path.dirname(os.path.dirname(scheme))
        kdamond = os.path.dirname(os.path.dirname(context))
        if read_text(kdamond, "state") == "on" and read_text(scheme, "action") == "pageout":
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
