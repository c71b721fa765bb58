"""What gdsload does on this machine's GPU: every road, exact bytes, memory given back, rates.

    python scripts/gpu_check.py [--device cuda:0] [--json FILE] [CHECKPOINT ...]

Without a checkpoint, synthetic ones are written below the system's temporary directory. Each road
loads each checkpoint three times: once for what a driver takes for itself, and keeps, when it is
first asked for streams and pins; then twice, and the second of these must register nothing. Then a
prefetch brings each to the device, where a load must adopt it. Ends with a table, a JSON file and
exit status 1 where bytes were wrong or read twice, memory was left or no road led to the device.
The JSON file is written after each row, so that a crash costs no more than what comes after it.
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

# What a figure needs to be of use: smaller loads are all overhead.
CHECKPOINTS = ("tiny", "tiny-moe")
# A row that takes longer hangs: where goes to stderr, and nothing after it is looked at.
ROW_SECONDS = 300
COLUMNS = ("road", "checkpoint", "verdict", "GB", "s", "GB/s", "again s", "by road")


def roads(device: str, *, compat: bool) -> Iterable[tuple[str, str, dict[str, Any]]]:
    """(what it is called, backend, options) of every road there is."""
    for engine in ENGINES:
        yield f"posix/{engine}", "posix", {"engine": engine}
    for name in ("gds_mt", "gds"):
        yield name, name, {}
        if compat:
            yield f"{name} (compat)", name, {"allow_compat": True}
    yield "auto", "auto", {}  # last: what it chooses is to be seen beside what it chose from


def expected(source: Path) -> dict[str, torch.Tensor]:
    return gdsload.load_file(source, "cpu", backend="posix", cache="buffered")


def differs(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> str:
    """The first tensor that is not as it should be; empty where all are."""
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
    """Bytes of the device that are in use, torch's reserve not counted."""
    ordinal = gpu.ordinal_of(device)
    if torch.cuda.is_available():
        torch.cuda.synchronize(ordinal)
        torch.cuda.empty_cache()
    free, total = gpu.device(ordinal).memory()
    return total - free


def check(
    label: str, backend: str, options: dict[str, Any], source: Path, device: str
) -> dict[str, Any]:
    """One road and one checkpoint: what came of its loads."""
    row: dict[str, Any] = {"road": label, "checkpoint": source.name, "verdict": "exact"}
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
    return given_back(row, before, device)


def check_ahead(source: Path, device: str) -> dict[str, Any]:
    """What a prefetch brings to the device: adopted by a load, to the bit, and given back."""
    row: dict[str, Any] = {"road": "prefetch", "checkpoint": source.name, "verdict": "exact"}
    wanted = expected(source)

    def adopted() -> dict[str, torch.Tensor]:
        with gdsload.prefetch(source, device) as ahead:
            ahead.wait()
            row["first"] = ahead.report.to_dict()
            return gdsload.load_file(source, device)

    staging_ring.release_rings()
    try:
        adopted()
        staging_ring.release_rings()
        before = held(device)
        got = adopted()
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
    return given_back(row, before, device)


def tried(
    label: str, source: Path, look: Callable[[], dict[str, Any]], seconds: float
) -> dict[str, Any]:
    """A row, whatever happens: what nobody has foreseen is told of like all else."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
    try:
        return look()
    except Exception as error:
        return {
            "road": label, "checkpoint": source.name, "traceback": traceback.format_exc(),
            "verdict": f"FAILED: {type(error).__name__}: {error}",
        }  # fmt: skip
    finally:
        faulthandler.cancel_dump_traceback_later()


def given_back(row: dict[str, Any], before: int, device: str) -> dict[str, Any]:
    """The row, with what is left of the device's memory when the rings are gone."""
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
        read = [each for each in (first, again) if each["read_bytes"]]  # and not adopted
        best = min(each["seconds"] for each in read or [first])
        by_road = ", ".join(f"{road} {part:,}" for road, part in again["paths"].items() if part)
        figures = [f"{size / 1e9:.3f}", f"{first['seconds']:.3f}", f"{size / best / 1e9:.2f}",
                   f"{again['seconds']:.3f}", by_road]  # fmt: skip
    return [row["road"], row["checkpoint"], row["verdict"], *figures]


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [list(COLUMNS), *(cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def machine(device: str) -> dict[str, Any]:
    """What the figures are of."""
    facts: dict[str, Any] = {
        "gdsload": gdsload.__version__,
        "torch": torch.__version__,
        "kernel": platform.release(),
        "gpu": gpu.facts(gpu.ordinal_of(device))._asdict(),
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

    def add(label: str, source: Path, look: Callable[[], dict[str, Any]]) -> None:
        rows.append(tried(label, source, look, wanted.row_seconds))
        print(f"{label}, {source.name}: {rows[-1]['verdict']}", file=sys.stderr, flush=True)
        wanted.json.write_text(json.dumps(facts, indent=2) + "\n")

    with tempfile.TemporaryDirectory(prefix="gdsload-gpu-check-") as folder:
        sources = wanted.checkpoints or [
            checkpoints.write(name, Path(folder, name)) for name in CHECKPOINTS
        ]
        for label, backend, options in roads(wanted.device, compat=wanted.compat):
            for source in sources:
                add(label, source, partial(check, label, backend, options, source, wanted.device))
        for source in sources:
            add("prefetch", source, partial(check_ahead, source, wanted.device))
    print(table(rows))
    print(f"\n{wanted.json}: everything, for a machine to read")
    bad = [row for row in rows if row["verdict"].startswith(("WRONG", "LEFT", "FAILED"))]
    good = [row for row in rows if row["verdict"] == "exact"]
    return 1 if bad or not good else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
