"""gdsload: a model's weights from storage into memory, as fast as the hardware moves them.

Everything here is imported when it is first used: ``import gdsload`` costs milliseconds and no
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from gdsload.model import accelerated, from_pretrained, install, uninstall
    from gdsload.plan import plan
    from gdsload.report import LoadReport, last_report
    from gdsload.tensors import load_file, safe_open, stream

__version__ = "0.1.0"

_HOMES = {
    "BackendUnavailable": "errors",
    "Checkpoint": "checkpoint",
    "CheckpointError": "errors",
    "CuFileError": "errors",
    "FileChanged": "errors",
    "GdsloadError": "errors",
    "LoadReport": "report",
    "PlacementError": "errors",
    "ReadError": "errors",
    "ShortRead": "errors",
    "StallError": "errors",
    "TensorInfo": "checkpoint",
    "accelerated": "model",
    "from_pretrained": "model",
    "install": "model",
    "last_report": "report",
    "load_file": "tensors",
    "plan": "plan",
    "safe_open": "tensors",
    "stream": "tensors",
    "uninstall": "model",
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
    "ReadError",
    "ShortRead",
    "StallError",
    "TensorInfo",
    "__version__",
    "accelerated",
    "from_pretrained",
    "install",
    "last_report",
    "load_file",
    "plan",
    "safe_open",
    "stream",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'gdsload' has no attribute {name!r}")
    value = getattr(import_module(f"gdsload.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
