"""What is kept of the runs of an arm: the seconds of each round, and medians of everything else."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

# Medians that are kept, where they were taken.
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
    """The median of a fact, None where it was not taken."""
    values = [run[fact] for run in runs if run.get(fact) is not None]
    return statistics.median(values) if values else None


def median_run(runs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The run of median seconds; of an even number, the slower of the two."""
    order = sorted(runs, key=lambda run: float(run["seconds"]))
    return order[len(order) // 2]


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is kept of all runs of one arm, given in the order of the rounds.

    Seconds are kept round by round: arms are compared within a round, and the spread is shown.
    Of gdsload's own report the median run's is kept, and the cost of a tensor.
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
    """Milliseconds of a tensor, by what they were spent on; medians over the reports."""
    found: dict[str, list[float]] = {name: [] for name in SPLIT}
    for report in reports:
        phases = report["phases"]
        rest = report["seconds"] - sum(phases.values())
        for name, parts in SPLIT.items():
            took = sum(phases.get(part, 0.0) for part in parts)
            # What no phase has is the end of the request, the backend and its descriptors.
            took += rest if name == "clean-up" else 0.0
            found[name].append(took / report["tensors"] * 1e3)
    return {name: statistics.median(values) for name, values in found.items()}
