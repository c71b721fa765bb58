"""A service that restarts, and services that start at the same time on one machine.

    python -m benchmarks.restarts DIRECTORY [--repeats 5] [--output RESULT.json]

    cold, then restarts   one process after the other; the page cache is empty before the first
    N at once, cold       N processes that begin at the same moment; the last one counts

Each process is fresh, its imports are not counted, and every page is touched. The files are evicted
when all processes are ready. The loaders take turns; the sums of all bytes must be equal in all
processes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gdsload.system.available import available_bytes

from . import cache, children, places, records, rounds, tables
from .arms import parse
from .layout import several, size
from .loaded import OURS, PEERS, files_of
from .records import Refused

ARMS = {
    **{"gdsload": OURS, "gdsload:page_cache=keep": OURS, "safetensors-mmap": OURS},
    **{"runai": PEERS, "runai:NUMPY_MADVISE_HUGEPAGE=0": PEERS},
}
AT_ONCE = (2, 4, 8)
RESTARTS = 2
# Memory that the last process freed goes back to the host of a virtual machine meanwhile.
SETTLE_SECONDS = 3.0


def started(
    arm: str, source: Path, count: int, prepare: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """Results of `count` processes that load at the same time, after `prepare` was called.

    Raises Refused if one fails.
    """
    python = places.python_of(ARMS[arm])
    environment = places.environment_of(python, **parse(arm).environment)
    command = [*places.command(python, "restart_worker"), arm, str(source)]
    return children.at_once(arm, command, [environment] * count, prepare)


def make_cold(source: Path) -> None:
    """Evicts the weights. Raises Refused if some stay."""
    left = cache.evict(files_of(source))
    if left:
        raise Refused(f"{source}: {left:,} bytes stay in the page cache: no cold figure here")
    time.sleep(SETTLE_SECONDS)


def require_room(source: Path, most: int) -> None:
    """Raises Refused if so many processes cannot hold the checkpoint, each in memory of its own."""
    wanted, free = most * sum(file.stat().st_size for file in files_of(source)), available_bytes()
    if free is not None and wanted > free:
        raise Refused(f"{most} at once need {size(wanted)} of memory: {size(free)} are available")


def measured(
    arm: str, source: Path, at_once: Sequence[int], kept: dict[str, Any], sums: set[int]
) -> None:
    """Adds one round of one loader: seconds by situation. Adds the sums of the weights."""
    require_room(source, max(at_once))
    cold = partial(make_cold, source)
    runs = {"cold": started(arm, source, 1, cold)}
    for number in range(1, RESTARTS + 1):
        runs[f"restart {number}"] = started(arm, source, 1)
    for count in at_once:
        runs[f"{count} at once"] = started(arm, source, count, cold)
    sums.update(run["sum"] for found in runs.values() for run in found)
    if len(sums) != 1:
        raise Refused(f"{arm}: the processes do not agree on the weights: {sums}")
    for name, found in runs.items():
        took = [run["seconds"] for run in found]
        # Of processes at once the last one to be ready counts.
        kept.setdefault(name, []).extend([max(took)] if "once" in name else took)


def title(result: dict[str, Any]) -> str:
    repeats = several(result["rounds"], "repeat")
    return f"{result['name']}, {size(result['bytes'])}; restarts and starts at once; {repeats}"


def table(result: dict[str, Any]) -> str:
    """Median, least and most seconds of each loader in each situation."""
    situations = list(result["arms"][0]["seconds"])
    rows = []
    for arm in result["arms"]:
        spreads = [tables.spread(arm["seconds"][name]) for name in situations]
        rows.append(
            [arm["label"], *(f"{one.median:.2f} ({one.low:.2f}-{one.high:.2f})" for one in spreads)]
        )
    return tables.markdown(["loader", *(f"{name}, s" for name in situations)], rows)


def notes(result: dict[str, Any]) -> str:
    return f"- {records.described(result)}\n- median (least-most) of fresh processes in turns"


def main(words: Sequence[str] | None = None) -> int:
    how: Any = {"arms": ARMS, "repeats": 5, "counts": ("--at-once", AT_ONCE), "fact": "seconds"}
    return rounds.program("restarts", __doc__, words, partial(measured, sums=set()), **how)


if __name__ == "__main__":
    sys.exit(main())
