"""Which request size, how many in flight, by which engine: the sweep that chose gdsload's defaults.

    python -m benchmarks.engines MODEL_DIR --repeats 3
    python -m benchmarks.engines MODEL_DIR --engine uring --populate 0 1 2 --huge auto never

Every combination is an arm of one cold benchmark (cold.py): fresh processes, in turn, judged by
the same rules.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

from . import cold, records, tables
from .records import Refused

ENGINES = ("uring", "linuxaio", "threads", "aio")
AXES = ("engine", "populate_threads", "huge_pages", "request_bytes", "depth")


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engines", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("--engine", nargs="+", default=ENGINES, choices=ENGINES)
    parser.add_argument("--request-kib", nargs="+", type=int, default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--depth", nargs="+", type=int, default=[4, 8, 16, 32, 64])
    parser.add_argument("--populate", nargs="+", type=int, default=[2], help="threads")
    parser.add_argument("--huge", nargs="+", default=["auto"], choices=("auto", "never"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--state", choices=("backed", "idle", "none"), default="backed")
    parser.add_argument("--neighbours", action="store_true")
    parser.add_argument("--name")
    records.add_output(parser)
    return parser.parse_args(words)


def label(values: dict[str, Any]) -> str:
    return "gdsload:" + ",".join(f"{name}={value}" for name, value in values.items())


def grid(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The settings of each arm."""
    sizes = [size << 10 for size in options.request_kib]
    axes = (options.engine, options.populate, options.huge, sizes, options.depth)
    return [dict(zip(AXES, values, strict=True)) for values in itertools.product(*axes)]


def pivot(result: dict[str, Any]) -> str:
    """GB/s: request sizes down, requests in flight across, one table for the rest."""
    rates: dict[tuple[Any, ...], dict[tuple[int, int], float]] = {}
    nbytes = result["checkpoint"]["bytes"]
    settings = {arm["label"]: arm["settings"] for arm in result["arms"]}
    for name, runs in tables.grouped(result).items():
        *group, size, depth = (settings[name][axis] for axis in AXES)
        rate = nbytes / tables.seconds_of(runs).median / 1e9
        rates.setdefault(tuple(group), {})[size, depth] = rate
    parts = []
    for (engine, populate, huge), found in rates.items():
        depths = sorted({depth for _, depth in found})
        rows = [
            [f"{size >> 10} KiB", *(f"{found.get((size, depth), 0):.2f}" for depth in depths)]
            for size in sorted({size for size, _ in found})
        ]
        head = [f"{engine}, GB/s", *(f"{depth} in flight" for depth in depths)]
        parts.append(
            f"populate threads {populate}, huge pages {huge}\n\n{tables.markdown(head, rows)}"
        )
    return "\n\n".join(parts)


def main(words: list[str] | None = None) -> int:
    options = arguments(words)
    command = [str(options.source), "--state", options.state, "--repeats", str(options.repeats)]
    command += ["--name", options.name] if options.name else []
    command += ["--neighbours"] if options.neighbours else []
    command += ["--no-checksums", "--arms", *(label(values) for values in grid(options))]
    try:
        result = cold.bench(cold.arguments(command))
    except Refused as error:
        print(f"engines: no table: {error}", file=sys.stderr)
        return 1
    name, state = result["checkpoint"]["name"], result["conditions"]["state"]
    for run in result["runs"]:
        run.pop("notes", None)
    text = f"{tables.title(result)}\n\n{pivot(result)}\n\n{tables.notes(result)}"
    records.finish(result, options, f"engines-{name}-{state}", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
