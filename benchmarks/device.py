"""The work of a worker if the tensors are on a GPU: sums, checksums, and peak memory.

The sums are those that worker.py takes on the CPU, so that arms compare wherever they load to.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Mapping
from types import TracebackType
from typing import Any

_LOOK_SECONDS = 0.002


def raw(tensor: Any) -> Any:
    """The bytes of a tensor, on its device."""
    import torch

    return tensor.contiguous().view(-1).view(torch.uint8)


def touch(tensors: Mapping[str, Any]) -> dict[str, int]:
    """The sum of each tensor's bytes taken as 64-bit integers, added up where it is."""
    import torch

    sums = {}
    for name, tensor in tensors.items():
        flat = raw(tensor)
        whole = flat.numel() // 8 * 8
        words, tail = flat[:whole], flat[whole:].cpu()
        if words.data_ptr() % 8:
            words = words.clone()
        total = int(words.view(torch.int64).sum()) if whole else 0
        total += int.from_bytes(bytes(tail.tolist()), "little")
        sums[name] = total & 0xFFFFFFFFFFFFFFFF
    return sums


def checksums(tensors: Mapping[str, Any]) -> dict[str, int]:
    """CRC-32 of each tensor, brought to the CPU for it. Outside the clock."""
    return {name: zlib.crc32(raw(tensor).cpu().numpy()) for name, tensor in tensors.items()}


class Watch:
    """How much of a GPU's memory was taken meanwhile, by whomever: torch's allocator does not know
    what a library takes beside it."""

    def __init__(self, device: str) -> None:
        self._cuda = device.partition(":")[0] == "cuda"
        self._device = device
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._first = self._least = 0

    def _free(self) -> int:
        import torch

        return int(torch.cuda.mem_get_info(self._device)[0])

    def _look(self) -> None:
        while not self._end.wait(_LOOK_SECONDS):
            self._least = min(self._least, self._free())

    def __enter__(self) -> Watch:
        if self._cuda:
            self._first = self._least = self._free()
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._cuda:
            self._end.set()
            self._thread.join()

    def facts(self) -> dict[str, Any]:
        """Nothing of a CPU."""
        if not self._cuda:
            return {}
        return {
            "peak_vram_bytes": self._first - self._least,
            "vram_bytes": self._first - self._free(),
        }
