"""Which mount a path is on, as the kernel lists them. Nothing here is opened but that list."""

from __future__ import annotations

import os
import re
from typing import NamedTuple


class Mount(NamedTuple):
    """Where it is mounted, the kind of filesystem, what it is made of, and its device number."""

    point: str
    kind: str
    source: str
    device: str

    @property
    def key(self) -> str:
        """What stays the same as long as it is the same storage."""
        return f"{self.kind} {self.source} {self.device}"


def mount_of(path: str | os.PathLike[str], root: str = "/") -> Mount | None:
    """The mount that a path is on, links followed; None where the system does not say."""
    real = os.path.realpath(path)
    found: Mount | None = None
    try:
        with open(os.path.join(root, "proc/self/mountinfo"), errors="replace") as lines:
            text = lines.read()
    except OSError:
        return None
    for line in text.splitlines():
        # id parent major:minor root MOUNT options [tags] - KIND DEVICE options
        mount, _, rest = line.partition(" - ")
        fields, tail = mount.split(), rest.split()
        if len(fields) < 5 or len(tail) < 2:
            continue
        where = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), fields[4])
        inside = real == where or real.startswith(where.rstrip("/") + "/")
        # A later mount on the same point hides the earlier one.
        if inside and (found is None or len(where) >= len(found.point)):
            found = Mount(where, tail[0], tail[1], fields[2])
    return found
