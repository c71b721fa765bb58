"""What works on this machine: each I/O path with yes, partly or no, the reason and a hint.

Every check is a function that returns a `Finding`; it changes, loads and prints nothing. `root`
replaces the root directory in checks that read files, so that tests can show another machine; the
checks of cuFile have `backends.cufile.library.ROOT` for it.
"""

from __future__ import annotations

import os

from gdsload.backends.posix.engines import ENGINES
from gdsload.doctor import gpu, limits, software, storage
from gdsload.doctor.finding import Diagnosis, Finding

__all__ = ["Diagnosis", "Finding", "examine"]


def examine(path: str | os.PathLike[str] | None = None) -> Diagnosis:
    """Runs all checks, and those of the storage that has `path`, a file or a directory.

    Raises:
        OSError: There is no such path, or this user may not see it.
    """
    findings = [
        software.python(),
        *(software.package(name) for name in ("gdsload", "torch", "transformers", "safetensors")),
        software.remote_client(),
        software.kernel(),
        *(software.engine(name) for name in ENGINES),
        limits.locked_memory(),
        limits.huge_pages(),
        limits.page_cache(),
        limits.idle_page_cache(),
        limits.memory(),
    ]
    if path is not None:
        findings += storage.findings(path)
    findings += [*software.backends(), *gpu.findings()]
    return Diagnosis(tuple(findings))
