"""What a tensor costs before and after its bytes are read: 100,000 of them, in 200 shards.

    python -m benchmarks.parse

The shards are sparse files: headers as in a real checkpoint, holes for data. Parsing is `open`;
planning and handing over are what the load itself adds to reading, and have a target: 5 us a
tensor together.
"""

from __future__ import annotations

import gc
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gdsload.checkpoint import Checkpoint
from gdsload.memory.host_buffers import HostBuffers, map_shard
from gdsload.memory.tensors import make_tensors
from gdsload.planning.read_plan import Limits, byte_ranges_of, plan_reads

from . import large, records, tables, values
from .layout import several
from .places import CACHE

DIRECTORY = CACHE / "many"
SHAPE = (32, 64)  # BF16
TARGET = ("plan", "place", "hand over")
MOST_US = 5.0


def write(directory: Path, tensors: int, shards: int) -> Path:
    """A sparse checkpoint of `tensors` tensors in `shards` shards. Replaces an existing one."""
    names = [
        f"model.layers.{n // 768}.mlp.experts.{n // 3 % 256}.{n % 3}_proj.weight"
        for n in range(tensors)
    ]
    return large.write(
        directory,
        [
            [
                large.Shape(name, "BF16", SHAPE)
                for name in names[shard * tensors // shards : (shard + 1) * tensors // shards]
            ]
            for shard in range(shards)
        ],
    )


Cost = tuple[float, float]


def timed(action: Callable[[], Any]) -> tuple[Cost, Any]:
    """Seconds by the clock and of CPU (all threads), and what it returned."""
    began, worked = time.perf_counter(), time.process_time()
    result = action()
    return (time.perf_counter() - began, time.process_time() - worked), result


def once(source: Path) -> dict[str, Cost]:
    """What each step of a load costs, but for the reading."""
    gc.collect()
    steps: dict[str, Cost] = {}
    steps["open"], checkpoint = timed(lambda: Checkpoint.open(source))
    with checkpoint:
        infos = list(checkpoint.tensors.values())
        sizes = [shard.size for shard in checkpoint.shards]

        def plan() -> Any:
            return plan_reads(byte_ranges_of(checkpoint), sizes, Limits())

        steps["plan"], planned = timed(plan)
        steps["place"], views = timed(lambda: HostBuffers(planned, {}.__getitem__).views())
        steps["hand over"], given = timed(lambda: make_tensors(infos, views))
        steps["let go"], _ = timed(given.clear)
        del views

        def mapped() -> Any:
            from gdsload.memory.host_buffers import BufferView

            regions = [map_shard(checkpoint, number) for number in range(len(sizes))]
            return {info.name: BufferView(regions[info.shard], info.offset) for info in infos}

        _, views = timed(mapped)
        steps["hand over, mapped"], given = timed(lambda: make_tensors(infos, views))
    return steps


def summary(runs: Sequence[dict[str, Cost]]) -> dict[str, Any]:
    """What is kept: the seconds of each step, and medians of CPU; and of what has a target."""

    def kept(costs: Sequence[Cost]) -> dict[str, Any]:
        return {
            "seconds": [clock for clock, _ in costs],
            "cpu_s": statistics.median(cpu for _, cpu in costs),
        }

    wanted = [[run[step] for step in TARGET] for run in runs]
    return {
        "steps": {step: kept([run[step] for run in runs]) for step in runs[0]},
        "together": kept([(sum(c for c, _ in one), sum(c for _, c in one)) for one in wanted]),
    }


def together(result: dict[str, Any]) -> float:
    """Microseconds of what has a target, for one tensor: the median."""
    return tables.seconds_of(result["together"]).median / result["tensors"] * 1e6


def opening(result: dict[str, Any]) -> float:
    """Seconds of opening all shards: the median."""
    return tables.seconds_of(result["steps"]["open"]).median


def title(result: dict[str, Any]) -> str:
    return (
        f"What a tensor costs beside its bytes, {result['tensors']:,} in {result['shards']} shards"
    )


def table(result: dict[str, Any]) -> str:
    """The steps of a load, and their seconds."""
    rows = []
    each = 1e6 / result["tensors"]
    for step, cost in result["steps"].items():
        took = tables.seconds_of(cost)
        rows.append([step, f"{took.median:.3f}", f"{took.low:.3f} to {took.high:.3f}",
                     f"{took.median * each:.2f}", f"{cost['cpu_s'] * each:.2f}"])  # fmt: skip
    return tables.markdown(["step", "median s", "min to max", "us a tensor", "CPU us"], rows)


def notes(result: dict[str, Any]) -> str:
    said = "met" if together(result) < MOST_US else "missed"
    cpu = result["together"]["cpu_s"] / result["tensors"] * 1e6
    repeats = several(len(result["together"]["seconds"]), "repeat")
    return "\n".join(
        [
            f"- {records.described(result)}",
            f"- {repeats} in one process, after one that is not counted; data are holes of sparse"
            " files, and none of them is read",
            f"- {', '.join(TARGET)}: {together(result):.2f} us a tensor, {cpu:.2f} of"
            f" CPU; under {MOST_US:.0f} was wanted: {said}",
        ]
    )


def main(words: list[str] | None = None) -> int:
    parser = records.parser_of("python -m benchmarks.parse", __doc__)
    parser.add_argument("--tensors", type=values.whole, default=100_000)
    parser.add_argument("--shards", type=values.whole, default=200)
    parser.add_argument("--repeats", type=values.whole, default=7)
    records.add_output(parser)
    options = parser.parse_args(words)
    import torch  # noqa: F401 - its import is not what is measured

    def measured() -> tuple[dict[str, Any], str]:
        records.require_room(options)
        source = write(DIRECTORY, options.tensors, options.shards)
        try:
            once(source)
            runs = [once(source) for _ in range(options.repeats)]
            shape = {"tensors": options.tensors, "shards": options.shards}
            return records.record("parse", source, **shape, **summary(runs)), "parse"
        finally:
            shutil.rmtree(source)

    return records.publish("parse", options, measured)


if __name__ == "__main__":
    sys.exit(main())
