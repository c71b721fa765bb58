"""A service that restarts, and services that start at the same time on one machine.

    python -m benchmarks.restarts DIRECTORY [--repeats 5] [--output RESULT.json]

    cold, then restarts   one process after the other; the page cache is empty before the first
    N at once, cold       N processes that begin at the same moment; the last one counts

Each process is fresh, its imports are not counted, and every page is touched. The loaders take
turns; the sums of all processes must be equal.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from . import cache, places, records, tables, values
from .layout import several, size
from .loaded import OURS, PEERS
from .records import Refused

ARMS = {"gdsload": OURS, "gdsload:page_cache=fill": OURS, "safetensors-mmap": OURS, "runai": PEERS}
AT_ONCE = (2, 4, 8)
RESTARTS = 2
# Memory that the last process freed goes back to the host of a virtual machine meanwhile.
SETTLE_SECONDS = 3.0


def started(arm: str, source: Path, count: int) -> list[dict[str, Any]]:
    """Results of `count` processes that load at the same time. Raises Refused if one fails."""
    ours = ARMS[arm] == OURS
    python = sys.executable if ours else places.python_of(ARMS[arm])
    environment = places.own_environment() if ours else places.environment()
    command = [*places.command(python, "restart_worker"), arm, str(source)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with ExitStack() as stack:
        running = [
            stack.enter_context(subprocess.Popen(command, env=environment, text=True, **pipes))
            for _ in range(count)
        ]
        for process in running:
            if process.stdout is None or process.stdout.readline() != "ready\n":
                raise Refused(f"{arm}: {process.communicate()[1].strip()[-200:]}")
        for process in running:
            if process.stdin is not None:
                process.stdin.write("\n")
                process.stdin.flush()
        return [json.loads(process.communicate()[0]) for process in running]


def make_cold(source: Path) -> None:
    """Evicts the weights. Raises Refused if some stay."""
    left = cache.evict(source.glob("*.safetensors"))
    if left:
        raise Refused(f"{source}: {left:,} bytes stay in the page cache: no cold figure here")
    time.sleep(SETTLE_SECONDS)


def measured(arm: str, source: Path, at_once: Sequence[int]) -> dict[str, list[float]]:
    """One round of one loader: seconds by situation."""
    make_cold(source)
    runs = {"cold": started(arm, source, 1)}
    runs["restart"] = [run for _ in range(RESTARTS) for run in started(arm, source, 1)]
    for count in at_once:
        make_cold(source)
        runs[f"{count} at once"] = started(arm, source, count)
    sums = {run["sum"] for found in runs.values() for run in found}
    if len(sums) != 1:
        raise Refused(f"{arm}: its processes do not agree on the weights: {sums}")
    seconds = {name: [run["seconds"] for run in found] for name, found in runs.items()}
    # What counts is the last process to be ready.
    return {name: [max(took)] if "once" in name else took for name, took in seconds.items()}


def title(result: dict[str, Any]) -> str:
    rounds = several(result["rounds"], "repeat")
    return f"{result['name']}, {size(result['bytes'])}; restarts and starts at once; {rounds}"


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
    parser = records.parser_of("python -m benchmarks.restarts", __doc__)
    records.add_source(parser)
    parser.add_argument("--repeats", dest="rounds", type=values.whole, default=5, metavar="N")
    parser.add_argument("--arms", nargs="+", choices=[*ARMS], default=[*ARMS])
    parser.add_argument("--at-once", nargs="+", type=values.whole, default=[*AT_ONCE], metavar="N")
    options = parser.parse_args(words)

    def result() -> tuple[dict[str, Any], str]:
        with records.source_of(options) as source:
            records.require_room(options)
            cache.require_cold_can_be(source.glob("*.safetensors"))
            found: dict[str, dict[str, list[float]]] = {arm: {} for arm in options.arms}
            for turn in range(options.rounds):
                for arm in records.in_turn(options.arms, turn):
                    for name, took in measured(arm, source, options.at_once).items():
                        found[arm].setdefault(name, []).extend(took)
                    records.say(f"round {turn + 1}, {arm}: done")
            name = records.name_of(options, source)
            nbytes = sum(file.stat().st_size for file in source.glob("*.safetensors"))
            arms = [{"label": arm, "seconds": seconds} for arm, seconds in found.items()]
            return records.record(
                "restarts", source, name=name, bytes=nbytes, rounds=options.rounds, arms=arms
            ), f"restarts-{name}"

    return records.publish("restarts", options, result)


if __name__ == "__main__":
    sys.exit(main())
