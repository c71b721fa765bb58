"""Results as tables: medians with their spread, and the use of seconds and bytes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from .layout import several, size
from .records import described


class Spread(NamedTuple):
    """Median, extremes and the range of the middle half."""

    median: float
    low: float
    high: float
    quarter: float
    three_quarters: float

    @property
    def iqr(self) -> float:
        return self.three_quarters - self.quarter


def spread(values: Iterable[float]) -> Spread:
    """Of at least one value."""
    ordered = sorted(values)
    if len(ordered) == 1:
        return Spread(*ordered * 5)
    first, middle, third = statistics.quantiles(ordered, n=4, method="inclusive")
    return Spread(middle, ordered[0], ordered[-1], first, third)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with aligned columns, the first to the left."""
    table = [list(head), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    lines = []
    for row in table:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("| " + " | ".join(cells) + " |")
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines.insert(1, "| " + " | ".join(rule) + " |")
    return "\n".join(lines)


def by_label(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The arms of a result."""
    return {arm["label"]: arm for arm in result["arms"]}


def seconds_of(arm: dict[str, Any]) -> Spread:
    """Of an arm, or of a step of another table."""
    return spread(arm["seconds"])


def fastest_first(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The arms by their medians."""
    return sorted(result["arms"], key=lambda arm: seconds_of(arm).median)


def yardstick(result: dict[str, Any]) -> str | None:
    """What the fraction is a fraction of: the fastest bare reader into fresh memory; on a GPU the
    slower of its bus and the disk; the disk by fio where no bare reader was built. Warm files are
    limited by no disk, and on the CPU by nothing that is measured."""
    found = by_label(result)
    if result["conditions"]["warm"]:
        return "pinned" if "pinned" in found else None
    for arm in fastest_first(result):
        settings = arm["settings"]
        if arm["kind"] == "bare" and settings["memory"] == "fresh" and "dtype" not in settings:
            return str(arm["label"])
    limits = [label for label in ("pinned", "fio") if label in found]
    return max(limits, key=lambda label: seconds_of(found[label]).median, default=None)


def shown(value: float | None, form: Callable[[float], str]) -> str:
    return "" if value is None else form(value)


LIMITS = {
    "bare": "the fastest bare reader into fresh memory",
    "pinned": "as many bytes from pinned memory to the GPU, no disk",
    "fio": "fio reading the same files into buffers that it reuses",
}
HEAD = (
    "arm", "median s", "min to max", "IQR", "GB/s", "of limit", "load s", "touch s", "CPU s/GB",
    "peak RSS GB", "page cache share", "faults minor", "major", "disk read GB",
)  # fmt: skip


def unit_of(nbytes: int) -> tuple[str, float]:
    """What the bytes of a table are counted in: small checkpoints are nothing in GB."""
    return ("GB", 1e9) if nbytes >= 1e9 else ("MB", 1e6)


def row(arm: dict[str, Any], bare: float | None, nbytes: int) -> list[str]:
    """One arm."""
    unit = unit_of(nbytes)[1]
    took, fact = seconds_of(arm), arm["medians"].get
    touched = fact("touched_bytes") or fact("read_bytes") or nbytes
    file, anon = fact("file_bytes"), fact("anon_bytes")
    share = None
    if file is not None and anon is not None and file + anon > nbytes / 100:
        share = max(file, 0.0) / max(file + anon, 1.0)
    # Where nobody counts for the disk: what the kernel counts for the process.
    read = fact("device_read_bytes", fact("own_read_bytes"))
    same = bare is not None and touched > 0.9 * nbytes and fact("touched_bytes")
    return [
        arm["label"],
        f"{took.median:.3f}",
        f"{took.low:.3f} to {took.high:.3f}",
        f"{took.iqr:.3f}",
        f"{touched / took.median / 1e9:.2f}",
        f"{bare / took.median:.2f}" if same and bare else "",
        shown(fact("load_s"), lambda v: f"{v:.3f}"),
        shown(fact("touch_s"), lambda v: f"{v:.3f}"),
        shown(fact("cpu_s"), lambda v: f"{v / touched * 1e9:.2f}"),
        shown(fact("peak_rss_bytes"), lambda v: f"{v / unit:.2f}"),
        shown(share, lambda v: f"{v:.0%}"),
        shown(fact("minor_faults"), lambda v: f"{v:,.0f}"),
        shown(fact("major_faults"), lambda v: f"{v:,.0f}"),
        shown(read, lambda v: f"{v / unit:.2f}"),
    ]


def table(result: dict[str, Any]) -> str:
    """The arms of a result, the fastest first."""
    nbytes = result["checkpoint"]["bytes"]
    reference = yardstick(result)
    bare = seconds_of(by_label(result)[reference]).median if reference else None
    order = fastest_first(result)
    rows = [row(arm, bare, nbytes) for arm in order]
    unit, scale = unit_of(nbytes)
    empty = [place for place, cells in enumerate(zip(*rows, strict=True)) if not any(cells)]
    head = [name.replace(" GB", f" {unit}") for name in HEAD]
    if any("peak_vram_bytes" in arm["medians"] for arm in order):
        head.append(f"peak VRAM {unit}")
        for arm, cells in zip(order, rows, strict=True):
            peak = arm["medians"].get("peak_vram_bytes")
            cells.append(shown(peak, lambda value: f"{value / scale:.2f}"))
    kept = [place for place in range(len(head)) if place not in empty]
    return markdown(
        [head[place] for place in kept], [[cells[place] for place in kept] for cells in rows]
    )


def title(result: dict[str, Any]) -> str:
    """What the table shows, in one line."""
    checkpoint, state = result["checkpoint"], result["conditions"]
    cache = "warm" if state["warm"] else "cold"
    memory = {
        "huge": "memory touched as huge pages just before",
        "small": "memory touched as small pages just before",
        "idle": f"memory left idle for {state['idle_seconds']:g} s",
        "none": "memory as it was found",
        "states": "in several states of memory",
    }[state["state"]]
    device = state["device"]
    return (
        f"{checkpoint['name']}, {size(checkpoint['bytes'])},"
        f" {several(checkpoint['tensors'], 'tensor')} in {several(checkpoint['files'], 'file')};"
        f" {cache}{'' if device == 'cpu' else f', to {device}'}, {memory};"
        f" {several(state['repeats'], 'repeat')}"
    )


def agreed(result: dict[str, Any]) -> str:
    """Whose sums were compared with whose: only what the judge did compare is called equal."""
    crcs = ", CRC-32 of the first round too" if result["conditions"]["checked"] else ""
    alike: dict[Any, list[str]] = {}  # what was cast compares with what was cast to the same
    for arm in result["arms"]:
        if arm["kind"] not in ("fio", "pinned"):
            alike.setdefault(arm["settings"].get("dtype"), []).append(arm["label"])
    alone = [arms[0] for arms in alike.values() if len(arms) == 1]
    words = []
    if len(alone) < len(alike):
        rest = "" if not alone else " of the others"
        words.append(f"the sums of each tensor{rest} equal in all arms{crcs}")
    if alone:
        several_runs = result["conditions"]["repeats"] > 1
        others = "its own runs only" if several_runs else "nothing: it ran once"
        words.append(f"the sums of {', '.join(alone)} compared with {others}")
    return "; ".join(words) or "nothing to compare: no arm hands tensors out"


def absent(result: dict[str, Any]) -> dict[str, list[str]]:
    """The arms that were left out, by the reason."""
    found: dict[str, list[str]] = {}
    for arm, why in result["left_out"].items():
        found.setdefault(why, []).append(arm)
    return found


def notes(result: dict[str, Any]) -> str:
    """How it was made, what was left out, and what has to be known to believe it."""
    state = result["conditions"]
    reference = None if state["state"] == "states" else yardstick(result)
    idled = f", then {state['idle_seconds']:g} s of idling" if state["idle_seconds"] else ""
    memory = "no memory touched before"
    if state["prepare_bytes"]:
        kind = {"huge": "in huge pages", "states": "but for none"}.get(
            state["state"], "in 4 KiB pages"
        )
        memory = (
            f"memory touched and freed before, in the same process: {size(state['prepare_bytes'])}"
            f" {kind}{idled}{' for idle' if idled and state['state'] == 'states' else ''}"
        )
    on_cpu = state["device"] == "cpu"
    summed = "by one thread inside it" if on_cpu else "on the device after it"
    rehearsal = " and one small rehearsal" if state["rehearsal"] else ""
    lines = [
        described(result),
        f"page cache: {', '.join(state['cache'])}, its content checked before each measurement;"
        f" {memory}",
        f"arms in turn, each run in a fresh process, imports{rehearsal} outside the clock; every"
        f" byte summed {summed}; {agreed(result)}",
    ]
    if reference:
        lines.append(f"of limit: {reference} = 1.00; {LIMITS[reference.partition(':')[0]]}")
    total = result["checkpoint"]["bytes"]
    touched = [arm["medians"]["touched_bytes"] for arm in result["arms"]]
    if any(abs(nbytes - total) > total / 20 for nbytes in touched if nbytes):
        lines.append(
            "GB/s and CPU s/GB count the bytes that were touched: tensors that a model shares once,"
            " and what it casts at its new size; compare seconds"
        )
    if any(arm["kind"] == "tensorizer" for arm in result["arms"]):
        lines.append("tensorizer reads a copy in its own format, written before the first round")
    if result["discarded"]:
        reasons = "; ".join(f"{run['arm']}: {run['why']}" for run in result["discarded"])
        number = several(len(result["discarded"]), "run")
        lines.append(f"discarded and repeated, {number}: {reasons}")
    if state.get("storage"):
        lines.append(f"storage: {state['storage']}")
    if state.get("storage", "").startswith("fuse"):
        lines.append("the reads of the arms were not counted: the kernel does not for FUSE")
    elif result["machine"]["disk"] == {} and not state["warm"]:
        lines.append(
            "nobody counts the reads of this disk apart: instead each arm's own account"
            " (/proc/self/io) had to add up"
        )
    if state["neighbours"]:
        lines.append("the machine was shared: others read from the same disk meanwhile")
    versions = {
        f"{name} {version}"
        for arm in result["arms"]
        for name, version in arm.get("versions", {}).items()
    }
    lines.append("versions: " + ", ".join(sorted(versions)))
    lines += [f"left out: {', '.join(arms)}: {why}" for why, arms in absent(result).items()]
    return "\n".join(f"- {line}" for line in lines)
