"""The storage sweep, in the shape of NIXL's benchmark: blocks, batches, threads, engines; reads.

    gdsload bench io FILE
    gdsload bench io FILE --block 4K 1M 64M --batch 1 16 --threads 1 2 --engine uring linuxaio
    gdsload bench io --model qwen3-0.6b --dir /data

A block is one read, a batch is the number of reads in one request. Prepare, post and transfer are
timed
for each request; every byte is held against the file afterwards, outside the clock, and a rate
that the device did not read, or could not, is an error and not a record.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from gdsload.backends import find
from gdsload.backends.posix.engines import ENGINES
from gdsload.backends.registry import names
from gdsload.errors import BackendUnavailable

from . import records, tables, values
from .cells import Cell, run_cell
from .layout import several, size
from .loaded import CPU, files_of
from .published import BLOCKS, NIXL_BENCH
from .records import Refused
from .truth import PAGE_BYTES, TOLERANCE, Device, Truth

MOST_MEMORY = 1 << 30
HEAD = (
    "block size B", "batch size", "GB/s", "avg lat us", "avg prep us", "p99 prep us",
    "avg post us", "p99 post us", "avg tx us", "p99 tx us",
)  # fmt: skip


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = records.parser_of("gdsload bench io", __doc__)
    records.add_source(parser)
    parser.add_argument(
        "--block",
        nargs="+",
        type=values.size,
        default=BLOCKS,
        metavar="BYTES",
        help="size of a read (default 4K to 64M)",
    )
    parser.add_argument(
        "--batch",
        nargs="+",
        type=values.whole,
        default=[1, 16],
        metavar="N",
        help="reads in a request (default 1 16)",
    )
    parser.add_argument(
        "--threads",
        nargs="+",
        type=values.whole,
        default=[1],
        metavar="N",
        help="threads with requests of their own (default 1)",
    )
    parser.add_argument(
        "--backend", nargs="+", default=["posix"], help="posix, gds, gds_mt (default posix)"
    )
    parser.add_argument(
        "--engine",
        nargs="+",
        default=list(ENGINES),
        choices=ENGINES,
        metavar="ENGINE",
        help=f"engines of posix (default {' '.join(ENGINES)})",
    )
    parser.add_argument(
        "--device", type=values.device, default=CPU, help="target device: cpu, cuda:0"
    )
    parser.add_argument("--random", action="store_true", help="read blocks in random order")
    parser.add_argument(
        "--seconds",
        type=values.amount(0, "seconds"),
        default=0.3,
        metavar="S",
        help="seconds of each measurement (default 0.3)",
    )
    options = parser.parse_args(words)
    for backend in set(options.backend) - set(names()):
        parser.error(f"--backend {backend}: unknown (available: {', '.join(names())})")
    uneven = [block for block in options.block if block % PAGE_BYTES]
    if uneven:
        parser.error(f"--block {uneven[0]}: direct reads are of whole {PAGE_BYTES} bytes")
    return options


def backends(options: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    """Each backend with the options to open it with."""
    return [
        (backend, {"engine": engine} if engine else {})
        for backend in options.backend
        for engine in (options.engine if backend == "posix" else [""])
    ]


def fits(cell: Cell, size: int) -> str:
    """Why a line cannot be measured on this file; empty where it can."""
    taken = cell.block * cell.batch * cell.threads
    if taken > MOST_MEMORY:
        return f"{taken >> 20} MiB of memory"
    if cell.block * cell.batch > size // cell.threads:
        return "the file is too small"
    try:
        cell.open().close()
    except ValueError as error:  # more in flight than the backend allows
        return str(error)
    return ""


def sweep(source: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All lines that can be measured. Raises Refused."""
    records.require_room(options)
    path = max(files_of(source), key=lambda file: file.stat().st_size)
    truth, device = Truth(path), Device(path)
    truth.evict()
    for _ in range(3):
        device.measure()
    lines: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for backend, settings in backends(options):
        name = "/".join([backend, *settings.values()])
        support = find(backend).probe_with(options.device, settings)
        if not support.usable:
            left_out[name] = str(support)
            continue
        for threads in options.threads:
            for batch in options.batch:
                for block in options.block:
                    cell = Cell(
                        backend,
                        settings,
                        options.device,
                        block,
                        batch,
                        threads,
                        options.random,
                        options.seconds,
                    )
                    why = fits(cell, truth.size)
                    if why:
                        left_out[
                            f"blocks of {block:,}, {batch} at once, {several(threads, 'thread')}"
                        ] = why
                        continue
                    try:
                        facts = run_cell(cell, truth, device)
                    except BackendUnavailable as error:
                        left_out[name] = str(error)
                        break
                    lines.append(
                        {
                            "backend": name,
                            "block": block,
                            "batch": batch,
                            "threads": threads,
                            **facts,
                        }
                    )
                    print(
                        f"  {name} {block} x {batch} x {threads}: "
                        f"{facts['bytes_per_second'] / 1e9:.2f} GB/s",
                        file=sys.stderr,
                        flush=True,
                    )
    device.measure()
    return records.record(
        "io",
        path,
        file={"name": records.name_of(options, source), "bytes": path.stat().st_size},
        conditions={
            "random": options.random,
            "seconds": options.seconds,
            "device": options.device,
            "tolerance": TOLERANCE,
            "counted": device.key is not None,
        },
        limits=device.limits,
        lines=lines,
        left_out=left_out,
    )


