"""Figures that others have published, to compare with ours; we measured none of them.

mini-gds loads Hugging Face models through NIXL's GDS plugin; its machine had no nvidia-fs, so that
cuFile ran in its compatibility mode. NIXL's tables are nixlbench's, of the change that brought its
Linux AIO engine (ai-dynamo/nixl, October 2025), with direct I/O on one NVMe drive. The Linux AIO
figures there rise to thirty times what the drive can do: requests were taken for finished that
were not.
"""

from __future__ import annotations

from typing import NamedTuple


class Load(NamedTuple):
    """One line of mini-gds' tables: seconds, and MB of memory."""

    loader: str
    seconds: float
    cpu_mb: int
    gpu_mb: int


MINI_GDS: dict[str, tuple[Load, ...]] = {
    "qwen3-0.6b": (Load("HF loader", 1.23, 252, 1434), Load("NIXL GDS loader", 3.03, 1287, 1434)),
    "qwen2.5-7b": (
        Load("HF loader", 8.12, 252, 14527),
        Load("NIXL GDS loader", 5.70, 1287, 14569),
    ),
}
# Milliseconds of each tensor, by the study's own account of the 0.6B model.
MINI_GDS_TENSOR_MS = {"registration": 0.6, "waiting": 1.8, "clean-up": 0.3}

# nixlbench, batch size 1, GB/s of each block size: 4 KiB to 64 MiB.
BLOCKS = tuple(4096 << step for step in range(15))
NIXL_BENCH = {
    "AIO": (
        0.165290, 0.289647, 0.449769, 0.847057, 1.393177, 1.976728, 1.984314, 2.681113, 2.706190,
        2.683741, 2.621102, 2.647123, 2.680175, 2.617827, 2.586386,
    ),
    "URING": (
        0.208734, 0.418782, 0.774555, 1.312282, 1.736099, 2.148162, 2.804096, 2.636124, 2.656291,
        2.867947, 2.642940, 2.629579, 2.634350, 2.595498, 2.589345,
    ),
    "LINUXAIO": (
        0.103491, 0.202123, 0.407086, 0.839628, 2.037954, 4.011799, 5.590394, 13.309550, 26.005428,
        4.383999, 6.484923, 13.066368, 26.129505, 52.217702, 84.701161,
    ),
}  # fmt: skip
