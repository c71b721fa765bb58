"""A worker of vLLM's CPU platform that notes what loading its weights takes.

vLLM imports it by name in each of its processes (`worker_cls`); `vllm_check.py` asks for the notes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

import gdsload


class MeasuredWorker(CPUWorker):  # type: ignore[misc]
    """Measures `load_model`: building the model, reading, converting, and what follows in it; and
    `reload_weights`."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with self._measured():
            super().load_model(*args, **kwargs)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        with self._measured():
            super().reload_weights(*args, **kwargs)

    def load_cost(self) -> dict[str, float]:
        """Of the last load: seconds, bytes; of gdsload also what its report counted."""
        return self._cost

    @contextmanager
    def _measured(self) -> Iterator[None]:
        disk_bytes, start = _fact("io", "read_bytes"), time.monotonic()
        yield
        self._cost = {
            "seconds": time.monotonic() - start,
            "peak_rss_bytes": _fact("status", "VmHWM") << 10,
            "disk_bytes": _fact("io", "read_bytes") - disk_bytes,
        }
        if self.load_config.load_format == "gdsload":
            report = gdsload.last_report()
            for name in ("wanted_bytes", "read_bytes", "received_bytes"):
                self._cost[name] = getattr(report, name)


def _fact(file: str, name: str) -> int:
    """A number that the kernel knows of this process."""
    for line in Path("/proc/self", file).read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise LookupError(f"/proc/self/{file} has no {name}")
