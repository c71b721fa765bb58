"""Process start to a ready model, every parameter touched: with prefetch, without, and stock.

    gdsload bench start DIRECTORY [--repeats 7] [--output RESULT.json]

Each figure is of a fresh process; the arms take turns, and the weights are evicted from the page
cache some seconds before the clock starts. `imports` and `read` are the two halves alone: with
prefetch the whole should take as long as the longer one. `one call` is `gdsload.from_pretrained` in
a process that has imported neither torch nor transformers. An extra process of each arm warms the
files of Python's packages and compiles them to bytecode. "Touched" means one byte of every page of
every tensor; the checksum of all tensors, equal for all arms, is taken after the clock has stopped.
The picture (`gdsload bench report RESULT.json`) is the timeline of the median run of each arm.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gdsload.memory import page_cache

from . import cache, records, tables, values
from .layout import several, size
from .records import Refused
from .summary import median_run

ARMS = ("imports", "read", "stock", "gdsload", "one call", "prefetch")
MODELS = ("stock", "gdsload", "one call", "prefetch")  # the arms that end with a model
# On a virtual machine the host takes back the memory that the last process and the page cache have
# freed: for a second or two that slows down the next process, its imports most of all.
SETTLE_SECONDS = 3.0
# The allowed excess over the longer half, and the repeats that are needed to judge it: single
# starts of Python differ by more.
AIM = 0.10
FEWEST = 5
GAP_SHARE = 0.01  # of a run: shorter gaps between reads are not stored

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
elif arm == "one call":
    import gdsload
    mark("imports")
    model = gdsload.from_pretrained(source, dtype="auto")
    mark("loaded")
    touch(model.state_dict().values())
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
if arm in ("prefetch", "read", "one call"):
    report = gdsload.last_report() if arm == "one call" else ahead.report
    spans = [(s.name, s.start - begin, s.end - begin) for s in report.spans
             if s.track.startswith("reads of ")]
print(json.dumps({"marks": marks, "checksum": checksum, "reads": spans}))
"""


def environment(bytecode: Path) -> dict[str, str]:
    """The environment of a child, which compiles what it imports to this directory."""
    words = {name: word for name, word in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {"PYTHONPYCACHEPREFIX": str(bytecode)} | words


def child(arm: str, source: Path, bytecode: Path) -> dict[str, Any]:
    """The report of a fresh process. Raises Refused if it fails."""
    begin = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, arm, str(source), repr(begin)],
        capture_output=True,
        text=True,
        check=False,
        env=environment(bytecode),
    )
    if ran.returncode:
        said = ran.stderr.strip().splitlines() or ["it ended without a word"]
        raise Refused(f"{arm}: {said[-1]}")
    facts: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return facts


def run(arm: str, source: Path, bytecode: Path) -> dict[str, Any]:
    """One fresh process with cold weights. Raises Refused if some stay in the page cache."""
    files = sorted(source.glob("*.safetensors"))
    left = cache.evict(files)
    if left:
        raise Refused(f"{source}: {left:,} bytes stay in the page cache: no cold figure here")
    time.sleep(SETTLE_SECONDS)
    resident = sum(page_cache.resident_bytes(file) for file in files)
    if resident:
        raise Refused(
            f"{source}: another process read {resident:,} bytes of it before {arm} started"
        )
    facts = child(arm, source, bytecode)
    return {"arm": arm, "seconds": facts["marks"]["ready"], **facts}


def measured(source: Path, rounds: int) -> list[dict[str, Any]]:
    """Runs each arm `rounds` times, in turn. Raises Refused if the models differ."""
    with tempfile.TemporaryDirectory(prefix="gdsload-start-") as name:
        bytecode = Path(name)
        for arm in ARMS:  # what it imports, also late, is compiled and in the page cache
            child(arm, source, bytecode)
        turns = [arm for turn in range(rounds) for arm in records.in_turn(ARMS, turn)]
        runs = []
        for number, arm in enumerate(turns):
            runs.append(run(arm, source, bytecode))
            print(
                f"  {number // len(ARMS) + 1}/{rounds} {arm}: {runs[-1]['seconds']:.3f} s",
                file=sys.stderr,
                flush=True,
            )
    sums = {one["checksum"] for one in runs if one["arm"] in MODELS}
    if len(sums) != 1:
        raise Refused(f"the arms do not agree on the weights: {sums}")
    return runs


def joined(spans: Iterable[Sequence[Any]], gap: float) -> list[list[float]]:
    """Merges (name, begin, end) spans whose gaps are at most `gap` into [begin, end] times."""
    found: list[list[float]] = []
    for _, begin, end in sorted(spans, key=lambda span: float(span[1])):
        if found and begin <= found[-1][1] + gap:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([begin, end])
    return found


