"""Whether reading through a gap is cheaper than a second request: the reason for GAP_BYTES.

    python -m benchmarks.gap MODEL_DIR_OR_FILE

First ranges at regular distances are read with their gaps (joined) and without (split); the rule
belongs where the two times cross. Then a random half of the checkpoint's
tensors, under rules from 0 to 4 MiB. All reads are direct: nothing enters the page cache.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from gdsload.checkpoint import Checkpoint
from gdsload.loading.batch import Batch
from gdsload.loading.session import Session
from gdsload.loading.settings import ReadSettings
from gdsload.planning.read_plan import GAP_BYTES, ByteRange, ReadPlan, byte_ranges_of, plan_reads
from gdsload.report import LoadReport

from . import records, tables, values

KIB = 1 << 10
GAPS = (8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, 1024 * KIB,
        2048 * KIB, 4096 * KIB)  # fmt: skip
RANGE_BYTES = (64 * KIB, 1024 * KIB)
MOST_BYTES = 256 << 20  # of a file, for one measurement


def read(checkpoint: Checkpoint, ranges: list[ByteRange], gap: int) -> tuple[float, ReadPlan]:
    """Seconds from the first request to the last byte, in fresh memory."""
    with Session(
        checkpoint, LoadReport(""), ReadSettings(cache="direct", page_cache="keep")
    ) as session:
        session.plan(ranges[:1])  # opens the backend and registers the file, before the clock
        plan = plan_reads(
            ranges,
            [shard.size for shard in checkpoint.shards],
            session.open().limits(),
            gap_bytes=gap,
        )
        began = time.monotonic()
        batch = Batch(session, plan, {}, {})
        try:
            batch.wait()
        finally:
            batch.release()
        return time.monotonic() - began, plan


def regular(checkpoint: Checkpoint, nbytes: int, gap: int) -> list[ByteRange]:
    """Byte ranges of one size at regular distances, aligned to pages, in the first shard."""
    shard = checkpoint.shards[0]
    first = -(-shard.data_start // 4096) * 4096
    step = nbytes + gap
    count = max(min(shard.size - first, MOST_BYTES) // step, 1)
    return [ByteRange(f"{number}", 0, first + number * step, nbytes) for number in range(count)]


def compared(checkpoint: Checkpoint, repeats: int) -> list[dict[str, Any]]:
    """Joined against split, for each range size and gap."""
    found = []
    for nbytes in RANGE_BYTES:
        for gap in GAPS:
            ranges = regular(checkpoint, nbytes, gap)
            times: dict[str, list[float]] = {"joined": [], "split": []}
            for turn in range(repeats):
                for name, rule in records.in_turn([("joined", gap), ("split", 0)], turn):
                    # Less than two blocks is never a gap: it is joined either way.
                    times[name].append(read(checkpoint, ranges, rule)[0])
            medians = {name: statistics.median(seconds) for name, seconds in times.items()}
            found.append({"nbytes": nbytes, "gap": gap, "ranges": len(ranges), "seconds": medians})
    return found


def subset(checkpoint: Checkpoint, repeats: int, seed: int = 0) -> list[dict[str, Any]]:
    """A random half of the tensors, in file order, by rule."""
    everything = [each for each in byte_ranges_of(checkpoint) if each.nbytes <= MOST_BYTES]
    chosen = set(random.Random(seed).sample(range(len(everything)), len(everything) // 2))
    ranges = [each for number, each in enumerate(everything) if number in chosen]
    rules = (0, *GAPS)
    found: list[dict[str, Any]] = [{"gap": gap, "times": []} for gap in rules]
    for turn in range(repeats):
        for entry in records.in_turn(found, turn):
            seconds, plan = read(checkpoint, ranges, entry["gap"])
            entry["times"].append(seconds)
            entry |= {
                "requests": len(plan.transfers),
                "wanted_bytes": plan.wanted_bytes,
                "read_bytes": plan.read_bytes,
            }
    for entry in found:
        entry["seconds"] = statistics.median(entry.pop("times"))
    return found


def main(words: list[str] | None = None) -> int:
    parser = records.parser_of("python -m benchmarks.gap", __doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("--repeats", type=values.whole, default=5)
    records.add_output(parser)
    options = parser.parse_args(words)
    try:
        records.require_room(options)
    except records.Refused as error:
        print(f"benchmarks.gap: no result: {error}", file=sys.stderr)
        return 1
    with Checkpoint.open(options.source) as checkpoint:
        joined = compared(checkpoint, options.repeats)
        halves = subset(checkpoint, options.repeats)
        result = records.record("gap", Path(checkpoint.shards[0].path), gaps=joined, subset=halves)
    rows = []
    for entry in joined:
        per = [entry["seconds"][name] / entry["ranges"] * 1e6 for name in ("joined", "split")]
        rows.append([f"{entry['nbytes'] >> 10} KiB", f"{entry['gap'] >> 10} KiB",
                     f"{per[0]:.1f}", f"{per[1]:.1f}", f"{per[0] / per[1]:.2f}"])  # fmt: skip
    head = ["ranges of", "gap", "joined, us a range", "split, us a range", "ratio"]
    print(tables.markdown(head, rows))
    rows = [
        [
            f"{entry['gap'] >> 10} KiB",
            str(entry["requests"]),
            f"{entry['read_bytes'] / max(entry['wanted_bytes'], 1) - 1:.2%}",
            f"{entry['seconds']:.3f}",
        ]
        for entry in halves
    ]
    print(f"\na random half of the tensors, {halves[0]['wanted_bytes'] / 1e9:.2f} GB\n")
    print(tables.markdown(["rule", "requests", "read over", "median s"], rows))
    print(f"\nthe rule in force: {GAP_BYTES >> 10} KiB")
    print(records.keep(result, options, "gap"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
