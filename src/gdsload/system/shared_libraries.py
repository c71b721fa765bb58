"""Where NVIDIA's libraries are: in this process already, in pip's nvidia packages, or wherever the
system keeps them. Nothing is opened here.
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterator

CUDA, CUFILE = "libcuda.so.1", "libcufile.so.0"


def candidates(soname: str) -> list[str]:
    """Paths and names to open, best first.

    One that is loaded already comes first: a second copy would keep a state of its own. The
    soname at the end leaves the search to the dynamic linker.
    """
    found = [*_loaded(soname), *(() if soname == CUDA else _in_wheels(soname)), soname]
    return list(dict.fromkeys(found))


def _loaded(soname: str) -> Iterator[str]:
    stem = soname.partition(".so")[0] + ".so"
    try:
        with open("/proc/self/maps", errors="surrogateescape") as lines:
            for line in lines:
                path = line.rstrip("\n").partition("/")
                if path[1] and os.path.basename(path[2]).startswith(stem):
                    yield "/" + path[2]
    except OSError:
        return


def _in_wheels(soname: str) -> Iterator[str]:
    for entry in sys.path:
        for pattern in ("nvidia/*/lib", "nvidia/lib"):
            yield from sorted(glob.glob(os.path.join(entry, pattern, soname)), reverse=True)
