"""Twenty models in turn through one host pool: what a process has grown by when it is done.

    python -m benchmarks.pool DIRECTORY [--models 20] [--turns 2] [--limit-gib 4] [--json OUT]

Makes the checkpoints (0.5 to 0.9 GB each, all different) in DIRECTORY and deletes them at the end.
Each load is prefetched, loaded, touched and dropped, from storage or from the pool; after it the
process is looked at: memory that the pool holds, resident memory, mappings and descriptors.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gdsload
from gdsload import residency, synth, warmup

from . import machine

ROOT = Path(__file__).resolve().parents[1]
MODEL = "qwen3-0.6b"
LAYERS = (6, 18)  # of its 28: 0.5 to 0.9 GB


def make(directory: Path, count: int) -> list[Path]:
    """So many checkpoints of different sizes and values."""
    first, last = LAYERS
    return [
        synth.write(MODEL, directory / f"model-{n:02}", layers=first + n % (last - first), seed=n)
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
        residency.evict(file)
    start = time.monotonic()
    with gdsload.prefetch(source) as ahead:
        tensors = gdsload.load_file(source)
    total = sum(int(t.view(-1)[:: 4096 // t.element_size()].sum().isfinite()) for t in
                tensors.values())  # fmt: skip
    took = time.monotonic() - start
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    reports = (ahead.report, gdsload.last_report())
    if total != len(tensors):
        raise SystemExit(f"{source}: a tensor is not what was written")
    del tensors
    gc.collect()
    facts = {
        "model": source.name,
        "bytes": nbytes,
        "read_bytes": sum(report.read_bytes for report in reports),
        "from_pool_bytes": sum(report.roads.get("pool", 0) for report in reports),
        "seconds": took,
    }
    return facts | look(pool)


def verdict(loads: Sequence[dict[str, Any]], models: int) -> dict[str, Any]:
    """How much more there is after the last turn than after the first."""
    first, last = loads[models - 1], loads[-1]
    names = ("anonymous_bytes", "shared_bytes", "mappings", "descriptors", "threads")
    return {
        "most_held_bytes": max(one["held_bytes"] for one in loads),
        "most_pinned_bytes": max(one["pinned_bytes"] for one in loads),
        "growth": {name: last[name] - first[name] for name in names},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--limit-gib", type=float, default=4)
    parser.add_argument("--json", type=Path)
    words = parser.parse_args(arguments)
    limit = int(words.limit_gib * (1 << 30))
    import torch  # noqa: F401 - what is imported on the way would count as growth

    words.directory.mkdir(parents=True, exist_ok=True)
    models = make(words.directory, words.models)
    loads: list[dict[str, Any]] = []
    try:
        with warmup.HostPool(limit) as pool:
            for _ in range(words.turns):
                for source in models:
                    loads.append(load(source, pool))
                    loads.append(load(source, pool))  # at once again: from the pool
            after = look(pool)
        closed = look(pool)
    finally:
        for source in models:
            shutil.rmtree(source)
    found = verdict(loads, 2 * words.models)
    print(json.dumps(found | {"open": after, "closed": closed}, indent=2))
    if found["most_held_bytes"] > limit:
        raise SystemExit("the pool held more than its limit")
    if any(one["read_bytes"] for one in loads[1::2]):
        raise SystemExit("a model that had just been loaded was read again")
    if words.json:
        facts = {
            "commit": machine.commit(ROOT),
            "machine": machine.describe(words.directory),
            "limit_bytes": limit,
            "closed": closed,
        }
        kept = facts | found | {"loads": loads}
        words.json.write_text(json.dumps(kept, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
