"""The CPU time of the staging pipeline into VRAM, with reads and copies that cost nothing.

    python -m benchmarks.pipeline

An engine that reads nothing (instant.c) behind the real pump, stage and ring, and the tests'
double of CUDA, which only counts copies. The bytes are constant while the number of tensors grows;
memory is side by side, as torch's allocator returns it after a warm-up, or in pieces. No GPU is
involved, and no figure is a GPU figure: only the CPU's share is measured.

A read has 4 MiB of one file at most, of any number of tensors. The CPU time of a load is that of
all threads of the process, including the waiting main thread, from the posting of its reads to the
end of the last one. Reads complete at once, or paced, as from a disk of 2 GB/s that is never idle.
Waking up for a paced read is part of that time; the bare loop does only that, once per read, and
shows the machine's part of it.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from gdsload._native.pump import Pump
from gdsload._native.request import Request
from gdsload.backends import DRAM, VRAM, Memory, OpenFile, Registration
from gdsload.backends.staging import StagingPipeline
from gdsload.memory.staging_ring import release_rings, ring_for
from gdsload.planning.read_plan import ByteRange, Limits, ReadPlan, plan_reads
from gdsload.system import gpu, shared_libraries

from . import records, tables, values
from .places import ROOT
from .records import described

REQUEST_BYTES = 4 << 20
RING_BYTES = 512 << 20
DEPTH = 32
LOAD_BYTES = 4 << 30
KINDS = ("pump alone", "side by side", "in pieces")
PACED, PACED_REPEATS = (100, 10_000), 3  # 2.1 s each
TENSORS = (100, 1000, 10_000, 100_000)
READ_RATE = 2_000_000_000  # bytes per second: CPU shares are of the time at this rate
REQUEST_NS = REQUEST_BYTES * 1_000_000_000 // READ_RATE
# The targets for paced reads.
MOST_SHARE, MOST_REQUEST_US = 0.02, 20.0
FLAT = 1.5  # times the processor time, with a hundred times the tensors
_NAME = b"gdsload.engine"  # a capsule keeps only the pointer to its name


def built(folder: Path, source: Path) -> ctypes.CDLL:
    """A C file as a library."""
    out = folder / f"lib{source.stem}.so"
    command = [os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", "-pthread", str(source)]
    subprocess.run([*command, "-o", str(out)], check=True)
    return ctypes.CDLL(str(out))


def capsule(library: ctypes.CDLL) -> Any:
    """The engine, as a pump takes it."""
    library.instant_engine.restype = ctypes.c_void_p
    make = ctypes.pythonapi.PyCapsule_New
    make.restype = ctypes.py_object
    make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return make(library.instant_engine(), _NAME, None)


def planned(tensors: int) -> ReadPlan:
    """The reads of a file with this number of equal tensors."""
    each = LOAD_BYTES // tensors // 512 * 512
    ranges = [ByteRange(f"t{number}", 0, number * each, each) for number in range(tensors)]
    return plan_reads(ranges, [tensors * each], Limits(REQUEST_BYTES, depth=DEPTH))


def memory_of(plan: ReadPlan, kind: str) -> list[Memory]:
    """Device memory that is never accessed: one share, or one per tensor."""
    (target,) = plan.targets
    if kind == "side by side":
        shares = [(0, target.length, 1 << 40)]
    else:
        each = LOAD_BYTES // len(plan.locations) // 512 * 512
        shares = [
            (location.offset, each, (1 << 40) + 2 * location.offset)
            for location in plan.locations.values()
        ]
    return [Memory(VRAM, 0, target.length, device="cuda:0", shares=shares)]


def copies_of(cuda: ctypes.CDLL) -> int:
    """The copies that the double was asked for."""
    log = (ctypes.c_int64 * 11)()
    cuda.cuda_double_log(log)
    return log[5]


def run(
    instant: ctypes.CDLL,
    cuda: ctypes.CDLL,
    staging: StagingPipeline,
    pump: Pump,
    plan: ReadPlan,
    kind: str,
) -> dict[str, float]:
    """One load: CPU time to make its request, and from posting to the end of the last read.

    The kind "pump alone" reads as if to host memory, without the staging pipeline.
    """
    alone = kind == "pump alone"
    if not alone:
        memory = [Registration(entry, -1) for entry in memory_of(plan, kind)]
        files = [Registration(OpenFile("/dev/null", 0, LOAD_BYTES), (0, 1))]
    copies = copies_of(cuda)
    instant.instant_sleeps()
    began = time.process_time()
    request: Any = (
        Request(
            pump,
            [(0, -1, 4096, -1, -1)],
            plan.transfers,
            [(1 << 40, plan.targets[0].length, None, -1)],
        )
        if alone
        else staging.prepare(plan.transfers, files, memory)
    )
    posted, clock = time.process_time(), time.monotonic()
    if alone:
        request.post()
        while not request.wait(1.0):
            pass
    else:
        request.post()
        while not request.check().finished:
            request.wait(1.0, 0, -1)
    seconds, cpu = time.monotonic() - clock, time.process_time() - posted
    if not alone:
        request.end()
    return {
        "wakes": instant.instant_sleeps(),
        "prepare_seconds": posted - began,
        "cpu_seconds": cpu,
        "seconds": seconds,
        "copies": copies_of(cuda) - copies,
    }


def bare(instant: ctypes.CDLL, requests: int) -> float:
    """CPU seconds to wake up once for each of `requests` paced reads."""
    return float(instant.instant_bare(requests, ctypes.c_int64(REQUEST_NS)) / 1e9)


def measured(repeats: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Every number of tensors, in turn, in both kinds of memory; and the bare loop among them."""
    with tempfile.TemporaryDirectory(prefix="gdsload-pipeline-") as folder:
        cuda = built(Path(folder), ROOT / "tests/doubles/cuda_double.c")
        instant = built(Path(folder), ROOT / "benchmarks/instant.c")
        instant.instant_sleeps.restype = instant.instant_bare.restype = ctypes.c_int64
        path = f"{folder}/libcuda_double.so"
        with mock.patch.object(shared_libraries, "candidates", lambda soname: [path]):
            gpu.device(0)
        cuda.cuda_double_set(1, ctypes.c_size_t(1 << 40), 0)
        cuda.cuda_double_weightless(1)
        with ring_for(DRAM, 0, REQUEST_BYTES, RING_BYTES) as ring:
            staging = StagingPipeline("instant", ring, capsule(instant), DEPTH)
        pump = Pump(capsule(instant), DEPTH)
        found: list[dict[str, Any]] = []
        plans = {tensors: planned(tensors) for tensors in TENSORS}
        loop: dict[str, Any] = {"requests": len(plans[TENSORS[0]].transfers), "cpu_seconds": []}
        for rate, kind in itertools.product((0, READ_RATE), KINDS):
            for tensors, plan in plans.items():
                if rate and tensors not in PACED:
                    continue
                found.append(
                    {
                        "rate": rate,
                        "memory": kind,
                        "tensors": tensors,
                        "requests": len(plan.transfers),
                        "runs": [],
                    }
                )
        for number in range(repeats):
            for entry in found:
                if entry["rate"] and number >= PACED_REPEATS:
                    continue
                instant.instant_rate(ctypes.c_int64(entry["rate"]))
                plan = plans[entry["tensors"]]
                entry["runs"].append(run(instant, cuda, staging, pump, plan, entry["memory"]))
            if number < PACED_REPEATS:
                loop["cpu_seconds"].append(bare(instant, loop["requests"]))
        pump.close(1.0)
        staging.close()
        release_rings()
        loop["cpu_seconds"] = statistics.median(loop["cpu_seconds"])
        return [summary(entry) for entry in found], loop


