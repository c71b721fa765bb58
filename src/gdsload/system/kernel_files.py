"""Small files of the kernel, such as those of /proc and /sys."""

from __future__ import annotations

import os
from contextlib import suppress


def read_text(root: str, path: str) -> str:
    """The stripped text of a small file; "" if it cannot be read. `root` is the directory that
    stands for the machine's root."""
    with suppress(OSError), open(os.path.join(root, path), errors="replace") as file:
        return file.read().strip()
    return ""
