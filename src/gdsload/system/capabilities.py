"""Capabilities of this process that count for files and memory of the whole machine."""

from __future__ import annotations

import re

from gdsload.system.kernel_files import read_text

CAP_FOWNER = 3
CAP_IPC_LOCK = 14
_ALL_USERS = ["0", "0", "4294967295"]  # the uid_map of the first user namespace


def has_capability(number: int, root: str = "/") -> bool:
    """Whether this process has a capability. In a user namespace of its own, a process has
    capabilities that the kernel ignores for files and memory of others.

    Args:
        number: Its number, such as `CAP_FOWNER`.
        root: The directory that stands for the machine's root.
    """
    mapping = read_text(root, "proc/self/uid_map").split()
    effective = re.search(r"^CapEff:\s*(\w+)", read_text(root, "proc/self/status"), re.MULTILINE)
    if effective is None or mapping not in ([], _ALL_USERS):
        return False
    return bool(int(effective[1], 16) >> number & 1)
