"""The growth of a process that loads twenty models in turn through one host pool.

    python -m benchmarks.pool DIRECTORY [--models 20] [--turns 2] [--limit-gib 4] [--output OUT]

Makes the checkpoints (0.5 to 0.9 GB each, all different) in DIRECTORY and deletes them at the end.
Each load is prefetched, loaded, touched and dropped, from storage or from the pool; after it the
process is looked at: memory that the pool holds, resident memory, mappings and descriptors.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gdsload
from gdsload import warmup
from gdsload.memory import page_cache
from gdsload.synthetic import checkpoints

from . import machine, records, tables, values
from .layout import several, size
from .records import Refused

MODEL = "qwen3-0.6b"
LAYERS = (6, 18)  # of its 28: 0.5 to 0.9 GB
GROWN = {
    "anonymous_bytes": "anonymous memory",
    "shared_bytes": "shared memory",
    "pinned_bytes": "pinned memory",
    "mappings": "mappings",
    "descriptors": "descriptors",
    "threads": "threads",
}


def make(directory: Path, count: int) -> list[Path]:
    """Checkpoints of different sizes and values."""
    first, last = LAYERS
    return [
        checkpoints.write(
            MODEL, directory / f"model-{n:02}", layers=first + n % (last - first), seed=n
        )
        for n in range(count)
    ]


def look(pool: warmup.HostPool) -> dict[str, int]:
    """What this process has now."""
    status = machine.fields("/proc/self/status")
    with open("/proc/self/maps") as lines:
        mappings = sum(1 for _ in lines)
    return {
        "held_bytes": pool.held_bytes,
        "pinned_bytes": pool.pinned_bytes,
        "held_models": len(pool.held()),
        "anonymous_bytes": int(status["RssAnon"].split()[0]) << 10,
        "shared_bytes": int(status["RssShmem"].split()[0]) << 10,
        "mappings": mappings,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
    }


def load(source: Path, pool: warmup.HostPool) -> dict[str, Any]:
    """One model in and out."""
    for file in source.glob("*.safetensors"):
        page_cache.evict(file)
    start = time.monotonic()
    with gdsload.prefetch(source) as ahead:
        tensors = gdsload.load_file(source)
    total = sum(
        int(t.view(-1)[:: 4096 // t.element_size()].sum().isfinite()) for t in tensors.values()
    )
    took = time.monotonic() - start
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    reports = (ahead.report, gdsload.last_report())
    if total != len(tensors):
        raise Refused(f"{source}: a tensor is not what was written")
    del tensors
    gc.collect()
    facts = {
        "model": source.name,
        "bytes": nbytes,
        "read_bytes": sum(report.read_bytes for report in reports),
        "from_pool_bytes": sum(report.paths.get("pool", 0) for report in reports),
        "seconds": took,
    }
    return facts | look(pool)


def require_bounded(loads: Sequence[dict[str, Any]], limit: int) -> dict[str, int]:
    """What the pool held at most. Raises Refused where it was no pool."""
    held = max(one["held_bytes"] for one in loads)
    if held > limit:
        raise Refused(f"the pool held {held:,} bytes, and may hold {limit:,}")
    if any(one["read_bytes"] for one in loads[1::2]):
        raise Refused("a model that had just been loaded was read again")
    return {
        "most_held_bytes": held,
        "most_pinned_bytes": max(one["pinned_bytes"] for one in loads),
    }


def summary(loads: Sequence[dict[str, Any]], models: int) -> dict[str, Any]:
    """What is kept: the states after the first turn and after the last, and medians of seconds."""
    return {
        "models": models,
        "turns": len(loads) // (2 * models),
        "first": {name: loads[2 * models - 1][name] for name in GROWN},
        "last": {name: loads[-1][name] for name in GROWN},
        "from_storage_s": statistics.median(one["seconds"] for one in loads if one["read_bytes"]),
        "from_pool_s": statistics.median(one["seconds"] for one in loads if not one["read_bytes"]),
    }


def growth(result: dict[str, Any]) -> dict[str, int]:
    """What the process had more of after the last turn than after the first."""
    return {name: result["last"][name] - result["first"][name] for name in GROWN}


def title(result: dict[str, Any]) -> str:
    return f"{several(result['models'], 'model')} through a pool of {size(result['limit_bytes'])}"


def table(result: dict[str, Any]) -> str:
    """What there was after the first turn, after the last, and once the pool was closed."""
    states = [result[state] for state in ("first", "last", "closed")]
    more, rows = growth(result), []
    for name, what in GROWN.items():
        form = size if name.endswith("_bytes") else "{:,}".format
        rows.append([what, *(form(state[name]) for state in states), form(more[name])])
    head = ["", "after the first turn", "after the last", "pool closed", "growth"]
    return tables.markdown(head, rows)


def notes(result: dict[str, Any]) -> str:
    return "\n".join(
        [
            f"- {records.described(result)}",
            f"- {several(result['turns'], 'turn')}, each model twice at once: first from cold"
            f" storage ({result['from_storage_s']:.2f} s), then from the pool"
            f" ({result['from_pool_s']:.2f} s), every page touched",
            f"- the pool held {size(result['most_held_bytes'])} at most, of"
            f" {size(result['limit_bytes'])} that it may; {size(result['most_pinned_bytes'])} of it"
            " pinned",
        ]
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = records.parser_of("python -m benchmarks.pool", __doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--models", type=values.whole, default=20)
    parser.add_argument("--turns", type=values.whole, default=2)
    parser.add_argument("--limit-gib", type=values.amount(0.001, "GiB"), default=4.0)
    records.add_output(parser)
    options = parser.parse_args(words)
    limit = int(options.limit_gib * (1 << 30))
    import torch  # noqa: F401 - what is imported on the way would count as growth

    def measured() -> tuple[dict[str, Any], str]:
        loads: list[dict[str, Any]] = []
        records.require_room(options)
        options.directory.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(prefix=".pool-", dir=options.directory) as room,
            warmup.HostPool(limit) as pool,
        ):
            models = make(Path(room), options.models)
            for _ in range(options.turns):
                for source in models:
                    loads.append(load(source, pool))
                    loads.append(load(source, pool))  # at once again: from the pool
        return records.record(
            "pool",
            options.directory,
            limit_bytes=limit,
            **require_bounded(loads, limit),
            **summary(loads, options.models),
            closed=look(pool),
        ), "pool"

    return records.publish("pool", options, measured)


if __name__ == "__main__":
    sys.exit(main())
