"""The results of scale.py as tables: measured times, and a model of large checkpoints."""

from __future__ import annotations

from typing import Any

from . import records, tables
from .layout import several
from .scale import HARDWARE, PLANS


def steps(section: str, entries: list[dict[str, Any]]) -> str:
    """One section: a line for each step."""
    rows = []
    for entry in entries:
        took, rest = tables.seconds_of(entry), entry["beside_s"]
        shape = {
            "tensors": f"{entry['tensors']:,}",
            "bytes": f"{entry['bytes'] / 1e6:,.0f} MB",
            "shards": f"{entry['shards']:,}",
        }
        rows.append([
            shape.pop(section), *shape.values(), f"{took.median:.4f}",
            f"{took.low:.4f} to {took.high:.4f}", f"{rest:.4f}", f"{entry['cpu_s']:.3f}",
            f"{rest / entry['tensors'] * 1e6:.2f}",
        ])  # fmt: skip
    others = [name for name in ("tensors", "bytes", "shards") if name != section]
    head = [section, *others, "median s", "min to max", "beside reading s", "CPU s",
            "beside, us a tensor"]  # fmt: skip
    return tables.markdown(head, rows)


def loads(entries: list[dict[str, Any]]) -> str:
    alone = tables.seconds_of(entries[0]).median
    rows = []
    for entry in entries:
        took = tables.seconds_of(entry)
        rows.append([
            f"{entry['loads']}", f"{took.median:.3f}", f"{took.low:.3f} to {took.high:.3f}",
            f"{took.median / alone:.2f}", f"{entry['cpu_s']:.3f}",
            f"{entry['loads'] * entry['bytes'] / took.median / 1e9:.2f}",
        ])  # fmt: skip
    head = ["loads at once", "median s", "min to max", "times one", "CPU s", "GB/s of all"]
    return tables.markdown(head, rows)


def plans(entries: list[dict[str, Any]]) -> str:
    rows = [
        [
            entry["model"], f"{entry['parameters'] / 1e9:.1f}", f"{entry['bytes'] / 1e9:,.0f}",
            f"{entry['tensors']:,}", f"{entry['shards']}", f"{entry['open_s']:.3f}",
            f"{entry['plan_s']:.3f}", f"{entry['requests']:,}",
        ]
        for entry in entries
    ]  # fmt: skip
    head = ["model", "billion parameters", "GB", "tensors", "shards", "open s", "plan s",
            "requests"]  # fmt: skip
    return tables.markdown(head, rows)


def per_tensor(sections: dict[str, Any]) -> float | None:
    """Seconds that a tensor costs beside the reading, by the ends of the first section."""
    entries = sections.get("tensors") or []
    if len(entries) < 2:
        return None
    few, many = entries[0], entries[-1]
    return max(many["beside_s"] - few["beside_s"], 0.0) / (many["tensors"] - few["tensors"])


def per_request(plans: list[dict[str, Any]]) -> float:
    """Seconds that a request costs to plan: of the plan whose tensors have the least part in it."""
    return min(entry["plan_s"] / entry["requests"] for entry in plans)


def modelled(sections: dict[str, Any]) -> str:
    """Seconds of a whole load on stated hardware: a model, and marked as one."""
    each = per_tensor(sections)
    if each is None or not sections.get(PLANS):
        return ""
    rows = []
    for entry in sections[PLANS]:
        fixed = entry["tensors"] * each + entry["requests"] * per_request(sections[PLANS])
        cells = [entry["model"], f"{fixed:.2f}"]
        for storage, bus in HARDWARE.values():
            cells.append(f"{fixed + entry['bytes'] / min(storage, bus) / 1e9:.1f}")
        rows.append(cells)
    head = ["MODEL, not measured: s", "of tensors and requests", *HARDWARE]
    return tables.markdown(head, rows)


def table(result: dict[str, Any]) -> str:
    """All sections, each with its title."""
    parts = []
    for section, entries in result["sections"].items():
        if section == PLANS:
            parts.append(f"Plans of large checkpoints, no byte read\n\n{plans(entries)}")
        elif section == "loads":
            parts.append(f"Against loads at once\n\n{loads(entries)}")
        else:
            parts.append(f"Against {section}\n\n{steps(section, entries)}")
    model = modelled(result["sections"])
    return "\n\n".join([*parts, model] if model else parts)


def notes(result: dict[str, Any]) -> str:
    repeats = several(result["repeats"], "repeat")
    lines = [
        records.described(result),
        f"{repeats} in one process, after one that is not counted; the files are"
        " sparse (holes without data), read by direct I/O: no time is spent on a disk",
        "beside reading: the seconds that are not spent on reads, but on opening files, planning,"
        " allocating memory, handing over tensors and freeing them",
    ]
    each = per_tensor(result["sections"])
    if each is not None and result["sections"].get(PLANS):
        lines.append(
            f"the model: tensors at {each * 1e6:.2f} us and requests at"
            f" {per_request(result['sections'][PLANS]) * 1e6:.2f} us each, as measured above, and"
            " then all bytes at the slower of storage and bus, by their makers' rates: "
            + "; ".join(
                f"{name}, and {bus:g} GB/s to memory" for name, (_, bus) in HARDWARE.items()
            )
        )
    return "\n".join(f"- {line}" for line in lines)
