"""What this machine can do for a load, each road with yes or no, the reason and the hint.

Every check is a function that looks and answers with a `Finding`; nothing is changed, loaded or
printed. CUDA is asked what its devices are; cuFile is looked for but never opened. `root` stands
for the machine's own root directory, so that a check can be shown another machine.
"""

from __future__ import annotations

import os

from gdsload.backends.posix.engines import ENGINES
from gdsload.doctor import gpu, limits, software, storage, vram
from gdsload.doctor.finding import Diagnosis, Finding

__all__ = ["Diagnosis", "Finding", "examine"]


def examine(path: str | os.PathLike[str] | None = None, root: str = "/") -> Diagnosis:
    """Looks at everything, and at the storage that `path`, a file or a directory, is on."""
    findings = [
        software.python(),
        *(software.package(name) for name in ("gdsload", "torch", "transformers", "safetensors")),
        software.kernel(),
        software.liburing(),
        *(software.engine(name) for name in ENGINES),
        limits.io_uring_allowed(root),
        limits.aio_contexts(root),
        limits.locked_memory(root),
        limits.huge_pages(root),
        limits.page_cache(),
        limits.drop_caches(root),
        limits.memory(),
    ]
    if path is not None:
        findings += [storage.filesystem(path, root), storage.direct_io(path)]
    findings += software.backends()
    findings += [gpu.gpu(root), gpu.nvidia_fs(root), gpu.udev(root)]
    findings += [gpu.library(name, root) for name in ("libcuda", "libcudart", "libcufile")]
    findings += [*vram.paths(), *vram.measured()]
    return Diagnosis(tuple(findings))
