"""Finds NVIDIA's libraries: in this process, in pip's nvidia packages, or in the system.

Not responsible for opening them.
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterator
from contextlib import suppress

CUDA, CUFILE = "libcuda.so.1", "libcufile.so.0"


def candidates(soname: str) -> list[str]:
    """Paths and names to open, best first.

    A library that is loaded already is the first: a second copy would have its own state. The
    soname is the last: the dynamic linker searches for it.
    """
    found = [*_loaded(soname), *(() if soname == CUDA else _in_wheels(soname)), soname]
    return list(dict.fromkeys(found))


def _loaded(soname: str) -> Iterator[str]:
    stem = soname.partition(".so")[0] + ".so"
    with suppress(OSError), open("/proc/self/maps", errors="surrogateescape") as lines:
        for line in lines:
            _, slash, path = line.rstrip("\n").partition("/")
            if slash and os.path.basename(path).startswith(stem):
                yield slash + path


def _in_wheels(soname: str) -> Iterator[str]:
    for entry in sys.path:
        if not isinstance(entry, str):  # Python ignores it, too
            continue
        for pattern in ("nvidia/*/lib", "nvidia/lib"):
            wanted = os.path.join(glob.escape(entry), pattern, soname)
            yield from sorted(glob.glob(wanted), reverse=True)
