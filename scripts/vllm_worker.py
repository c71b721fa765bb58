"""A worker of vLLM's CPU platform that notes what loading its model takes.

vLLM imports it by name in each of its processes (`worker_cls`); `vllm_check.py` asks for the notes.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker


class MeasuredWorker(CPUWorker):  # type: ignore[misc]
    """Measures `load_model`: building the model, reading, converting, and what follows in it."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        read_bytes, start = _fact("io", "read_bytes"), time.monotonic()
        super().load_model(*args, **kwargs)
        self._cost = {
            "seconds": time.monotonic() - start,
            "peak_rss_bytes": _fact("status", "VmHWM") << 10,
            "read_bytes": _fact("io", "read_bytes") - read_bytes,
        }

    def load_cost(self) -> dict[str, float]:
        return self._cost


def _fact(file: str, name: str) -> int:
    """A number that the kernel knows of this process."""
    for line in Path("/proc/self", file).read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise LookupError(f"/proc/self/{file} has no {name}")