def summary(arm: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The stored form of an arm: the seconds of each round, the timeline of the median run."""
    found = [run for run in runs if run["arm"] == arm]
    shown = median_run(found)
    return {
        "label": arm,
        "seconds": [run["seconds"] for run in found],
        "marks": shown["marks"],
        "reads": joined(shown["reads"], GAP_SHARE * shown["seconds"]),
    }


def floor(result: dict[str, Any]) -> float:
    """Seconds of the longer of the two halves."""
    found = tables.by_label(result)
    return max(tables.seconds_of(found[arm]).median for arm in ("imports", "read"))


def beside_limit(result: dict[str, Any]) -> tuple[str, bool]:
    """By how much a start with prefetch is slower than its limit: by medians, and by rounds, each
    with its own limit. And whether both are within the aim."""
    found = tables.by_label(result)
    arms = (found[arm]["seconds"] for arm in ("prefetch", "imports", "read"))
    rounds = (ours / max(limits) - 1 for ours, *limits in zip(*arms, strict=False))
    over = tables.seconds_of(found["prefetch"]).median / floor(result) - 1
    over_by_rounds = statistics.median(rounds)
    text = f"{over:+.0%} ({over_by_rounds:+.0%} by rounds)"
    return text, max(over, over_by_rounds) <= AIM


def too_few(result: dict[str, Any]) -> str:
    """Why the result cannot tell whether the aim is met; "" if it can."""
    rounds = len(tables.by_label(result)["prefetch"]["seconds"])
    return f"{several(rounds, 'repeat')} cannot tell" if rounds < FEWEST else ""


def title(result: dict[str, Any]) -> str:
    rounds = len(tables.by_label(result)["stock"]["seconds"])
    return (
        f"{result['name']}, {size(result['bytes'])}; process start to a ready model, weights"
        f" cold; {several(rounds, 'repeat')}"
    )


def table(result: dict[str, Any]) -> str:
    """Seconds of each arm, its phases in the median run, and how far it is from the limit."""
    found, least = tables.by_label(result), floor(result)
    rows = []
    for arm in ARMS:
        took, marks = tables.seconds_of(found[arm]), found[arm]["marks"]
        loaded = marks.get("loaded", marks["ready"])
        rows.append(
            [
                arm,
                f"{took.median:.2f}",
                f"{took.low:.2f} to {took.high:.2f}",
                f"{marks['imports']:.2f}",
                f"{loaded - marks['imports']:.2f}" if arm in MODELS else "",
                f"{marks['ready'] - loaded:.2f}" if arm in MODELS else "",
                f"{took.median / least - 1:+.0%}" if arm in MODELS else "",
            ]
        )
    head = ["arm", "median s", "min to max", "imports s", "load s", "touch s", "beside the limit"]
    return tables.markdown(head, rows)


def notes(result: dict[str, Any]) -> str:
    over, met = beside_limit(result)
    said = too_few(result) or ("met" if met else "missed")
    checked = ""
    if result["residency_checked"]:  # older results were not
        checked = " and none of them resident when its clock started"
    used = result["machine"].get("versions", {})  # older results have none
    with_what = ", ".join(
        f"{name} {used[name]}" for name in ("torch", "transformers") if name in used
    )
    return "\n".join(
        [
            f"- {records.described(result)}",
            "- each run in a fresh process, arms in turn; weights evicted before each"
            f"{checked}, the files of Python's packages warm; all checksums equal; phases are those"
            " of the median run",
            f"- limit: max(imports alone, reading alone), {floor(result):.2f} s; with prefetch"
            f" {over}, within {AIM:.0%} was wanted: {said}",
            *([f"- versions: {with_what}"] if with_what else []),
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    parser = records.parser_of("gdsload bench start", __doc__)
    records.add_source(parser)
    parser.add_argument(
        "--repeats",
        "--rounds",
        dest="rounds",
        type=values.whole,
        default=7,
        metavar="N",
        help="runs of each loader (default 7)",
    )
    options = parser.parse_args(arguments)

    def result() -> tuple[dict[str, Any], str]:
        with records.source_of(options) as source:
            records.require_room(options)
            if not (source / "config.json").is_file():
                raise Refused(f"{source}: without a config.json there is no model to build")
            cache.require_cold_can_be(source.glob("*.safetensors"))
            name = records.name_of(options, source)
            nbytes = sum(file.stat().st_size for file in source.glob("*.safetensors"))
            runs = measured(source, options.rounds)
            arms = [summary(arm, runs) for arm in ARMS]
            return records.record(
                "start", source, name=name, bytes=nbytes, arms=arms, residency_checked=True
            ), f"start-{name}"

    return records.publish("bench start", options, result)


if __name__ == "__main__":
    sys.exit(main())
