"""Host memory that a load may take: what the machine has available, or less where a cgroup limits
this process.

Read from /proc and /sys without psutil, whose import takes longer than the first reads. Not
responsible for the memory of GPUs (`gdsload.system.gpu`), nor for giving any back.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from gdsload.errors import PlacementError
from gdsload.system.lifecycle import fork_safe_lock, in_child

if TYPE_CHECKING:
    from gdsload._native.memory import Region

SPARE_BYTES = 64 << 20  # left to the rest of the system

# Of both versions of cgroups: the root; the files with limits; the file with the usage; in
# memory.stat the page cache, and the part of it that is shared memory. Above memory.high the kernel
# slows down processes that take memory.
_Names = tuple[str, tuple[str, ...], str, str, str]
_V1: _Names = (
    "/sys/fs/cgroup/memory",
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    "total_cache",
    "total_shmem",
)
_V2: _Names = ("/sys/fs/cgroup", ("memory.max", "memory.high"), "memory.current", "file", "shmem")


class _Filling:
    """Memory of a running load. Pages that it has not touched yet count as used."""

    def __init__(self, lengths: Mapping[Region, int], nbytes: int) -> None:
        self._lengths = WeakKeyDictionary(lengths)  # a region that nobody has goes by itself
        self._unread_bytes = sum(lengths.values()) - nbytes  # between what is read

    def forget(self, regions: Iterable[Region]) -> None:
        for region in regions:
            self._lengths.pop(region, None)

    def most_bytes(self) -> int:
        """An upper bound without a look at each page, which takes milliseconds. 0: it has ended."""
        return max(sum(self._lengths.values()) - self._unread_bytes, 0)

    def promised_bytes(self) -> int:
        from gdsload._native.system import untouched_bytes

        left = [untouched_bytes(each.address, n) for each, n in list(self._lengths.items())]
        return max(sum(left) - self._unread_bytes, 0)


_lock = fork_safe_lock(sys.modules[__name__])
_filling: list[_Filling] = []
in_child(_filling.clear)  # a child reads nothing of its parent's loads


def take_room(lengths: Mapping[Region, int], nbytes: int) -> None:
    """Like `require_room`, for regions of so many bytes, `nbytes` of which will be read. From now
    on what they have not touched is missing in `available_bytes`, until `filled`."""
    with _lock:  # two loads must not find the same room
        require_room(nbytes)
        _filling.append(_Filling(lengths, nbytes))


def filled(regions: Iterable[Region]) -> None:
    """Nothing more is read to these regions."""
    found = list(regions)
    with _lock:
        for each in _filling:
            each.forget(found)


def _promised_bytes(room: int) -> int:
    """Bytes that loads have not touched yet; more, but not more than `room`, if that is known
    sooner."""
    with _lock:
        _filling[:] = [each for each in _filling if each.most_bytes()]
        most = sum(each.most_bytes() for each in _filling)
        return most if most <= room else sum(each.promised_bytes() for each in _filling)


def require_room(nbytes: int, what: str = "bytes are to be loaded into memory") -> None:
    """Checks that `nbytes` of host memory are available; `what` is their purpose, for the message.

    Raises:
        PlacementError: too little memory; with the number of missing bytes, and the limit.
    """
    available = available_bytes(nbytes + SPARE_BYTES)
    _require(nbytes, what, available, lambda: min(_limits(), default=(0, ""))[1])


def require_machine_room(nbytes: int, what: str) -> None:
    """Like `require_room`, for what several processes take that are not in the same cgroups:
    without limits of cgroups, which each of them may have for itself."""
    _require(nbytes, what, machine_bytes(), lambda: "")


def _require(nbytes: int, what: str, available: int | None, limit: Callable[[], str]) -> None:
    if available is not None and nbytes + SPARE_BYTES > available:
        missing = nbytes + SPARE_BYTES - available
        path = limit()
        by = f" (by the limit {path})" if path else ""
        raise PlacementError(
            f"{nbytes:,} {what} and {SPARE_BYTES:,} are kept in reserve, but only {available:,} are"
            f" available{by}: {missing:,} bytes are missing",
            missing_bytes=missing,
        )


def available_bytes(enough: int = sys.maxsize) -> int | None:
    """Bytes of host memory that a load may take. None if the system does not report them. If there
    are `enough`, the number may be too small, but not below `enough`."""
    left = min(_limits(), default=(None, ""))[0]
    return None if left is None else max(left - _promised_bytes(left - enough), 0)


def _limits() -> Iterator[tuple[int, str]]:
    """Bytes left of the machine, with "", and of each cgroup, with the file of its limit."""
    if (machine := machine_bytes()) is not None:
        yield machine, ""
    for path, names in _cgroups():
        yield from _cgroup_bytes(path, *names)


def memory_cgroups() -> tuple[tuple[int, int], ...]:
    """Identifies the cgroups that count the memory of this process, the same for all processes that
    have the same limits together."""
    found = []
    for path, (root, *_) in _cgroups():
        for group in _with_parents(path, root):
            with suppress(OSError):
                status = os.stat(group)
                found.append((status.st_dev, status.st_ino))
                break
    return tuple(found)


def _cgroups() -> Iterator[tuple[str, _Names]]:
    """The paths of the cgroups of this process, with the names of their version."""
    with suppress(OSError), open("/proc/self/cgroup") as lines:
        for line in lines:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if not controllers:
                yield path, _V2
            elif "memory" in controllers.split(","):
                yield path, _V1


def machine_bytes() -> int | None:
    """Bytes of host memory that all processes of the machine may take together. None if the system
    does not report them."""
    with suppress(OSError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def _cgroup_bytes(
    path: str, root: str, limit_names: Sequence[str], *names: str
) -> Iterator[tuple[int, str]]:
    """Bytes left in a cgroup and in each cgroup above it, with the file of the limit."""
    for group in _with_parents(path, root):
        for limit_name in limit_names:
            with suppress(OSError, ValueError):  # no such file, or the limit "max"
                yield _group_bytes(group, limit_name, *names), os.path.join(group, limit_name)


def _with_parents(path: str, root: str) -> Iterator[str]:
    # Inside a container the host's path does not exist, or begins with "/..". The root is then the
    # container's cgroup.
    group = os.path.normpath(root + os.path.normpath(f"/{path}"))
    while group.startswith(root):
        yield group
        group = os.path.dirname(group)


def _group_bytes(
    group: str, limit_name: str, used_name: str, cache_name: str, shared_name: str
) -> int:
    def text(name: str) -> str:
        with open(os.path.join(group, name)) as file:
            return file.read()

    limit, used = int(text(limit_name)), int(text(used_name))
    stat = dict(line.split() for line in text("memory.stat").splitlines())
    # The kernel can drop page cache, but not memory files, which it counts as page cache too.
    droppable = max(int(stat.get(cache_name, 0)) - int(stat.get(shared_name, 0)), 0)
    return max(limit - used + droppable, 0)
