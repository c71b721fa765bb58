"""The import of a loader, the first `load_file` of a process in which torch is imported, and the
loads after it.

    python -m benchmarks.first_call DIRECTORY [--repeats 7] [--output RESULT.json]

The file is in the page cache, so that a load is little more than imports and mappings. Every repeat
of an arm is a fresh process; the arms take turns. gdsload is imported after torch in one arm, and
before it in another, whose first load imports what it needs. One extra process of each arm runs
before them: what it imports is compiled to bytecode then, if it was not.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import places, records, tables
from .layout import several
from .records import Refused

BEFORE_TORCH = "gdsload, before torch"
ARMS = ("gdsload", BEFORE_TORCH, "safetensors")
# Wanted: the first load costs at most this much more than the second one.
MOST_MORE_MS = 25.0
LOADS = 3
IMPORT = "import"

CHILD = """
import json, sys, time
arm, path = sys.argv[1:]
def import_loader():
    global package, seconds
    begin = time.perf_counter()
    if arm == "safetensors":
        import safetensors.torch as package
    else:
        import gdsload as package
    seconds = time.perf_counter() - begin
if arm == BEFORE_TORCH:
    import_loader()
import torch
torch.empty(1)
if arm != BEFORE_TORCH:
    import_loader()
with open(path, "rb", buffering=0) as file:
    buffer = bytearray(8 << 20)
    while file.readinto(buffer):
        pass
before = len(sys.modules)
times = []
for number in range(LOADS):
    begin = time.perf_counter()
    tensors = package.load_file(path)
    times.append(time.perf_counter() - begin)
    del tensors
    if not number:
        modules = len(sys.modules) - before
print(json.dumps({"import": seconds, "seconds": times, "modules": modules}))
"""
CHILD = CHILD.replace("LOADS", str(LOADS)).replace("BEFORE_TORCH", repr(BEFORE_TORCH))


def child(arm: str, file: Path) -> dict[str, Any]:
    """The times of one fresh process. Raises Refused if it fails."""
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, arm, str(file)],
        capture_output=True,
        text=True,
        check=False,
        env=places.own_environment(),
    )
    if ran.returncode:
        raise Refused(f"{arm}: {ran.stderr.strip().splitlines()[-1:]}")
    facts: dict[str, Any] = json.loads(ran.stdout)
    return facts


def measured(file: Path, repeats: int) -> list[dict[str, Any]]:
    """The import and the loads of each arm, in the order of the calls: the seconds of every
    process."""
    for arm in ARMS:
        child(arm, file)
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for turn in range(repeats):
        for arm in records.in_turn(ARMS, turn):
            runs[arm].append(child(arm, file))
    rows = []
    for arm, found in runs.items():
        imports = [run["import"] for run in found]
        rows.append({"arm": arm, "load": IMPORT, "seconds": imports})
        for number in range(LOADS):
            took = [run["seconds"][number] for run in found]
            modules = found[0]["modules"] if not number else 0
            rows.append({"arm": arm, "load": number + 1, "seconds": took, "modules": modules})
    return rows


def first_costs_ms(rows: Sequence[dict[str, Any]], arm: str) -> float:
    """Milliseconds that the first load of an arm takes longer than the second: medians."""
    found = {row["load"]: statistics.median(row["seconds"]) for row in rows if row["arm"] == arm}
    return (found[1] - found[2]) * 1e3


def title(result: dict[str, Any]) -> str:
    return f"The first load of a process, {result['bytes'] / 1e9:.1f} GB in the page cache"


def table(result: dict[str, Any]) -> str:
    rows = []
    for row in result["loads"]:
        took = tables.seconds_of(row)
        rows.append([
            row["arm"], str(row["load"]), f"{took.median * 1e3:.1f}",
            f"{took.low * 1e3:.1f} to {took.high * 1e3:.1f}", str(row.get("modules", "")),
        ])  # fmt: skip
    return tables.markdown(["loader", "load", "median ms", "min to max", "modules imported"], rows)


def notes(result: dict[str, Any]) -> str:
    more = [first_costs_ms(result["loads"], arm) for arm in ("gdsload", BEFORE_TORCH)]
    said = "met" if max(more) <= MOST_MORE_MS else "missed"
    repeats = several(len(result["loads"][0]["seconds"]), "repeat")
    return "\n".join(
        [
            f"- {records.described(result)}",
            f"- {repeats} of each loader in fresh processes; torch is imported before the clock"
            " starts",
            "- import: of the loader, after torch, or before it where the row says so",
            f"- gdsload: the first load takes {more[0]:.1f} ms longer than the second, and"
            f" {more[1]:.1f} ms if gdsload was imported before torch; at most"
            f" {MOST_MORE_MS:.0f} ms are wanted: {said}",
        ]
    )


def main(words: list[str] | None = None) -> int:
    return records.loads_program("first-call", __doc__, measured, words, repeats=7)


if __name__ == "__main__":
    sys.exit(main())