def title(result: dict[str, Any]) -> str:
    how = "random" if result["conditions"]["random"] else "sequential"
    return (
        f"{result['file']['name']}, {size(result['file']['bytes'])}; {how} direct reads"
        f" to {result['conditions']['device']}"
    )


def grouped(result: dict[str, Any]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """The lines of each backend and number of threads, in the order of measurement."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for line in result["lines"]:
        groups.setdefault((line["backend"], line["threads"]), []).append(line)
    return groups


def row(line: dict[str, Any]) -> list[str]:
    us = [
        line[step][kind] * 1e6
        for step in ("prepare", "post", "transfer")
        for kind in ("mean", "p99")
    ]
    return [
        str(line["block"]),
        str(line["batch"]),
        f"{line['bytes_per_second'] / 1e9:.6f}",
        f"{line['latency'] * 1e6:.1f}",
        *(f"{value:.1f}" for value in us),
    ]


def table(result: dict[str, Any]) -> str:
    """A table for each backend and number of threads, with NIXL's columns."""
    parts = []
    for (backend, threads), lines in grouped(result).items():
        of = f", {threads} threads" if threads > 1 else ""
        parts.append(f"{backend}{of}\n\n{tables.markdown(HEAD, [row(line) for line in lines])}")
    return "\n\n".join([*parts, published()])


def published() -> str:
    """What nixlbench was published with, for its shape: another machine, another disk."""
    rows = [
        [str(block), *(f"{rates[place]:.6f}" for rates in NIXL_BENCH.values())]
        for place, block in enumerate(BLOCKS)
    ]
    head = ["block size B", *(f"{engine} GB/s" for engine in NIXL_BENCH)]
    return (
        "Published by nixlbench, batch size 1, on another machine. Its results were not compared"
        " with the file; LINUXAIO rates above the others exceed one disk."
        f"\n\n{tables.markdown(head, rows)}"
    )


def notes(result: dict[str, Any]) -> str:
    state = result["conditions"]
    rates = [rate / 1e9 for rate in result["limits"]]
    counted = (
        "the device's counter had to grow by what was claimed"
        if state["counted"]
        else "nobody counts this device's reads apart: the kernel's account of this process"
        " (/proc/self/io) had to grow by what was claimed"
    )
    lines = [
        records.described(result),
        f"each line {state['seconds']:g} s of reading into memory touched before; latency is from"
        " the first post of a request to its last byte",
        f"every byte compared with the file, outside the clock; {counted}; no rate above"
        f" {state['tolerance']:g} times the device's: its bytes over its busy time, or a plain"
        f" O_DIRECT reader's best ({', '.join(f'{rate:.2f}' for rate in rates)} GB/s)",
        *(f"left out: {what}: {why}" for what, why in result["left_out"].items()),
    ]
    return "\n".join(f"- {line}" for line in lines)


def main(words: list[str] | None = None) -> int:
    options = arguments(words)

    def measured() -> tuple[dict[str, Any], str]:
        with records.source_of(options) as source:
            result = sweep(source, options)
        if not result["lines"]:
            why = "\n".join(f"  {what}: {why}" for what, why in result["left_out"].items())
            raise Refused(f"nothing could be measured\n{why}")
        return result, f"io-{result['file']['name']}"

    return records.publish("bench io", options, measured)


if __name__ == "__main__":
    sys.exit(main())
