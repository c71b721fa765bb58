"""gdsload moves the weights of a model from storage into memory as fast as the hardware allows.

Names are imported when they are first used: `import gdsload` takes milliseconds and does not
import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gdsload import warmup
    from gdsload.aio import afrom_pretrained, astream
    from gdsload.api import load_file, plan, stream
    from gdsload.checkpoint import Checkpoint, TensorInfo
    from gdsload.errors import (
        BackendUnavailable,
        CheckpointError,
        CuFileError,
        FileChanged,
        GdsloadError,
        PlacementError,
        ReadError,
        ShortRead,
        StallError,
    )
    from gdsload.integrations.transformers.model import (
        accelerated,
        from_pretrained,
        install,
        uninstall,
    )
    from gdsload.readahead.prefetch import Prefetch, prefetch
    from gdsload.report import LoadReport, last_report
    from gdsload.safetensors_file import safe_open
    from gdsload.system.quiesce import quiesce, resume
    from gdsload.version import __version__

__all__ = [
    "BackendUnavailable",
    "Checkpoint",
    "CheckpointError",
    "CuFileError",
    "FileChanged",
    "GdsloadError",
    "LoadReport",
    "PlacementError",
    "Prefetch",
    "ReadError",
    "ShortRead",
    "StallError",
    "TensorInfo",
    "__version__",
    "accelerated",
    "afrom_pretrained",
    "astream",
    "from_pretrained",
    "install",
    "last_report",
    "load_file",
    "plan",
    "prefetch",
    "quiesce",
    "resume",
    "safe_open",
    "stream",
    "uninstall",
    "warmup",
]

# The module of each name; the errors are all in `errors`.
_MODULES = {
    "aio": "afrom_pretrained astream",
    "api": "load_file plan stream",
    "checkpoint.checkpoint": "Checkpoint TensorInfo",
    "integrations.transformers.model": "accelerated from_pretrained install uninstall",
    "readahead.prefetch": "Prefetch prefetch",
    "report": "LoadReport last_report",
    "safetensors_file": "safe_open",
    "system.quiesce": "quiesce resume",
    "version": "__version__",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'gdsload' has no attribute {name!r}")
    if name == "warmup":
        return import_module("gdsload.warmup")
    module = _MODULE_OF.get(name, "errors")
    value = globals()[name] = getattr(import_module(f"gdsload.{module}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
