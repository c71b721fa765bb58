"""The stored form of the runs of an arm: seconds of each round, medians of everything else."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

# Stored medians, if they were measured.
FACTS = (
    "load_s", "touch_s", "cpu_s", "machine_cpu_s", "peak_rss_bytes", "anon_bytes", "file_bytes",
    "peak_vram_bytes", "minor_faults", "major_faults", "touched_bytes", "read_bytes",
    "device_read_bytes", "own_read_bytes",
)  # fmt: skip
# What a tensor costs, by the phases of a load.
SPLIT = {
    "registration": ("open", "plan", "prepare"),
    "waiting": ("read", "wait for the prefetch"),
    "clean-up": ("hand over",),
}
REPORTED = ("phases", "paths", "pages")


def median(runs: Iterable[dict[str, Any]], fact: str) -> float | None:
    """The median of a fact, None if it was not measured."""
    values = [run[fact] for run in runs if run.get(fact) is not None]
    return statistics.median(values) if values else None


def median_run(runs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The run of median seconds; of an even number, the slower of the two."""
    order = sorted(runs, key=lambda run: float(run["seconds"]))
    return order[len(order) // 2]


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The stored form of all runs of one arm, given in the order of the rounds.

    Seconds are stored by round: arms are compared within a round, and tables show the spread.
    Of gdsload's reports the one of the median run is stored, and the cost of a tensor.
    """
    medians = {fact: median(runs, fact) for fact in FACTS}
    kept = {
        "seconds": [run["seconds"] for run in runs],
        "medians": {fact: value for fact, value in medians.items() if value is not None},
    }
    reports = [run["notes"]["report"] for run in runs if "report" in run.get("notes", {})]
    if len(reports) < len(runs):
        return kept
    report = median_run(runs)["notes"]["report"]
    return {
        **kept,
        "report": {name: report[name] for name in REPORTED if report.get(name)},
        "tensor_ms": split(reports),
    }


def split(reports: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Milliseconds per tensor and purpose; medians over the reports."""
    found: dict[str, list[float]] = {name: [] for name in SPLIT}
    for report in reports:
        phases = report["phases"]
        rest = report["seconds"] - sum(phases.values())
        for name, parts in SPLIT.items():
            took = sum(phases.get(part, 0.0) for part in parts)
            # Time outside the phases ends the backend and its descriptors.
            took += rest if name == "clean-up" else 0.0
            found[name].append(took / report["tensors"] * 1e3)
    return {name: statistics.median(values) for name, values in found.items()}
