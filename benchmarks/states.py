"""Loads in several states of free memory, measured in one run and interleaved by round: one table
with the states as columns."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from . import layout, tables

OURS = "gdsload"
# What tables and targets use of each run.
FACTS = ("load_s", "cpu_s", "peak_rss_bytes", "touched_bytes", "read_bytes")
TITLES = {
    "huge": "touched as huge pages",
    "small": "touched as small pages",
    "idle": "as small, then idle",
    "none": "as found",
}


def stored(summary: dict[str, Any]) -> dict[str, Any]:
    """The stored form of one arm in one state, from the summary of its runs."""
    medians = {fact: value for fact, value in summary["medians"].items() if fact in FACTS}
    pages = summary.get("report", {}).get("pages")
    return {
        "seconds": [round(value, 4) for value in summary["seconds"]],
        "medians": medians,
        **({"pages": pages} if pages else {}),
    }


def of_state(result: dict[str, Any], state: str) -> dict[str, Any]:
    """The result of one state alone, in the form of a result of `bench cold` in this state."""
    return {
        **result,
        "kind": "loads",
        "conditions": {**result["conditions"], "state": state},
        "arms": [{**arm, **arm["states"][state]} for arm in result["arms"]],
    }


def by_rounds(arm: dict[str, Any], other: dict[str, Any]) -> float:
    """How many times as long as `other` an arm takes: the median over the rounds."""
    rounds = zip(arm["seconds"], other["seconds"], strict=True)
    return statistics.median(first / second for first, second in rounds)


def ratios(arm: dict[str, Any], ours: dict[str, Any] | None) -> str:
    """An arm's time as a multiple of gdsload's: by medians, and by rounds."""
    if ours is None:
        return ""
    medians = tables.seconds_of(arm).median / tables.seconds_of(ours).median
    return f"{medians:.2f}, {by_rounds(arm, ours):.2f}"


def cells(arm: dict[str, Any], ours: dict[str, Any] | None) -> Iterator[str]:
    """The three columns of an arm in one state."""
    took, fact = tables.seconds_of(arm), arm["medians"].get
    touched = fact("touched_bytes")
    yield f"{took.median:.2f} ({took.low:.2f} to {took.high:.2f})"
    yield ratios(arm, ours)
    yield f"{fact('cpu_s') / touched * 1e9:.2f}" if touched and fact("cpu_s") is not None else ""


def fastest_first(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The arms by the sum of their medians."""

    def total(arm: dict[str, Any]) -> float:
        return sum(tables.seconds_of(state).median for state in arm["states"].values())

    return sorted(result["arms"], key=total)


def table(result: dict[str, Any]) -> str:
    """The arms, and below them the costs of a first touch."""
    names = result["conditions"]["states"]
    ours = next((arm for arm in result["arms"] if arm["label"] == OURS), None)
    head = ["arm"]
    for name in names:
        head += [f"{name}: s (min to max)", "of gdsload's", "CPU s/GB"]
    rows = [
        [arm["label"]]
        + [
            cell
            for name in names
            for cell in cells(arm["states"][name], ours and ours["states"][name])
        ]
        for arm in fastest_first(result)
    ]
    touches = [
        [
            f"{name}: {TITLES[name]}",
            *(
                f"{took.median * 1e3:.2f} ({took.low * 1e3:.2f} to {took.high * 1e3:.2f})"
                for took in (tables.spread(found[kind]) for kind in ("huge", "small"))
            ),
        ]
        for name, found in result["page_costs"].items()
    ]
    costs = ["first touch of 2 MiB, ms (min to max)", "as a huge page", "as 512 small pages"]
    return f"{tables.markdown(head, rows)}\n\n{tables.markdown(costs, touches)}"


def notes(result: dict[str, Any]) -> str:
    """The notes of a cold table, what the columns mean, and the memory of the machine."""
    first = result["conditions"]["states"][0]
    facts, free = result["machine"], result["free_memory"]
    lines = [
        tables.notes({**result, "arms": of_state(result, first)["arms"]}),
        "- of gdsload's: the time as a multiple of gdsload's in the same state, by medians, and the"
        " median of the multiples of each round",
        f"- memory: {layout.size(free['bytes'])} free before the first round, of which"
        f" {layout.size(free['huge_bytes'])} in blocks of 2 MiB or more; huge pages"
        f" {facts['huge_pages']}, defrag {facts['huge_pages_defrag']}; free page reporting"
        f" {'of order ' + order if (order := facts['free_page_reporting_order']) else 'off'};"
        f" {'a virtual machine' if facts['hypervisor'] else 'no hypervisor'}",
    ]
    return "\n".join(lines)