def summary(entry: dict[str, Any]) -> dict[str, Any]:
    """The stored form of the loads of a kind: their number, and medians."""
    runs = entry["runs"]
    kept = {name: value for name, value in entry.items() if name != "runs"}
    medians = {fact: statistics.median(run[fact] for run in runs) for fact in runs[0]}
    return {**kept, "loads": len(runs), **medians}


def title(result: dict[str, Any]) -> str:
    return f"The staging pipeline by itself, {result['bytes'] / 1e9:.2f} GB"


def table(result: dict[str, Any]) -> str:
    """Processor time for each read, and its share of reading; and the targets."""
    rows = []
    for entry in result["pipeline"]:
        cpu, prepare = entry["cpu_seconds"], entry["prepare_seconds"]
        requests, tensors = entry["requests"], entry["tensors"]
        share = result["bytes"] / entry["rate"] if entry["rate"] else 0.0
        wakes = entry["wakes"] / requests
        rows.append([
            f"{entry['memory']}, {'2 GB/s' if share else 'at once'}",
            f"{tensors:,}", f"{requests:,}", f"{entry['copies']:,.0f}",
            f"{cpu / requests * 1e6:.1f}", f"{wakes:.2f}" if share else "",
            f"{cpu / (result['bytes'] / READ_RATE):.3%}",
            f"{(cpu + prepare) / (result['bytes'] / READ_RATE):.3%}",
            f"{entry['seconds'] / share - 1:+.2%}" if share else "",
        ])  # fmt: skip
    loop = result["bare"]
    cpu, count = loop["cpu_seconds"], loop["requests"]
    rows.append([
        "bare loop, 2 GB/s", "", f"{count:,}", "", f"{cpu / count * 1e6:.1f}", "1.00",
        f"{cpu / (result['bytes'] / READ_RATE):.3%}", "", "",
    ])  # fmt: skip
    head = ["memory, reads", "tensors", "reads", "copies", "CPU us a read",
            "wakes a read", "of the time at 2 GB/s", "with making the request",
            "longer than the reads"]  # fmt: skip
    aimed = tables.markdown(["target", "wanted", "measured", ""], aims(result))
    return tables.markdown(head, rows) + "\n\n" + aimed


