"""Ranks of one machine that load a checkpoint into CPU memory: seconds, and bytes from the disk.

    python -m benchmarks.ranks DIRECTORY [--ranks 1 2 4] [--repeats 3] [--output RESULT.json]

gdsload shares the reads over gloo, as fastsafetensors and the streamer of Run:ai do; in the arms
"...-each" every rank reads all. The files are evicted when all ranks are ready. A load ends when
each rank has all tensors and has read a byte of each of their pages. The loaders take turns; the
sums of all bytes must be equal in all ranks.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import cache, children, places, records, rounds, tables
from .layout import several, size
from .loaded import OURS, PEERS, files_of
from .records import Refused

ARMS = {
    "gdsload": OURS,
    "gdsload-each": OURS,
    "fastsafetensors": PEERS,
    "runai": PEERS,
    "safetensors-each": OURS,
}
RANKS = (1, 2, 4)


def loaded(arm: str, source: Path, count: int) -> dict[str, Any]:
    """One cold load by `count` ranks. Raises Refused if one fails."""
    files = files_of(source)
    python = places.python_of(ARMS[arm])
    command = [*places.command(python, "rank_worker"), arm, *map(str, files)]

    def evict() -> None:
        if left := cache.evict(files):
            raise Refused(f"{source}: {left:,} bytes stay in the page cache: no cold figure here")

    with tempfile.TemporaryDirectory() as meeting:
        environments = [
            places.environment_of(
                python,
                RANK=str(number),
                LOCAL_RANK=str(number),
                WORLD_SIZE=str(count),
                LOCAL_WORLD_SIZE=str(count),
                GROUP=f"{meeting}/group",
                OMP_NUM_THREADS="1",
            )
            for number in range(count)
        ]
        label = f"{arm} with {several(count, 'rank')}"
        found = children.at_once(label, command, environments, evict)
    if len({(one["sum"], one["bytes"]) for one in found}) != 1:
        raise Refused(f"{arm}: its ranks do not agree on the weights")
    return {
        "seconds": max(one["seconds"] for one in found),
        "amplification": sum(one["disk_bytes"] for one in found) / found[0]["bytes"],
        "sum": found[0]["sum"],
    }


def title(result: dict[str, Any]) -> str:
    repeats = several(result["rounds"], "repeat")
    return f"{result['name']}, {size(result['bytes'])}; read by several ranks, cold; {repeats}"


def table(result: dict[str, Any]) -> str:
    """Median, least and most seconds, and the amplification of each loader."""
    counts = list(result["arms"][0]["ranks"])
    rows = []
    for arm in result["arms"]:
        row = [arm["label"]]
        for count in counts:
            took = tables.spread(arm["ranks"][count]["seconds"])
            amplification = tables.spread(arm["ranks"][count]["amplification"]).median
            row += [f"{took.median:.2f} ({took.low:.2f}-{took.high:.2f})", f"{amplification:.2f}"]
        rows.append(row)
    head = ["loader"]
    for count in counts:
        head += [f"{several(int(count), 'rank')}, s", "bytes read"]
    return tables.markdown(head, rows)


def notes(result: dict[str, Any]) -> str:
    return (
        f"- {records.described(result)}\n"
        "- median (least-most) of the slowest rank, fresh processes in turns; bytes read: from the"
        " disk by all ranks together, over the bytes of the tensors; fastsafetensors with"
        " max_threads=2"
    )


def main(words: Sequence[str] | None = None) -> int:
    sums = set()

    def measured(arm: str, source: Path, counts: Sequence[int], kept: dict[str, Any]) -> None:
        for count in counts:
            one = loaded(arm, source, count)
            sums.add(one.pop("sum"))
            if len(sums) != 1:
                raise Refused("the loaders do not agree on the weights")
            facts = kept.setdefault(str(count), {})
            for fact, value in one.items():
                facts.setdefault(fact, []).append(round(value, 3))

    how: Any = {"arms": ARMS, "repeats": 3, "counts": ("--ranks", RANKS), "fact": "ranks"}
    return rounds.program("ranks", __doc__, words, measured, **how)


if __name__ == "__main__":
    sys.exit(main())
