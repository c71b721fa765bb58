"""gdsload moves the weights of a model from storage into memory as fast as the hardware allows.

Names are imported when they are first used: `import gdsload` takes milliseconds and does not
import torch. In a process that has imported torch, what a load needs is imported at once.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

_pid = os.getpid()  # of the process that imports gdsload: its forked children have another one

if TYPE_CHECKING:  # "as" exports a name to type checkers and editors
    from gdsload import (
        errors as errors,
        events as events,
        telemetry as telemetry,
        warmup as warmup,
    )
    from gdsload.aio import afrom_pretrained as afrom_pretrained, astream as astream
    from gdsload.api import (
        load_file as load_file,
        load_into as load_into,
        plan as plan,
        stream as stream,
    )
    from gdsload.checkpoint import Checkpoint as Checkpoint, TensorInfo as TensorInfo
    from gdsload.checkpoint.selection import experts as experts, layers as layers
    from gdsload.errors import (
        BackendUnavailable as BackendUnavailable,
        CheckpointError as CheckpointError,
        CuFileError as CuFileError,
        FileChanged as FileChanged,
        GdsloadError as GdsloadError,
        IntegrityError as IntegrityError,
        PartialLoad as PartialLoad,
        PlacementError as PlacementError,
        RankError as RankError,
        ReadError as ReadError,
        ShortRead as ShortRead,
        StallError as StallError,
    )
    from gdsload.integrations.transformers.model import (
        accelerated as accelerated,
        from_pretrained as from_pretrained,
        install as install,
        uninstall as uninstall,
    )
    from gdsload.peers.server import (
        ServerStatus as ServerStatus,
        WeightServer as WeightServer,
        serve as serve,
    )
    from gdsload.readahead.prefetch import Prefetch as Prefetch, prefetch as prefetch
    from gdsload.remote.urls import replicas as replicas
    from gdsload.report import LoadReport as LoadReport, last_report as last_report
    from gdsload.safetensors_file import safe_open as safe_open
    from gdsload.system.quiesce import quiesce as quiesce, resume as resume
    from gdsload.version import __version__ as __version__

# The public names of each module.
_MODULES = {
    "aio": "afrom_pretrained astream",
    "api": "load_file load_into plan stream",
    "checkpoint.checkpoint": "Checkpoint TensorInfo",
    "checkpoint.selection": "experts layers",
    "errors": "BackendUnavailable CheckpointError CuFileError FileChanged GdsloadError"
    " IntegrityError PartialLoad PlacementError RankError ReadError ShortRead StallError",
    "integrations.transformers.model": "accelerated from_pretrained install uninstall",
    "peers.server": "ServerStatus WeightServer serve",
    "readahead.prefetch": "Prefetch prefetch",
    "remote.urls": "replicas",
    "report": "LoadReport last_report",
    "safetensors_file": "safe_open",
    "system.quiesce": "quiesce resume",
    "version": "__version__",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}
_SUBMODULES = ("errors", "events", "telemetry", "warmup")
# What a load needs, by the package whose user will load: imported with gdsload if the process has
# imported that package. It takes 25 to 45 ms, and twice that from storage.
_NEEDED = {
    "torch": "api backends.posix.backend _native.threads loading.device_batch safetensors_file",
    "transformers": "integrations.transformers.model",
}
# The same for a load to a GPU, on a machine where one of these is NVIDIA's driver: 13 ms more.
_GPU_DRIVERS = "/dev/nvidiactl", "/dev/dxg"
if any(map(os.path.exists, _GPU_DRIVERS)):
    _NEEDED["torch"] += (
        " loading.device_init backends.auto.backend backends.staging backends.cufile.gds"
        " backends.cufile.gds_mt"
    )
__all__ = sorted([*_MODULE_OF, *_SUBMODULES])


if not TYPE_CHECKING:  # type checkers would accept every name

    def __getattr__(name: str) -> Any:
        if name in _SUBMODULES:
            return import_module(f"gdsload.{name}")
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'gdsload' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"gdsload.{_MODULE_OF[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


for _module in " ".join(_NEEDED[name] for name in _NEEDED if name in sys.modules).split():
    with suppress(ImportError):  # the first use of the module raises it again
        import_module(f"gdsload.{_module}")