def aims(result: dict[str, Any]) -> list[list[str]]:
    """The targets, and whether the worst median of the loads meets them."""
    lines = []
    for kind in KINDS[1:]:
        paced = [e for e in result["pipeline"] if e["rate"] and e["memory"] == kind]
        free = [e for e in result["pipeline"] if not e["rate"] and e["memory"] == kind][-1]
        most = free["cpu_seconds"] / free["requests"] * 1e6
        few, many = (entry["cpu_seconds"] / entry["requests"] * 1e6 for entry in paced)
        worst = max(e["cpu_seconds"] * e["rate"] / result["bytes"] for e in paced)
        lines += [
            [f"{kind}: of the time of the reads", f"under {MOST_SHARE:.0%}", f"{worst:.2%}",
             met(worst < MOST_SHARE)],
            [f"{kind}: CPU us a read", f"under {MOST_REQUEST_US:.0f}",
             f"{max(few, many):.1f}", met(max(few, many) < MOST_REQUEST_US)],
            [f"{kind}: {paced[-1]['tensors']:,} tensors beside {paced[0]['tensors']:,}",
             f"under {FLAT:.1f} times", f"{many / few:.2f}", met(many / few < FLAT)],
            [f"{kind}: CPU us a read, {free['tensors']:,} tensors, at once",
             f"under {MOST_REQUEST_US:.0f}", f"{most:.1f}", met(most < MOST_REQUEST_US)],
        ]  # fmt: skip
    return lines


def met(well: bool) -> str:
    return "met" if well else "missed"


def notes(result: dict[str, Any]) -> str:
    paced = next(entry for entry in result["pipeline"] if entry["rate"])
    free = next(entry for entry in result["pipeline"] if not entry["rate"])
    return "\n".join(
        [
            f"- {described(result)}",
            f"- a read has {result['request_bytes'] >> 20} MiB at most; CPU is that of all threads"
            " of the process, from the posting to the end of the last read",
            f"- medians of {paced['loads']} paced loads and of {free['loads']} at once; no byte"
            " is read or copied, and nothing here is measured on a GPU",
            "- paced reads wake the pump, which is in the figures; the bare loop is woken once for"
            " each read and does nothing else",
        ]
    )


def main(words: list[str] | None = None) -> int:
    parser = records.parser_of("python -m benchmarks.pipeline", __doc__)
    parser.add_argument("--repeats", type=values.whole, default=7)
    records.add_output(parser)
    options = parser.parse_args(words)

    def result() -> tuple[dict[str, Any], str]:
        pipeline, loop = measured(options.repeats)
        return records.record(
            "pipeline",
            ROOT,
            bytes=LOAD_BYTES,
            request_bytes=REQUEST_BYTES,
            pipeline=pipeline,
            bare=loop,
        ), "pipeline"

    return records.publish("pipeline", options, result)


if __name__ == "__main__":
    sys.exit(main())
