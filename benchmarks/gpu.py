"""What `make gpu-check` has found on a machine with a GPU, as a result that is kept.

    python -m benchmarks.gpu DIRECTORY --commit COMMIT [--replace]

DIRECTORY is what the check has written, on that machine or brought from it, and COMMIT that of the
gdsload that it checked. The loaders of a table load in turn, each in a process of its own; their
first loads have a column of their own.
"""

from __future__ import annotations

import datetime
import importlib.util
import re
import statistics
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from . import records, tables
from .layout import several
from .places import ROOT
from .records import Refused

OURS, PINNED = "gdsload", "pinned"
LEAST_SHARE = 0.9  # of the rate of pinned memory, the target
LEAST_LOADS = 3  # after the first, for a target
KEPT = ("name", "slot", "GB/s", "touch_ms", "register_ms")  # of the steps, and the rates of copies
Result = dict[str, Any]


def check_script() -> Any:
    """The module of the check, which knows its claims."""
    place = ROOT / "scripts/gpu_check.py"
    spec = importlib.util.spec_from_file_location("gpu_check", place)
    if spec is None or spec.loader is None or not place.exists():
        raise Refused(f"{place} is missing: this program runs in a checkout")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tables_of(rows: list[Result]) -> list[Result]:
    """The loads of each table and loader: the seconds of each round, and the median of the CPU
    time. A loader that failed has no later rounds."""
    found: dict[str, dict[str, list[Result]]] = {}
    for row in rows:
        if row.get("table") and row["verdict"] == "ok":
            found.setdefault(row["table"], {}).setdefault(row["arm"], []).append(row)
    return [
        {
            "table": name,
            "bytes": next(iter(arms.values()))[0]["bytes"],
            "arms": [
                {
                    "label": label,
                    "seconds": [round(load["seconds"], 4) for load in loads],
                    "cpu_s": statistics.median(load["cpu_s"] for load in loads),
                }
                for label, loads in arms.items()
            ],
        }
        for name, arms in found.items()
    ]


def result_of(directory: Path, commit: str) -> Result:
    """Raises Refused if the directory has no results of a check."""
    script = check_script()
    rows = script.read_rows(directory)
    facts = next((row["machine"] for row in rows if "machine" in row), None)
    versions = next((row for row in rows if row["name"] == "versions"), None)
    if facts is None or versions is None:
        raise Refused(f"{directory}: there is no results.jsonl of gpu-check with its machine")
    ended = (directory / "results.jsonl").stat().st_mtime
    date = datetime.datetime.fromtimestamp(ended, datetime.timezone.utc)
    steps = [row for row in rows if row["section"] == "micro" and row["verdict"] == "ok"]
    models = [row for row in rows if "gdsload_seconds" in row]
    return {
        "format": records.FORMAT,
        "kind": "gpu",
        "date": f"{date:%Y-%m-%d %H:%M UTC}",
        "commit": commit,
        "machine": facts,
        "cuda": versions["cuda"],
        "claims": [
            {"claim": claim.text, "verdict": verdict, "evidence": evidence}
            for claim in script.CLAIMS
            for verdict, evidence in [claim.decide(rows)]
        ],
        "tables": tables_of(rows),
        "models": [
            {
                "name": row["name"],
                "seconds": {
                    OURS: row["gdsload_seconds"],
                    "transformers": row["transformers_seconds"],
                },
            }
            for row in models
        ],
        "steps": [
            {
                key: float(f"{value:.4g}") if isinstance(value, float) else value
                for key, value in row.items()
                if key in KEPT or key.endswith(" 1 streams, GB/s")
            }
            for row in steps
            if len(row) > 4
        ],
    }


def later(arm: Result) -> list[float]:
    """The seconds after the first load of the process."""
    found: list[float] = arm["seconds"][1:]
    return found


def title(result: Result) -> str:
    return f"On a GPU: {result['machine']['gpus'][0].partition(',')[0]}"


def _loads(result: Result) -> Iterator[str]:
    for table in result["tables"]:
        rows = []
        for arm in sorted(table["arms"], key=lambda arm: statistics.median(later(arm) or [9e9])):
            if took := later(arm):
                median = statistics.median(took)
                rows.append(
                    [
                        arm["label"],
                        f"{median:.3f}",
                        f"{min(took):.3f} to {max(took):.3f}",
                        f"{table['bytes'] / median / 1e9:.1f}",
                        f"{arm['cpu_s']:.2f}",
                        f"{arm['seconds'][0]:.3f}",
                        str(len(took)),
                    ]
                )
        head = ["loader", "median s", "min to max", "GB/s", "CPU s", "first load, s", "loads"]
        yield f"{table['table']}, {table['bytes'] / 1e9:.2f} GB:\n\n{tables.markdown(head, rows)}"


