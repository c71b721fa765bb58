"""Each backend and engine, by request size and reads in flight: the reasons for our defaults.

    gdsload bench engines MODEL_DIR
    gdsload bench engines MODEL_DIR --engine threads --pages auto huge bounce

Every combination is an arm of one cold benchmark (cold.py): fresh processes, in turn, under
the same rules. Reads in flight are `depth` to posix and gds, and `threads` to gds_mt.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from typing import Any

from gdsload._native.first_touch import MODES
from gdsload.backends.posix.engines import ENGINES

from . import cold, records, tables, values
from .arms import parse
from .loaded import CPU
from .pages import STATES

CUFILE = ("gds", "gds_mt")
SIZES = [1 << 20, 4 << 20, 16 << 20]
IN_FLIGHT = [4, 16, 64]


def arguments(words: list[str] | None) -> argparse.Namespace:
    names = (*ENGINES, *CUFILE)
    parser = records.parser_of("gdsload bench engines", __doc__)
    records.add_source(parser)
    parser.add_argument(
        "--engine",
        nargs="+",
        default=names,
        choices=names,
        help="engines of posix, and backends (default: all)",
    )
    parser.add_argument(
        "--request",
        nargs="+",
        type=values.size,
        default=SIZES,
        metavar="BYTES",
        help="largest size of a read (default 1M 4M 16M)",
    )
    parser.add_argument(
        "--in-flight",
        nargs="+",
        type=values.whole,
        default=IN_FLIGHT,
        metavar="N",
        help="reads in flight (default 4 16 64)",
    )
    parser.add_argument(
        "--pages",
        nargs="+",
        default=["auto"],
        choices=tuple(MODES),
        help="how the threads of posix touch fresh memory (default auto)",
    )
    parser.add_argument(
        "--repeats",
        type=values.whole,
        default=3,
        metavar="N",
        help="runs of each combination (default 3)",
    )
    parser.add_argument(
        "--state", choices=STATES, default="small", help="state of the memory, as in bench cold"
    )
    parser.add_argument(
        "--device", type=values.device, default=CPU, help="target device: cpu, cuda:0"
    )
    parser.add_argument(
        "--neighbours", action="store_true", help="other programs use the disk meanwhile"
    )
    return parser.parse_args(words)


def grid(options: argparse.Namespace) -> Iterator[str]:
    """The arms: each engine and backend with the combinations that apply to it."""
    for name, size, number in itertools.product(options.engine, options.request, options.in_flight):
        if name in CUFILE:
            many = "threads" if name == "gds_mt" else "depth"
            yield f"gdsload:backend={name},request_bytes={size},{many}={number}"
            continue
        for pages in options.pages if name == "threads" else ("",):
            more = f",pages={pages}" if pages else ""
            yield f"gdsload:engine={name},request_bytes={size},depth={number}{more}"


def engines(options: argparse.Namespace) -> dict[str, Any]:
    """The result of a cold benchmark of all combinations. Raises Refused."""
    records.require_room(options)
    with records.source_of(options) as source:
        words = [str(source), "--name", records.name_of(options, source), "--device",
                 options.device, "--repeats", str(options.repeats), "--state", options.state,
                 *(["--neighbours"] if options.neighbours else []),
                 *(["--output", str(options.output)] if options.output else []),
                 "--no-checksums", "--arms", *grid(options)]  # fmt: skip
        result = cold.bench_source(source, cold.arguments(words))
    return {**result, "kind": "engines", "left_out": shortened(result)}


def engine_of(settings: dict[str, Any]) -> str:
    return str(settings.get("backend") or f"posix/{settings['engine']}")


def shortened(result: dict[str, Any]) -> dict[str, str]:
    """Arms that were left out; a backend or engine of which none ran has one entry."""
    ran = {engine_of(arm["settings"]) for arm in result["arms"]}
    found: dict[str, str] = {}
    for label, why in result["left_out"].items():
        engine = engine_of(parse(label).settings)
        found[label if engine in ran else engine] = why
    return found


def groups(result: dict[str, Any]) -> dict[str, dict[tuple[int, int], tables.Spread]]:
    """Seconds by (request size, reads in flight), for each engine and kind of memory."""
    found: dict[str, dict[tuple[int, int], tables.Spread]] = {}
    for arm in result["arms"]:
        of = arm["settings"]
        name = engine_of(of)
        if "pages" in of:
            name += f", pages={of['pages']}"
        shape = of["request_bytes"], of.get("depth") or of["threads"]
        found.setdefault(name, {})[shape] = tables.seconds_of(arm)
    return found


def pivot(result: dict[str, Any]) -> str:
    """GB/s: request sizes down, reads in flight across, one table for each engine."""
    nbytes = result["checkpoint"]["bytes"]
    parts = []
    for name, found in groups(result).items():
        numbers = sorted({number for _, number in found})
        rows = [
            [
                f"{size >> 10} KiB",
                *(
                    f"{nbytes / found[size, number].median / 1e9:.2f}"
                    if (size, number) in found
                    else ""
                    for number in numbers
                ),
            ]
            for size in sorted({size for size, _ in found})
        ]
        head = ["request, GB/s", *(f"{number} in flight" for number in numbers)]
        parts.append(f"{name}\n\n{tables.markdown(head, rows)}")
    return "\n\n".join(parts)


def main(words: list[str] | None = None) -> int:
    options = arguments(words)

    def measured() -> tuple[dict[str, Any], str]:
        result = engines(options)
        return result, f"engines-{cold.name_of(result)}"

    return records.publish("bench engines", options, measured)


if __name__ == "__main__":
    sys.exit(main())
