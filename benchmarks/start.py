"""Process start to a ready model, every parameter touched: with prefetch, without, and stock.

    python benchmarks/start.py DIRECTORY [--rounds 5] [--json OUT] [--picture OUT.svg]

Each figure is of a fresh process; the arms take turns, and the weights are put out of the page
cache before each. `imports` and `read` are the two halves alone: with prefetch the whole should
cost what the longer of them costs. The picture is the timeline of the median run of each arm.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gdsload import residency

ARMS = ("imports", "read", "stock", "gdsload", "prefetch")

# CLOCK_MONOTONIC is the same for all processes: the parent's `begin` is the process's start.
CHILD = """
import json, sys, time
arm, source, begin = sys.argv[1], sys.argv[2], float(sys.argv[3])
marks, spans = {}, []
def mark(name):
    marks[name] = time.monotonic() - begin
def touch(tensors):
    import torch
    total = 0
    for tensor in tensors:
        raw = tensor.contiguous().view(-1).view(torch.uint8)
        words = raw.numel() // 8 * 8
        total += int(raw[:words].view(torch.int64).sum()) + int(raw[words:].sum())
    return total % 2**64
checksum = None
if arm == "prefetch":
    import gdsload
    ahead = gdsload.prefetch(source)
    mark("prefetch called")
if arm == "read":
    import gdsload
    mark("imports")
    with gdsload.prefetch(source) as ahead:
        ahead.wait()
else:
    import torch, transformers
    from transformers import AutoModelForCausalLM, AutoConfig
    config = AutoConfig.from_pretrained(source)
    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    model_class = mapping[type(config)]
    mark("imports")
    if arm == "stock":
        model = model_class.from_pretrained(source, dtype="auto")
    elif arm != "imports":
        import gdsload
        model = gdsload.from_pretrained(source, cls=model_class, dtype="auto")
    mark("loaded")
    if arm != "imports":
        checksum = touch(model.state_dict().values())
mark("ready")
if arm in ("prefetch", "read"):
    report = ahead.report
    spans = [(s.name, s.start - begin, s.end - begin) for s in report.spans
             if s.track != "phases"]
print(json.dumps({"marks": marks, "checksum": checksum, "reads": spans}))
"""


def run(arm: str, source: Path) -> dict[str, Any]:
    """One fresh process, with the weights out of the page cache."""
    for file in sorted(source.glob("*.safetensors")):
        left = residency.evict(file)
        if left:
            raise SystemExit(f"{file}: {left} bytes stay in the page cache: no cold figure here")
    begin = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, arm, str(source), repr(begin)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if ran.returncode:
        raise SystemExit(f"{arm}: {ran.stderr}")
    facts: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return facts


def median_run(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return sorted(runs, key=lambda one: one["marks"]["ready"])[len(runs) // 2]


def verdict(seconds: dict[str, float]) -> str:
    """How far the whole is from the longer of its halves."""
    floor = max(seconds["imports"], seconds["read"])
    return (
        f"prefetch {seconds['prefetch']:.2f} s, max(imports, read) {floor:.2f} s:"
        f" {seconds['prefetch'] / floor - 1:+.0%}"
    )


def draw(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """The timeline: imports, loading and touching above, each read below."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    arms = ("stock", "gdsload", "prefetch")
    figure, axes = pyplot.subplots(figsize=(9, 3))
    for row, arm in enumerate(arms):
        median = median_run(results[arm])
        marks = median["marks"]
        last = 0.0
        for name, colour in (("imports", "0.7"), ("loaded", "tab:blue"), ("ready", "tab:green")):
            axes.barh(row, marks[name] - last, left=last, height=0.4, color=colour)
            last = marks[name]
        reads = [(start, end - start) for _, start, end in median["reads"]]
        axes.broken_barh(reads, (row + 0.22, 0.15), color="tab:orange")
    axes.set_yticks(range(len(arms)), arms)
    axes.set_xlabel("seconds since the process started (grey: imports, blue: load, green: touch,"
                    " orange: reads ahead)")  # fmt: skip
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    words = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for number in range(words.rounds):
        for arm in ARMS[number % len(ARMS) :] + ARMS[: number % len(ARMS)]:
            results[arm].append(run(arm, words.source))
    sums = {one["checksum"] for arm in ("stock", "gdsload", "prefetch") for one in results[arm]}
    if len(sums) != 1:
        raise SystemExit(f"the arms do not agree on the weights: {sums}")
    seconds = {
        arm: statistics.median(one["marks"]["ready"] for one in runs)
        for arm, runs in results.items()
    }
    for arm, took in seconds.items():
        print(f"{arm:10} {took:7.3f} s")
    print(verdict(seconds))
    if words.json:
        words.json.write_text(json.dumps({"seconds": seconds, "runs": results}, indent=2))
    if words.picture:
        draw(results, words.picture)


if __name__ == "__main__":
    main()
