"""The comparison of the mini-gds study: the Hugging Face loader, gdsload, and a tensor's cost.

    gdsload bench compare --model qwen3-0.6b --dir /data
    gdsload bench compare MODEL_DIR --device cuda:0

Both build the same model in fresh processes, in turn, cold, under the rules of `bench cold`. What a
tensor costs is split as the study did: registration (files opened and parsed, memory and requests
made), waiting (for bytes), clean-up (handing over, and giving back). The published tables stand
beside: theirs are of another machine, and only ratios compare.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from . import cold, records, tables, values
from .loaded import CPU
from .pages import STATES
from .published import MINI_GDS, MINI_GDS_TENSOR_MS
from .records import Refused
from .summary import SPLIT

STOCK, OURS = "transformers", "gdsload-model"
TENSORS = "gdsload:cache=direct"


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = records.parser_of("gdsload bench compare", __doc__)
    records.add_source(parser)
    parser.add_argument(
        "--device", type=values.device, default=CPU, help="target device: cpu, cuda:0"
    )
    parser.add_argument(
        "--repeats",
        type=values.whole,
        default=5,
        metavar="N",
        help="runs of each loader (default 5)",
    )
    parser.add_argument(
        "--state", choices=STATES, default="small", help="state of the memory, as in bench cold"
    )
    parser.add_argument("--warm", action="store_true", help="start with a full page cache")
    parser.add_argument(
        "--neighbours", action="store_true", help="other programs use the disk meanwhile"
    )
    return parser.parse_args(words)


def compare(source: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The result of a cold benchmark of the three arms. Raises Refused."""
    records.require_room(options)
    if not (source / "config.json").is_file():
        raise Refused(f"{source}: without a config.json there is no model to build")
    words = [str(source), "--name", records.name_of(options, source), "--device", options.device,
             "--repeats", str(options.repeats), "--state", options.state,
             *(["--warm"] if options.warm else []),
             *(["--neighbours"] if options.neighbours else []),
             *(["--output", str(options.output)] if options.output else []),
             "--arms", STOCK, OURS, TENSORS]  # fmt: skip
    result = cold.bench_source(source, cold.arguments(words))
    ran = tables.by_label(result)
    missing = [f"{arm}: {result['left_out'].get(arm)}" for arm in (STOCK, OURS) if arm not in ran]
    if missing:
        raise Refused("; ".join(missing))
    return {**result, "kind": "compare"}


def loads(result: dict[str, Any]) -> str:
    """Time and memory, with the study's lines below ours."""
    found = tables.by_label(result)
    stock = tables.seconds_of(found[STOCK])
    rows = []
    for label in (STOCK, OURS):
        took, fact = tables.seconds_of(found[label]), found[label]["medians"].get
        held, peak, vram = fact("touched_bytes"), fact("peak_rss_bytes"), fact("peak_vram_bytes")
        beside = None if peak is None else peak - (held if vram is None else 0)
        rows.append(
            [
                f"{label}, here",
                f"{took.median:.3f}",
                f"{took.low:.3f} to {took.high:.3f}",
                f"{stock.median / took.median:.2f}",
                tables.shown(beside, lambda value: f"{max(value, 0) / 1e6:.0f}"),
                tables.shown(vram, lambda value: f"{value / 1e6:.0f}"),
            ]
        )
    for model, known in MINI_GDS.items():
        for load in known:
            rows.append([
                f"{load.loader}, {model}, as published", f"{load.seconds:.2f}", "",
                f"{known[0].seconds / load.seconds:.2f}", f"{load.cpu_mb}", f"{load.gpu_mb}",
            ])  # fmt: skip
    head = ["loader", "s", "min to max", "times as fast", "CPU memory beside the model MB",
            "GPU memory MB"]  # fmt: skip
    return tables.markdown(head, rows)


def costs(result: dict[str, Any]) -> str:
    """What one tensor costs, with the study's figures in the last line."""
    rows = []
    if TENSORS in (found := tables.by_label(result)):
        ours = found[TENSORS]["tensor_ms"]
        rows.append([f"{TENSORS}, here", *(f"{ours[name]:.4f}" for name in SPLIT)])
    rows.append(
        ["NIXL GDS loader, as published", *(f"{MINI_GDS_TENSOR_MS[name]:.4f}" for name in SPLIT)]
    )
    return tables.markdown(["ms a tensor", *SPLIT], rows)


def table(result: dict[str, Any]) -> str:
    return f"{loads(result)}\n\n{costs(result)}"


def notes(result: dict[str, Any]) -> str:
    lines = [
        tables.notes(result),
        "- the model in CPU memory counts once: memory beside it is the peak less its tensors",
        "- waiting is for all bytes of the checkpoint at the rate of this disk, shared out over its"
        " tensors; registration and clean-up are what a tensor itself costs",
        "- published: another machine, a GPU, cuFile in compatibility mode; only ratios compare",
    ]
    return "\n".join(lines)


def main(words: list[str] | None = None) -> int:
    options = arguments(words)

    def measured() -> tuple[dict[str, Any], str]:
        with records.source_of(options) as source:
            result = compare(source, options)
        where = options.device.partition(":")[0] + "-warm" * options.warm
        return result, f"compare-{result['checkpoint']['name']}-{where}"

    return records.publish("bench compare", options, measured)


if __name__ == "__main__":
    sys.exit(main())