def _steps(steps: list[Result]) -> Iterator[str]:
    """The steps of a load by themselves: copies by their size, pinning, the page cache."""
    of_copies = re.compile(r"(\d+) KiB(?:, (\d+) together)?, 1 streams, GB/s")
    copies = {
        row["name"].partition(": ")[2]: {
            f"{int(found[1]) // 1024} MiB" + (f", {found[2]} by one call" if found[2] else ""): rate
            for key, rate in row.items()
            if (found := of_copies.fullmatch(key))
        }
        for row in steps
        if row["name"].startswith("host to device")
    }
    head = list(next(iter(copies.values()), {}))
    rows = [
        [name, *(f"{rates[size]:.1f}" if size in rates else "" for size in head)]
        for name, rates in copies.items()
    ]
    yield tables.markdown(["one stream from host memory, GB/s, by bytes of a copy", *head], rows)
    pins = [
        [
            row["name"].partition("register ")[2],
            f"{row['touch_ms']:.1f}",
            f"{row['register_ms']:.1f}",
        ]
        for row in steps
        if "touch_ms" in row
    ]
    yield tables.markdown(["pinning host memory", "touching it, ms", "registering it, ms"], pins)
    cached = [
        [row["name"].rpartition("by ")[2].partition(" ")[0], f"{row['GB/s']:.1f}"]
        for row in steps
        if row["name"].startswith("page cache")
    ]
    yield tables.markdown(["threads that copy from the page cache", "GB/s"], cached)


def table(result: Result) -> str:
    claims = [[each["claim"], each["verdict"], each["evidence"]] for each in result["claims"]]
    models = [
        [row["name"], *(", ".join(f"{s:.2f}" for s in took) for took in row["seconds"].values())]
        for row in result["models"]
    ]
    parts = [
        *_loads(result),
        tables.markdown(["three loads of each, s", OURS, "transformers"], models),
        tables.markdown(["claim", "verdict", "evidence"], claims),
        *_steps(result["steps"]),
    ]
    return "\n\n".join(parts)


def _of_pinned(medians: dict[str, float]) -> tuple[str, bool]:
    share = medians[PINNED] / medians[OURS]
    return f"{share:.2f}", share >= LEAST_SHARE


def _of_fastest(medians: dict[str, float]) -> tuple[str, bool]:
    best = min(others_in(medians), key=medians.__getitem__)
    words = f"{medians[OURS]:.3f} s, {best} {medians[best]:.3f} s"
    return words, medians[OURS] <= medians[best]


def others_in(labels: Iterable[str]) -> list[str]:
    """The labels of other loaders."""
    return [label for label in labels if label.partition(":")[0] not in (OURS, PINNED)]


def aims(result: Result) -> list[list[str]]:
    """The targets of each table, as of the other results."""
    found = []
    for each in result["tables"]:
        loads = {arm["label"]: later(arm) for arm in each["arms"]}
        medians = {
            label: statistics.median(took)
            for label, took in loads.items()
            if len(took) >= LEAST_LOADS
        }
        compared = others_in(medians) or ["another loader"]
        what = "the fastest loader after the first load"
        goals = [(what, "no slower than any other", compared, _of_fastest)]
        if PINNED in loads:
            pinned = ("the rate of pinned memory", f"{LEAST_SHARE} of it", [PINNED], _of_pinned)
            goals.insert(0, pinned)
        for goal, wanted, needed, judge in goals:
            lacking = next((label for label in [OURS, *needed] if label not in medians), "")
            if lacking:
                number = len(loads.get(lacking, []))
                measured, said = f"not measured: {number} loads of {lacking}", ""
            else:
                measured, met = judge(medians)
                said = "met" if met else "missed"
            found.append([f"{each['table']}: {goal}", wanted, measured, said])
    return found


def notes(result: Result) -> str:
    cold = next((each for each in result["tables"] if each["table"].startswith("cold")), None)
    lines = [
        f"- {records.described(result)}, CUDA {result['cuda']}, torch"
        f" {result['machine']['versions']['torch']}",
        "- the loaders take turns, each in a process that loads again and again; medians without"
        " the first load, whose imports of torch are outside the clock",
        "- every byte is on the GPU at the end, and its sums are those of the other loaders",
        "- pinned: as many bytes from pinned memory, by copies of torch",
        "- a loader misses rounds when the time is up, or when another one keeps the GPU's memory",
    ]
    if cold is not None:
        lines.append(
            f"- cold: {several(max(len(a['seconds']) for a in cold['arms']), 'round')},"
            " the page cache is dropped before each load"
        )
    return "\n".join(lines)


def main(words: list[str] | None = None) -> int:
    parser = records.parser_of("python -m benchmarks.gpu", __doc__)
    parser.add_argument("directory", type=Path, help="what gpu-check has written (--out)")
    parser.add_argument("--commit", required=True, help="of the gdsload that it checked")
    records.add_output(parser)
    options = parser.parse_args(words)

    def result() -> tuple[Result, str]:
        found = result_of(options.directory, options.commit)
        model, *_ = found["machine"]["gpus"][0].split(",")  # "NVIDIA H100 80GB HBM3"
        return found, f"gpu-{model.split()[1].lower()}"

    return records.publish("gpu", options, result)


if __name__ == "__main__":
    sys.exit(main())
