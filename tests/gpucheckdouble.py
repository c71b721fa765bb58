"""The GPU of `scripts/gpu_check.py --gpu` in the tests: the doubles, in a process of their own."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import pytest
import torch

import gpudoubles
from devicetensors import TorchCuda, device_tensor
from gdsload import api
from gdsload.loading import device_batch


def gpu(base: type[Any], device: str) -> Any:
    """An instance of the script's `Gpu` over the doubles, for the rest of the process."""
    patch = pytest.MonkeyPatch()
    if libraries := os.environ.get("GPU_DOUBLE_LIBRARIES"):
        patch.setattr(gpudoubles, "built", lambda name: Path(libraries, f"lib{name}.so"))
    patch.setattr(device_batch, "empty", device_tensor)
    patch.setattr(device_batch, "_torch_cuda", TorchCuda)
    patch.setattr(api, "require_device", str)
    root = Path(tempfile.mkdtemp(prefix="gdsload-double-", dir=os.environ.get("GPU_DOUBLE_ROOT")))
    installed = gpudoubles.installed(patch, root, patience=0)
    doubles = installed.__enter__()
    _alive.append(installed)
    if fault := os.environ.get("GPU_DOUBLE_FAULT"):
        call, kind, value = fault.split(":")
        doubles.fault(call, int(kind), int(value), times=-1)

    class Double(base):  # type: ignore[misc]
        is_real = False

        def __init__(self) -> None:
            self.torch, self.device, self.host_device = torch, device, "cpu"

        def empty(self, nbytes: int) -> torch.Tensor:
            return device_tensor((nbytes,), torch.uint8, device)

        def upload(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor

        def synchronize(self) -> None:
            pass

        empty_cache = synchronize

        def keep_busy(self, seconds: float) -> None:
            doubles.keep_busy()
            threading.Timer(min(seconds, 0.05), doubles.end_work).start()

        def stream(self) -> Any:
            return contextlib.nullcontext()

        @contextlib.contextmanager
        def capture(self, mode: str, *, here: bool = False) -> Iterator[Callable[[], None]]:
            begin = doubles.capture_stream if here else doubles.capture_graphs
            begin(True)
            try:
                yield lambda: None
            finally:
                begin(False)

    return Double()


_alive: list[Any] = []
