"""gdsload: a model's weights from storage into memory, as fast as the hardware moves them.

Everything here is imported when it is first used: ``import gdsload`` costs milliseconds and no
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gdsload import warmup
    from gdsload.aio import afrom_pretrained, astream
    from gdsload.api import load_file, plan, safe_open, stream
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
    from gdsload.system.quiesce import quiesce, resume
    from gdsload.version import __version__

# Modules that are reached as attributes: gdsload.warmup.hook(...).
_MODULES = ("warmup",)
_HOMES = {
    "BackendUnavailable": "errors",
    "Checkpoint": "checkpoint.checkpoint",
    "CheckpointError": "errors",
    "CuFileError": "errors",
    "FileChanged": "errors",
    "GdsloadError": "errors",
    "LoadReport": "report",
    "PlacementError": "errors",
    "Prefetch": "readahead.prefetch",
    "ReadError": "errors",
    "ShortRead": "errors",
    "StallError": "errors",
    "TensorInfo": "checkpoint.checkpoint",
    "__version__": "version",
    "accelerated": "integrations.transformers.model",
    "afrom_pretrained": "aio",
    "astream": "aio",
    "from_pretrained": "integrations.transformers.model",
    "install": "integrations.transformers.model",
    "last_report": "report",
    "load_file": "api",
    "plan": "api",
    "prefetch": "readahead.prefetch",
    "quiesce": "system.quiesce",
    "resume": "system.quiesce",
    "safe_open": "api",
    "stream": "api",
    "uninstall": "integrations.transformers.model",
}

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


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"gdsload.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'gdsload' has no attribute {name!r}")
    value = getattr(import_module(f"gdsload.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
