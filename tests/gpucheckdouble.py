"""Stands for torch's CUDA in `scripts/gpu_check.py --gpu`: the doubles, in a process of its own.

    python gpucheckdouble.py --gpu gpucheckdouble.py ...    # the script, with these arguments

As a program it runs the script, whose children are then forked from a process that has imported
torch: importing it again in twenty processes takes most of the time of the test.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import pytest
import torch

import forked
import gpudoubles
from devicetensors import TorchCuda, device_tensor
from gdsload.loading import torch_device
from gdsload.system import device_name


def gpu(base: type[Any], device: str) -> Any:
    """An instance of the script's `Gpu` over the doubles, for the rest of the process."""
    patch = pytest.MonkeyPatch()
    if libraries := os.environ.get("GPU_DOUBLE_LIBRARIES"):
        patch.setattr(gpudoubles, "built", lambda name: Path(libraries, f"lib{name}.so"))
    patch.setattr(torch_device, "empty", device_tensor)
    patch.setattr(torch_device, "_torch_cuda", TorchCuda)
    patch.setattr(device_name, "require_target", str)
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

        def free_bytes(self) -> int:
            return 0

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


# ---- the script, with children that are forked ---------------------------------------------------

SCRIPT = str(Path(__file__).resolve().parents[1] / "scripts/gpu_check.py")


def run_script(arguments: list[str]) -> None:
    """Runs the script in this process as Python would, its names in `__main__` until the end."""
    sys.argv = [SCRIPT, *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = SCRIPT
    exec(compile(Path(SCRIPT).read_text(), SCRIPT, "exec"), main.__dict__)


def run_child(arguments: list[str], environment: dict[str, str] | None) -> None:
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    run_script(arguments)


class ForkedPopen(subprocess.Popen[Any]):
    """Forks where the script starts itself; other programs start as always."""

    def _execute_child(self, *facts: Any) -> None:
        command, environment, pipes, new_session = facts[0], facts[6], facts[10:16], facts[21]
        if list(map(str, command[:2])) != [sys.executable, SCRIPT]:
            super()._execute_child(*facts)  # type: ignore[misc]
            return
        faulthandler.cancel_dump_traceback_later()  # a child would wait for its thread
        sys.stdout.flush()
        self.pid = forked.fork()
        if self.pid:
            self._child_created = True
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if new_session:
            os.setsid()
        for target, fd in enumerate((pipes[0], pipes[3], pipes[5])):
            if fd != -1:
                os.dup2(fd, target)
        for fd in (pipes[1], pipes[2], pipes[4]):  # the parent's ends
            if fd != -1:
                os.close(fd)
        forked.end_with(lambda: run_child(list(map(str, command[2:])), environment))


if __name__ == "__main__":
    subprocess.Popen = ForkedPopen  # type: ignore[misc]
    run_script(sys.argv[1:])
