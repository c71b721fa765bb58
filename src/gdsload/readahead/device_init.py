"""A GPU made ready ahead of its first load: its context is opened, for what a prefetch brings
there, and the ring that a load will pass through is pinned, by a thread of its own while the
process still imports.

    prefetch ──► DeviceInit: context ─► ring, pinned ─► road, which waits at the ring for the load

Nobody has asked for the device yet. What goes wrong here is noted, goes wrong in the load again,
and is raised there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gdsload.backends import DRAM, VRAM, Memory, Registration, reaches
from gdsload.loading.device_batch import reached
from gdsload.system import gpu
from gdsload.system.threads import start_thread

# Contexts of machines with many GPUs take seconds; a driver that hangs is left to the load.
OPEN_SECONDS = 30.0


class DeviceInit:
    """One device on its way to being ready."""

    def __init__(self, device: str, options: Mapping[str, Any], *, ring: bool) -> None:
        """Begins at once. `options` are the load's. Without `ring` only the context is opened."""
        self.refusal = ""
        self._device, self._options = device, dict(options)
        self._ring = ring
        self._thread = start_thread(self._run, "gdsload-device")
        if self._thread is None:
            self.refusal = "no thread could be started to open it"

    def _run(self) -> None:
        try:
            gpu.device(gpu.ordinal_of(self._device))
            if self._ring:
                self._open_road()
        except Exception as error:  # the load meets it again, whatever it is
            self.refusal = str(error)

    def _open_road(self) -> None:
        from gdsload.backends.auto.candidates import LAST, Candidates

        # Warm bytes take this road, whatever cold ones will.
        with Candidates(self._device, self._options)[LAST].backend as backend:
            nothing = Registration(Memory(VRAM, 0, 0, device=self._device), -1)
            backend.release(backend.prepare([], [], [nothing]))

    def landing(self, backend: str) -> str:
        """Where this backend's reads go, once it is ready: to the device itself, or to the host's
        memory where it cannot be used. One that leads to devices alone says itself what is in its
        way."""
        self.wait()
        if self.refusal and reaches(backend, DRAM):
            return "cpu"
        return reached(f"cuda:{gpu.ordinal_of(self._device)}", backend)

    def wait(self) -> None:
        """Returns when it is ready, or cannot be: also when it was said before that it is not."""
        if self.refusal or self._thread is None:
            return
        self._thread.join(OPEN_SECONDS)
        if self._thread.is_alive():
            self.refusal = f"it has not been opened in {OPEN_SECONDS:.0f} s"
