"""Finds the mount of a path or of a device number in the kernel's list of mounts.

Read from /proc without psutil: its list of partitions has no device numbers, and its import takes
longer than the first reads.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from gdsload.system.kernel_files import read_text


class Mount(NamedTuple):
    """One mount.

    Attributes:
        point: The directory that it is mounted at.
        kind: The kind of filesystem, such as "xfs".
        source: The device or the server, such as "/dev/md0".
        device: The device number, such as "9:0".
        number: Its number in the kernel.
    """

    point: str
    kind: str
    source: str
    device: str
    number: str = ""

    @property
    def key(self) -> str:
        """Identifies the storage in the tuning cache."""
        return f"{self.kind} {self.source} {self.device}"


def mount_of(path: str | os.PathLike[str], root: str = "/") -> Mount | None:
    """The mount of a path, with links followed. None if the system does not report it."""
    real = os.path.realpath(path)
    found: Mount | None = None
    for mount in _mounts(root):
        inside = real == mount.point or real.startswith(mount.point.rstrip("/") + "/")
        # A later mount at the same point hides the earlier one.
        if inside and (found is None or len(mount.point) >= len(found.point)):
            found = mount
    return found


def kind_of_device(device: int) -> str:
    """The kind of filesystem with this device number (`st_dev`); "" if it is not known.

    The filesystem itself is not asked: it may be one that does not answer.
    """
    number = f"{os.major(device)}:{os.minor(device)}"
    return next((mount.kind for mount in _mounts() if mount.device == number), "")


def kind_of_file(fd: int) -> str:
    """The kind of filesystem of an open file; "" if it is not known. The device number would not
    do: an overlay of several filesystems makes up its own for files of the lower ones."""
    facts = read_text("/", f"proc/self/fdinfo/{fd}")
    number = re.search(r"^mnt_id:\s*(\d+)$", facts, re.MULTILINE)
    if number is None:
        return ""
    return next((mount.kind for mount in _mounts() if mount.number == number[1]), "")


def _mounts(root: str = "/") -> Iterator[Mount]:
    """All mounts, in the kernel's order; none if the system does not report them."""
    try:
        with open(os.path.join(root, "proc/self/mountinfo"), "rb") as file:
            lines = os.fsdecode(file.read()).split("\n")
    except OSError:
        return
    for line in lines:
        # id parent major:minor root POINT options [tags] - KIND SOURCE options
        # Names may have any other white space: the kernel escapes what separates fields and lines.
        mount, _, rest = line.partition(" - ")
        fields, tail = mount.split(" "), rest.split(" ")
        if len(fields) < 5 or len(tail) < 2:
            continue
        point = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), fields[4])
        yield Mount(point, tail[0], tail[1], fields[2], fields[0])
