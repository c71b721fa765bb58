"""Process start to a ready model, every parameter touched: with prefetch, without, and stock.

    python -m benchmarks.start DIRECTORY [--rounds 5] [--json OUT [--add]] [--picture OUT.svg]
    python -m benchmarks.start --from RESULTS.json --picture OUT.svg

Each figure is of a fresh process; the arms take turns, and the weights are put out of the page
cache before each. `imports` and `read` are the two halves alone: with prefetch the whole should
cost what the longer of them costs. The files of Python's packages are warm, and compiled to
bytecode, by a process that is not counted. "Touched" is a byte of every page of every tensor; the
checksum over all of them, the same for all arms, is taken after the clock has stopped. The picture
is the timeline of the median run of each arm.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gdsload import residency

from . import machine

ROOT = Path(__file__).resolve().parents[1]
ARMS = ("imports", "read", "stock", "gdsload", "prefetch")
MODELS = ("stock", "gdsload", "prefetch")  # the arms that end with a model

# CLOCK_MONOTONIC is the same for all processes: the parent's `begin` is the process's start.
CHILD = """
import json, sys, time
arm, source, begin = sys.argv[1], sys.argv[2], float(sys.argv[3])
marks, spans = {}, []
def mark(name):
    marks[name] = time.monotonic() - begin
def bytes_of(tensors):
    import torch
    return [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
def touch(tensors):
    return sum(int(raw[::4096].max()) + int(raw[-1]) for raw in bytes_of(tensors))
def checksum_of(tensors):
    import torch
    total = 0
    for raw in bytes_of(tensors):
        words = raw.numel() // 8 * 8
        total += int(raw[:words].view(torch.int64).sum()) + int(raw[words:].sum())
    return total % 2**64
checksum, phases = None, {}
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
        touch(model.state_dict().values())
mark("ready")
if arm not in ("imports", "read"):
    checksum = checksum_of(model.state_dict().values())
if arm in ("gdsload", "prefetch"):
    phases = gdsload.last_report().phases
if arm in ("prefetch", "read"):
    report = ahead.report
    spans = [(s.name, s.start - begin, s.end - begin) for s in report.spans
             if s.track != "phases"]
print(json.dumps({"marks": marks, "checksum": checksum, "phases": phases, "reads": spans}))
"""


def environment() -> dict[str, str]:
    """A child's: modules are compiled once, beside nobody else's files, and found again."""
    words = {name: word for name, word in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    home = os.path.join(tempfile.gettempdir(), f"gdsload-start-{os.getuid()}")
    return {"PYTHONPYCACHEPREFIX": home} | words


def child(arm: str, source: Path) -> dict[str, Any]:
    """What a fresh process says of itself."""
    begin = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, arm, str(source), repr(begin)],
        capture_output=True, text=True, check=False, env=environment(),
    )  # fmt: skip
    if ran.returncode:
        raise SystemExit(f"{arm}: {ran.stderr}")
    facts: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return facts


def run(arm: str, source: Path) -> dict[str, Any]:
    """One fresh process, with the weights out of the page cache."""
    for file in sorted(source.glob("*.safetensors")):
        left = residency.evict(file)
        if left:
            raise SystemExit(f"{file}: {left} bytes stay in the page cache: no cold figure here")
    return child(arm, source)


def measure(source: Path, rounds: int, runs: dict[str, list[dict[str, Any]]]) -> None:
    """Adds so many runs of each arm; each round starts with another arm."""
    child("imports", source)
    for _ in range(rounds):
        place = len(runs[ARMS[-1]]) % len(ARMS)
        for arm in ARMS[place:] + ARMS[:place]:
            runs[arm].append(run(arm, source))
    sums = {one["checksum"] for arm in MODELS for one in runs[arm]}
    if len(sums) != 1:
        raise SystemExit(f"the arms do not agree on the weights: {sums}")


def medians(runs: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    return {
        arm: statistics.median(one["marks"]["ready"] for one in some) for arm, some in runs.items()
    }


def median_run(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return sorted(runs, key=lambda one: one["marks"]["ready"])[len(runs) // 2]


def verdict(seconds: dict[str, float]) -> str:
    """How far the whole is from the longer of its halves."""
    floor = max(seconds["imports"], seconds["read"])
    return (
        f"prefetch {seconds['prefetch']:.2f} s, max(imports, read) {floor:.2f} s:"
        f" {seconds['prefetch'] / floor - 1:+.0%}"
    )


def draw(runs: dict[str, list[dict[str, Any]]], title: str, path: Path) -> None:
    """The timeline: imports, loading and touching above, each read below."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = title  # the same runs make the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 2.8))
    colours = {"imports": "0.75", "loaded": "tab:blue", "ready": "tab:green"}
    for row, arm in enumerate(MODELS):
        median = median_run(runs[arm])
        marks = median["marks"]
        last = 0.0
        for name, colour in colours.items():
            axes.barh(row, marks[name] - last, left=last, height=0.4, color=colour)
            last = marks[name]
        axes.text(last, row, f" {last:.2f} s", va="center")
        reads = [(start, end - start) for _, start, end in median["reads"]]
        axes.broken_barh(reads, (row + 0.22, 0.15), color="tab:orange")
    floor = max(medians(runs)["imports"], medians(runs)["read"])
    axes.axvline(floor, color="0.3", linestyle=":", linewidth=1)
    axes.set_yticks(range(len(MODELS)), MODELS)
    axes.set_xlim(0, max(one["marks"]["ready"] for arm in MODELS for one in runs[arm]) * 1.05)
    axes.set_xlabel("seconds since the process started; grey: imports, blue: load, green: touch,\n"
                    "orange: reads ahead; dotted: max(imports alone, reading alone)")  # fmt: skip
    axes.set_title(title)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="keep the runs here")
    parser.add_argument("--add", action="store_true", help="to the runs that are there")
    parser.add_argument("--from", type=Path, dest="kept", help="runs that were kept: no new ones")
    parser.add_argument("--picture", type=Path)
    words = parser.parse_args(arguments)
    if (words.source is None) == (words.kept is None):
        parser.error("either a DIRECTORY to measure with, or --from RESULTS")
    found = words.kept or (words.json if words.add and words.json.exists() else None)
    kept = json.loads(found.read_text()) if found else {"runs": {arm: [] for arm in ARMS}}
    runs = kept["runs"]
    if words.source is not None:
        measure(words.source, words.rounds, runs)
        kept = {
            "model": words.source.name,
            "commit": machine.commit(ROOT),
            "machine": machine.describe(words.source),
            "seconds": medians(runs),
            "runs": runs,
        }
    for arm, took in medians(runs).items():
        print(f"{arm:10} {took:7.3f} s")
    print(verdict(medians(runs)))
    if words.json:
        words.json.write_text(json.dumps(kept, separators=(",", ":")) + "\n")
    if words.picture:
        draw(runs, kept["model"], words.picture)


if __name__ == "__main__":
    main()
