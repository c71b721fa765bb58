"""Initialises a GPU before its first load, in a thread, while the checkpoint is opened or the
process still imports.

    load, prefetch ──► DeviceInit: context ─► pinned ring ─► pipeline, parked at the ring

Errors are only recorded here: the load meets them again and raises them. A load waits as long as
the driver takes, and can be interrupted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from gdsload.backends import DRAM, reaches
from gdsload.backends.base import open_for
from gdsload.loading import device_batch
from gdsload.loading.claims import offered
from gdsload.memory import staging_ring
from gdsload.memory.host_buffers import current_pool
from gdsload.system import gpu, quiesce
from gdsload.system.cancellation import WAKE_SECONDS, check
from gdsload.system.threads import start_thread

# Contexts take seconds on machines with many GPUs. A prefetch waits no longer.
OPEN_SECONDS = 30.0
# How long a load that fails waits for the driver.
LEAVE_SECONDS = 0.5


def begin(
    device: str, backend: str, options: Mapping[str, Any], path: str | os.PathLike[str]
) -> DeviceInit | None:
    """Begins what the first load of this path to a device needs; None if it is there, if the
    backend does not read through host memory, or if the bytes may be in memory already."""
    if backend not in ("auto", "posix") or offered() or current_pool() is not None:
        return None
    if staging_ring.rings(DRAM, gpu.ordinal_of(device)):
        return None
    return DeviceInit(device, options, ring=True, path=path)


class DeviceInit(quiesce.Holder):
    """The initialisation of one device."""

    def __init__(
        self,
        device: str,
        options: Mapping[str, Any],
        *,
        ring: bool,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        """Begins at once. `options` are the load's. Without `ring` only the context is opened, and
        nothing if there is no such path: a process that loads nothing may still be forked."""
        self.refusal = ""
        self._device, self._options = device, dict(options)
        self._ring, self._path = ring, path
        quiesce.register(self)
        self._thread = start_thread(self._run, "gdsload-device")
        if self._thread is None:
            self.refusal = "no thread could be started to open it"

    def _run(self) -> None:
        try:
            # In this thread: a mount may hang.
            if self._path is not None and not os.path.exists(self._path):
                return
            gpu.device(gpu.ordinal_of(self._device))
            if self._ring:
                self._open_pipeline()
        except Exception as error:  # the load raises the same error
            self.refusal = str(error)

    def busy(self) -> str:
        alive = self._thread is not None and self._thread.is_alive()
        return f"{self._device} is being initialised" if alive else ""

    def quiesce(self) -> None:
        """Frees the ring, which may be newer than this `quiesce`."""
        staging_ring.release_rings(DRAM, gpu.ordinal_of(self._device))
        quiesce.unregister(self)

    def _open_pipeline(self) -> None:
        from gdsload.backends.auto.backend import AutoBackend

        # Warm bytes pass through this pipeline, whichever backend reads the cold ones.
        with AutoBackend(self._device, **self._options).fallback as backend:
            open_for(backend, self._device)

    def read_device(self, backend: str) -> str:
        """The device that reads of this backend go to, once it is initialised: "cpu" if the GPU
        cannot be used. A backend that only reads to GPUs reports the reason itself."""
        self.wait()
        if self.refusal and reaches(backend, DRAM):
            return "cpu"
        return device_batch.read_device(f"cuda:{gpu.ordinal_of(self._device)}", backend)

    def wait(self) -> None:
        """Waits until the device is initialised, or has failed, but not for ever."""
        if self.refusal or self._thread is None:
            return
        self._thread.join(OPEN_SECONDS)
        if self._thread.is_alive():
            self.refusal = f"it was not opened in {OPEN_SECONDS:.0f} s"

    def finish(self) -> None:
        """Waits for the end of it, as long as the driver takes. Raises LoadCancelled."""
        while self._thread is not None and self._thread.is_alive():
            check()
            self._thread.join(WAKE_SECONDS)

    def join_briefly(self) -> None:
        """Waits up to LEAVE_SECONDS for the thread, which may go on longer."""
        if self._thread is not None:
            self._thread.join(LEAVE_SECONDS)
