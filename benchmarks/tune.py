"""Finds each arm's best settings on this machine, so that no arm loses by a bad default.

    gdsload bench tune MODEL_DIR --repeats 3
    gdsload bench cold MODEL_DIR --best benchmarks/results/best-...json

Runs the candidates as arms of one cold benchmark, in turn, and names the one of the lowest median
of each kind. Arguments are those of `bench cold`; `--arms` names kinds.
"""

from __future__ import annotations

import sys
from typing import Any

from . import cold, records, tables
from .records import WrongArguments

QUEUE = "runai:RUNAI_STREAMER_FS_QUEUE_DEPTH={},RUNAI_STREAMER_FS_CHUNK_BYTESIZE={}"
# numpy asks for huge pages for what runai reads into: dear where the host must find them first.
SMALL = ",NUMPY_MADVISE_HUGEPAGE=0"
CANDIDATES: dict[str, tuple[str, ...]] = {
    "bare": (
        *(f"bare:request_kib={size},depth={depth}"
          for size, depth in ((512, 32), (1024, 16), (1024, 32), (1024, 64), (2048, 16),
                              (2048, 32), (4096, 16), (8192, 16), (8192, 64))),
    ),
    "safetensors-mmap": ("safetensors-mmap",),
    "safetensors-pread": ("safetensors-pread",),
    "fastsafetensors": (
        *(f"fastsafetensors:max_threads={threads}" for threads in (2, 4, 8, 16, 32)),
        "fastsafetensors:max_threads=16,bbuf_size_kb=65536",
        "fastsafetensors:max_threads=8,bbuf_size_kb=65536",
    ),
    "fastsafetensors-parallel": (
        *(f"fastsafetensors-parallel:max_threads={threads}" for threads in (4, 8, 16, 32)),
        "fastsafetensors-parallel:max_threads=16,queue_size=1",
    ),
    "runai": (
        "runai",
        "runai:NUMPY_MADVISE_HUGEPAGE=0",
        QUEUE.format(16, 8 << 20) + SMALL,
        QUEUE.format(32, 2 << 20) + SMALL,
        QUEUE.format(64, 1 << 20) + SMALL,
        "runai:RUNAI_STREAMER_FS_STRATEGY=libaio_direct" + SMALL,
        "runai:RUNAI_STREAMER_FS_STRATEGY=sync_buffered" + SMALL,
    ),
}  # fmt: skip


def best(result: dict[str, Any]) -> dict[str, str]:
    """The label with the lowest median of each kind that ran."""
    medians = {arm["label"]: tables.seconds_of(arm).median for arm in result["arms"]}
    return {
        kind: min(ran, key=lambda label: medians[label])
        for kind, candidates in CANDIDATES.items()
        if (ran := [label for label in candidates if label in medians])
    }


def notes(result: dict[str, Any]) -> str:
    found = ", ".join(result["best"].values())
    return f"{tables.notes(result)}\n- the lowest median of each kind: {found}"


def main(words: list[str] | None = None) -> int:
    options = cold.arguments(words, prog="gdsload bench tune", about=__doc__ or "")
    kinds = options.arms or list(CANDIDATES)

    def measured() -> tuple[dict[str, Any], str]:
        if len(options.state) > 1:
            raise WrongArguments("--state: settings are chosen in one state of memory")
        unknown = [kind for kind in kinds if kind not in CANDIDATES]
        if unknown:
            kind = unknown[0].partition(":")[0]
            raise WrongArguments(
                f"--arms {unknown[0]}: tune has no settings of {kind} to compare; it takes:"
                f" {', '.join(CANDIDATES)}"
            )
        options.arms = [label for kind in kinds for label in CANDIDATES[kind]]
        result = cold.bench(options)
        return {**result, "kind": "best", "best": best(result)}, f"best-{cold.name_of(result)}"

    return records.publish("bench tune", options, measured)


if __name__ == "__main__":
    sys.exit(main())
