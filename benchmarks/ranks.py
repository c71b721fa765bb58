"""Ranks of one machine that load a checkpoint into CPU memory: seconds, and bytes from the disk.

    python -m benchmarks.ranks DIRECTORY [--ranks 1 2 4] [--repeats 3] [--output RESULT.json]

gdsload shares the reads over gloo, as fastsafetensors and the streamer of Run:ai do; in the arms
"...-each" every rank reads all. The files are evicted before each load. A load ends when each rank
has all tensors and has read a byte of each of their pages. The loaders take turns; the sums of all
ranks must be equal.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from . import cache, places, records, tables, values
from .layout import several, size
from .loaded import OURS, PEERS
from .records import Refused

ARMS = {
    "gdsload": OURS,
    "gdsload-each": OURS,
    "fastsafetensors": PEERS,
    "runai": PEERS,
    "safetensors-each": OURS,
}
RANKS = (1, 2, 4)
PATIENCE_SECONDS = 300


def loaded(arm: str, source: Path, count: int) -> dict[str, Any]:
    """One cold load by `count` ranks. Raises Refused if one fails."""
    files = sorted(map(str, source.glob("*.safetensors")))
    if left := cache.evict(map(Path, files)):
        raise Refused(f"{source}: {left:,} bytes stay in the page cache: no cold figure here")
    ours = ARMS[arm] == OURS
    command = places.command(sys.executable if ours else places.python_of(PEERS), "rank_worker")
    environment = places.own_environment if ours else places.environment
    with tempfile.TemporaryDirectory() as meeting, ExitStack() as stack:
        running = []
        for number in range(count):
            variables = environment(
                RANK=str(number),
                LOCAL_RANK=str(number),
                WORLD_SIZE=str(count),
                LOCAL_WORLD_SIZE=str(count),
                GROUP=f"{meeting}/group",
                OMP_NUM_THREADS="1",
            )
            process = stack.enter_context(
                subprocess.Popen(
                    [*command, arm, *files],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=variables,
                )
            )
            stack.callback(process.kill)
            running.append(process)
        try:
            said = [process.communicate(timeout=PATIENCE_SECONDS) for process in running]
        except subprocess.TimeoutExpired as error:
            raise Refused(f"{arm}: no end after {PATIENCE_SECONDS} s") from error
    for process, (_, errors) in zip(running, said, strict=True):
        if process.returncode:
            raise Refused(f"{arm} with {several(count, 'rank')}: {errors.strip()[-200:]}")
    found = [json.loads(out.splitlines()[-1]) for out, _ in said]
    if len({(one["sum"], one["bytes"]) for one in found}) != 1:
        raise Refused(f"{arm}: its ranks do not agree on the weights")
    return {
        "seconds": max(one["seconds"] for one in found),
        "amplification": sum(one["disk_bytes"] for one in found) / found[0]["bytes"],
        "sum": found[0]["sum"],
    }


def title(result: dict[str, Any]) -> str:
    rounds = several(result["rounds"], "repeat")
    return f"{result['name']}, {size(result['bytes'])}; read by several ranks, cold; {rounds}"


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
        " disk by all ranks together, over the bytes of the tensors"
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = records.parser_of("python -m benchmarks.ranks", __doc__)
    records.add_source(parser)
    parser.add_argument("--repeats", dest="rounds", type=values.whole, default=3, metavar="N")
    parser.add_argument("--arms", nargs="+", choices=[*ARMS], default=[*ARMS])
    parser.add_argument("--ranks", nargs="+", type=values.whole, default=[*RANKS], metavar="N")
    options = parser.parse_args(words)

    def result() -> tuple[dict[str, Any], str]:
        with records.source_of(options) as source:
            records.require_room(options)
            cache.require_cold_can_be(source.glob("*.safetensors"))
            found: dict[str, dict[str, dict[str, list[float]]]] = {arm: {} for arm in options.arms}
            sums = set()
            for turn in range(options.rounds):
                for arm in records.in_turn(options.arms, turn):
                    for count in options.ranks:
                        one = loaded(arm, source, count)
                        sums.add(one.pop("sum"))
                        for fact, value in one.items():
                            kept = found[arm].setdefault(str(count), {})
                            kept.setdefault(fact, []).append(round(value, 3))
                    records.say(f"round {turn + 1}, {arm}: done")
            if len(sums) != 1:
                raise Refused("the loaders do not agree on the weights")
            name = records.name_of(options, source)
            nbytes = sum(file.stat().st_size for file in source.glob("*.safetensors"))
            arms = [{"label": arm, "ranks": ranks} for arm, ranks in found.items()]
            return records.record(
                "ranks", source, name=name, bytes=nbytes, rounds=options.rounds, arms=arms
            ), f"ranks-{name}"

    return records.publish("ranks", options, result)


if __name__ == "__main__":
    sys.exit(main())
