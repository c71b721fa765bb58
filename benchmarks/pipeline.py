"""What the road into VRAM costs by itself, where reads and copies cost nothing.

    python -m benchmarks.pipeline

An engine that reads nothing (instant.c) behind the real pump, stage and ring, and the tests' double
of CUDA with copies that are only counted. The bytes stay the same while the number of tensors
grows: memory side by side, as torch's allocator gives it after a warm-up, and memory in pieces.
No GPU is involved and no figure is one of a GPU: it is the processor's share that is measured.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from gdsload import gpu, libraries
from gdsload._native.pump import Pump
from gdsload._native.request import Request
from gdsload.backends import VRAM, Memory, OpenFile, Registration
from gdsload.backends.staged import StagedRoad
from gdsload.plan import Limits, Piece, ReadPlan, plan_reads
from gdsload.ring import DRAM, release_rings, ring_for

from . import machine, tables
from .places import RESULTS, ROOT

REQUEST_BYTES = 4 << 20
RING_BYTES = 512 << 20
DEPTH = 32
LOAD_BYTES = 8 << 30
KINDS = ("pump alone", "side by side", "in pieces")
PACED, PACED_REPEATS = (100, 10_000), 3  # 4.3 s each
TENSORS = (100, 1000, 10_000, 100_000)
READ_RATE = 2_000_000_000  # bytes a second: what the shares are shares of
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
    """The reads of a file of so many tensors of one size."""
    each = LOAD_BYTES // tensors // 512 * 512
    pieces = [Piece(f"t{number}", 0, number * each, each) for number in range(tensors)]
    return plan_reads(pieces, [tensors * each], Limits(REQUEST_BYTES, depth=DEPTH))


def memory_of(plan: ReadPlan, kind: str) -> list[Memory]:
    """Memory of a device that is never touched: as one share, or as one for each tensor."""
    (target,) = plan.targets
    if kind == "side by side":
        shares = [(0, target.length, 1 << 40)]
    else:
        each = LOAD_BYTES // len(plan.homes) // 512 * 512
        shares = [(home.offset, each, (1 << 40) + 2 * home.offset) for home in plan.homes.values()]
    return [Memory(VRAM, 0, target.length, device="cuda:0", shares=shares)]


def run(road: StagedRoad, plan: ReadPlan, kind: str) -> dict[str, float]:
    """One load: what making the request took, and from its posting to its end."""
    memory = memory_of(plan, kind)
    files = [Registration(OpenFile("/dev/null", 0, LOAD_BYTES), (0, 1))]
    registered = [Registration(entry, -1) for entry in memory]
    copies = road.stage.copies
    began = time.process_time()
    request = road.prepare(plan.transfers, files, registered)
    posted, clock = time.process_time(), time.monotonic()
    request.start()
    while not request.progress().finished:
        request.wait(1.0, 0, -1)
    seconds, cpu = time.monotonic() - clock, time.process_time() - posted
    request.end()
    return {
        "prepare_seconds": posted - began,
        "cpu_seconds": cpu,
        "seconds": seconds,
        "copies": road.stage.copies - copies,
    }


def run_alone(pump: Pump, plan: ReadPlan) -> dict[str, float]:
    """The same reads by the pump alone, as to host memory: what waiting for a disk costs."""
    ops: list[Any] = [(0, t.offset, t.length, t.wanted, (1 << 40) + t.target_offset, None, -1)
                      for t in plan.transfers]  # fmt: skip
    began = time.process_time()
    request = Request(pump, [(0, -1, 4096, -1, -1)], ops)
    posted, clock = time.process_time(), time.monotonic()
    request.post()
    while not request.wait(1.0):
        pass
    seconds, cpu = time.monotonic() - clock, time.process_time() - posted
    return {"prepare_seconds": posted - began, "cpu_seconds": cpu, "seconds": seconds, "copies": 0}


def measured(repeats: int) -> list[dict[str, Any]]:
    """Every number of tensors, in turn, in both kinds of memory."""
    with tempfile.TemporaryDirectory(prefix="gdsload-pipeline-") as folder:
        cuda = built(Path(folder), ROOT / "tests/doubles/cuda_double.c")
        instant = built(Path(folder), ROOT / "benchmarks/instant.c")
        path = f"{folder}/libcuda_double.so"
        with mock.patch.object(libraries, "candidates", lambda soname: [path]):
            gpu.device(0)
        cuda.cuda_double_set(1, ctypes.c_size_t(1 << 40), 0, 0)
        cuda.cuda_double_weightless(1)
        with ring_for(DRAM, 0, REQUEST_BYTES, RING_BYTES) as ring:
            road = StagedRoad("instant", ring, capsule(instant), DEPTH)
        pump = Pump(capsule(instant), DEPTH)
        found: list[dict[str, Any]] = []
        plans = {tensors: planned(tensors) for tensors in TENSORS}
        for rate, kind in itertools.product((0, READ_RATE), KINDS):
            for tensors, plan in plans.items():
                if rate and tensors not in PACED:
                    continue
                found.append({"rate": rate, "memory": kind, "tensors": tensors,
                              "requests": len(plan.transfers), "runs": []})  # fmt: skip
        for number in range(repeats):
            for entry in found:
                if entry["rate"] and number >= PACED_REPEATS:
                    continue
                instant.instant_rate(ctypes.c_int64(entry["rate"]))
                plan = plans[entry["tensors"]]
                entry["runs"].append(
                    run_alone(pump, plan)
                    if entry["memory"] == "pump alone"
                    else run(road, plan, entry["memory"])
                )
        pump.close(1.0)
        road.close()
        release_rings()
        return found


def middle(entry: dict[str, Any], fact: str) -> float:
    return statistics.median(one[fact] for one in entry["runs"])


def table(result: dict[str, Any]) -> str:
    """Processor time for each request and each tensor, and its share of reading."""
    rows = []
    for entry in result["pipeline"]:
        cpu, prepare = middle(entry, "cpu_seconds"), middle(entry, "prepare_seconds")
        requests, tensors = entry["requests"], entry["tensors"]
        share = LOAD_BYTES / entry["rate"] if entry["rate"] else 0.0
        rows.append([
            f"{entry['memory']}, {'2 GB/s' if share else 'at once'}",
            f"{tensors:,}", f"{requests:,}", f"{middle(entry, 'copies'):,.0f}",
            f"{cpu / requests * 1e6:.1f}", f"{cpu / (LOAD_BYTES / READ_RATE):.3%}",
            f"{(cpu + prepare) / (LOAD_BYTES / READ_RATE):.3%}",
            f"{middle(entry, 'seconds') / share - 1:+.2%}" if share else "",
        ])  # fmt: skip
    return tables.markdown(
        ["memory, reads", "tensors", "requests", "copies", "CPU us a request",
         "of the time at 2 GB/s", "with making the request", "longer than the reads"], rows,
    )  # fmt: skip


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, default=RESULTS / "pipeline.json")
    options = parser.parse_args(words)
    result = {
        "format": 1,
        "kind": "pipeline",
        "machine": machine.describe(ROOT),
        "commit": machine.commit(ROOT),
        "bytes": LOAD_BYTES,
        "request_bytes": REQUEST_BYTES,
        "pipeline": measured(options.repeats),
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
