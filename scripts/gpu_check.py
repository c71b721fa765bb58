"""Checks gdsload on a GPU of this machine: every backend, exact bytes, memory freed, rates.

    python scripts/gpu_check.py [--device cuda:0] [--json FILE] [CHECKPOINT ...]

Without a checkpoint, synthetic ones are written below the system's temporary directory. Each
backend loads each checkpoint three times: once for the memory that a driver allocates, and keeps,
for its first streams and pins; then twice, and the second of these must register nothing. Then a
prefetch reads each to the device, and a load must take it over. Prints a table, and writes a JSON
file after each row, so that a crash loses only the rows after it. The exit status is 1 if bytes
were wrong or read twice, memory was not freed, or no backend reached the device.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import platform
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import gdsload
from gdsload.backends import registry
from gdsload.backends.cufile import library
from gdsload.backends.posix.engines import ENGINES
from gdsload.errors import GdsloadError
from gdsload.memory import staging_ring
from gdsload.synthetic import checkpoints
from gdsload.system import gpu

CHECKPOINTS = ("tiny", "tiny-moe")
# A row that takes longer hangs: stacks go to stderr, and the check ends.
ROW_SECONDS = 300
COLUMNS = ("backend", "checkpoint", "verdict", "GB", "s", "GB/s", "again s", "I/O paths")


def backends(*, compat: bool) -> Iterable[tuple[str, str, dict[str, Any]]]:
    """(label, backend, options) of every combination to check."""
    for engine in ENGINES:
        yield f"posix/{engine}", "posix", {"engine": engine}
    for name in ("gds_mt", "gds"):
        yield name, name, {}
        if compat:
            yield f"{name} (compat)", name, {"allow_compat": True}
    yield "auto", "auto", {}  # last, to compare its choice with the others


def expected(source: Path) -> dict[str, torch.Tensor]:
    return gdsload.load_file(source, "cpu", backend="posix", cache="buffered")


def differs(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> str:
    """The first tensor that differs, and how; "" if none does."""
    if got.keys() != wanted.keys():
        return f"other names: {sorted(got.keys() ^ wanted.keys())[:3]}"
    for name, tensor in wanted.items():
        there = got[name].to("cpu")
        if there.dtype != tensor.dtype or there.shape != tensor.shape:
            return f"{name}: {there.dtype} {tuple(there.shape)}"
        raw = [each.reshape(-1).view(torch.uint8) for each in (there, tensor)]
        if not torch.equal(*raw):
            return f"{name}: other bytes"
    return ""


def held(device: str) -> int:
    """Bytes of the device in use, without the reserve of torch's allocator."""
    ordinal = gpu.ordinal_of(device)
    if torch.cuda.is_available():
        torch.cuda.synchronize(ordinal)
        torch.cuda.empty_cache()
    free, total = gpu.device(ordinal).memory()
    return total - free


def check(
    label: str, backend: str, options: dict[str, Any], source: Path, device: str
) -> dict[str, Any]:
    """The row of one backend and one checkpoint."""
    row: dict[str, Any] = {"backend": label, "checkpoint": source.name, "verdict": "exact"}
    wanted = expected(source)

    def load(pass_: str) -> None:
        got = gdsload.load_file(source, device, backend=backend, options=options)
        row[pass_] = gdsload.last_report().to_dict()
        if wrong := differs(got, wanted):
            row["verdict"] = f"WRONG: {wrong}"

    staging_ring.release_rings()
    try:
        load("settling")
        staging_ring.release_rings()
        before = held(device)
        load("first")
        load("again")
    except GdsloadError as error:
        refused = isinstance(error, gdsload.BackendUnavailable)
        row["verdict"] = f"{'refused' if refused else 'FAILED'}: {error}"
        return row
    return with_leaks(row, before, device)


def check_prefetch(source: Path, device: str) -> dict[str, Any]:
    """The row of a prefetch to the device: taken over by a load, exact, and freed."""
    row: dict[str, Any] = {"backend": "prefetch", "checkpoint": source.name, "verdict": "exact"}
    wanted = expected(source)

    def taken_over() -> dict[str, torch.Tensor]:
        with gdsload.prefetch(source, device) as prefetch:
            prefetch.wait()
            row["first"] = prefetch.report.to_dict()
            return gdsload.load_file(source, device)

    staging_ring.release_rings()
    try:
        taken_over()
        staging_ring.release_rings()
        before = held(device)
        got = taken_over()
        report = gdsload.last_report()
        row["again"] = report.to_dict()
    except GdsloadError as error:
        row["verdict"] = f"FAILED: {error}"
        return row
    if refusal := row["first"]["refusals"].get(device):
        row["verdict"] = f"FAILED: it went to host memory: {refusal}"
    elif report.read_bytes or set(report.paths) != {"prefetched"}:
        row["verdict"] = f"FAILED: the load read {report.read_bytes:,} bytes again"
    elif any(tensor.data_ptr() % 256 for tensor in got.values()):
        row["verdict"] = "WRONG: a tensor is not aligned"
    elif wrong := differs(got, wanted):
        row["verdict"] = f"WRONG: {wrong}"
    del got
    return with_leaks(row, before, device)


def tried(
    label: str, source: Path, make_row: Callable[[], dict[str, Any]], seconds: float
) -> dict[str, Any]:
    """A row in any case: an unexpected error becomes a row too."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
    try:
        return make_row()
    except Exception as error:
        return {
            "backend": label, "checkpoint": source.name, "traceback": traceback.format_exc(),
            "verdict": f"FAILED: {type(error).__name__}: {error}",
        }  # fmt: skip
    finally:
        faulthandler.cancel_dump_traceback_later()


def with_leaks(row: dict[str, Any], before: int, device: str) -> dict[str, Any]:
    """The row, with the bytes that are still in use after the rings were released."""
    staging_ring.release_rings()
    row["left_bytes"] = held(device) - before
    if row["left_bytes"] > 0 and row["verdict"] == "exact":
        row["verdict"] = f"LEFT: {row['left_bytes']:,} bytes of the device"
    return row


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    first, again = row.get("first"), row.get("again")
    figures = ["", "", "", "", ""]
    if first and again:
        size = first["wanted_bytes"]
        read = [each for each in (first, again) if each["read_bytes"]]  # not from a prefetch
        best = min(each["seconds"] for each in read or [first])
        paths = ", ".join(f"{path} {part:,}" for path, part in again["paths"].items() if part)
        figures = [f"{size / 1e9:.3f}", f"{first['seconds']:.3f}", f"{size / best / 1e9:.2f}",
                   f"{again['seconds']:.3f}", paths]  # fmt: skip
    return [row["backend"], row["checkpoint"], row["verdict"], *figures]


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [list(COLUMNS), *(cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def machine(device: str) -> dict[str, Any]:
    """The machine, versions and supported backends."""
    found = gpu.device(gpu.ordinal_of(device))
    facts: dict[str, Any] = {
        "gdsload": gdsload.__version__,
        "torch": torch.__version__,
        "kernel": platform.release(),
        "gpu": {
            "ordinal": found.ordinal,
            "name": found.name,
            "bus": found.bus,
            "node": gpu.numa_node(found.bus),
            "total_bytes": found.total_bytes,
        },
        "cuda": gpu.cuda().version,
        "support": {name: str(each) for name, each in registry.probe_all(device).items()},
    }
    try:
        facts["libcufile"] = {"path": library.library().path, "version": library.library().version}
    except GdsloadError as error:
        facts["libcufile"] = str(error)
    facts["native_path"] = " ".join(library.native_path()).strip()
    return facts


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkpoints", nargs="*", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--json", type=Path, default=Path("gpu-check.json"))
    parser.add_argument("--compat", action="store_true", help="cuFile's compatibility mode too")
    parser.add_argument(
        "--row-seconds", type=float, default=ROW_SECONDS, help="a row that takes longer hangs"
    )
    wanted = parser.parse_args(arguments)
    faulthandler.enable(sys.__stderr__)
    if why := gpu.why_not(wanted.device):
        print(f"gpu-check: nothing to check: {why}", file=sys.stderr)
        return 1
    facts: dict[str, Any] = {"machine": machine(wanted.device), "rows": []}
    rows: list[dict[str, Any]] = facts["rows"]

    def add(label: str, source: Path, make_row: Callable[[], dict[str, Any]]) -> None:
        rows.append(tried(label, source, make_row, wanted.row_seconds))
        print(f"{label}, {source.name}: {rows[-1]['verdict']}", file=sys.stderr, flush=True)
        wanted.json.write_text(json.dumps(facts, indent=2) + "\n")

    with tempfile.TemporaryDirectory(prefix="gdsload-gpu-check-") as folder:
        sources = wanted.checkpoints or [
            checkpoints.write(name, Path(folder, name)) for name in CHECKPOINTS
        ]
        for label, backend, options in backends(compat=wanted.compat):
            for source in sources:
                add(label, source, partial(check, label, backend, options, source, wanted.device))
        for source in sources:
            add("prefetch", source, partial(check_prefetch, source, wanted.device))
    print(table(rows))
    print(f"\n{wanted.json}: all details, as JSON")
    bad = [row for row in rows if row["verdict"].startswith(("WRONG", "LEFT", "FAILED"))]
    good = [row for row in rows if row["verdict"] == "exact"]
    return 1 if bad or not good else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
