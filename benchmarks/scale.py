"""The time of a load by number of tensors, bytes, shards and concurrent loads; large models.

    gdsload bench scale                      all of it: some minutes
    gdsload bench scale tensors shards --repeats 7 --dir /data

The checkpoints are sparse files: real headers, holes for data. A hole is read by direct I/O as any
other block, but no disk is asked, so that what is left is what the library costs. `plans` opens and
plans checkpoints of 70 to 671 billion parameters, and says what their loads would take on stated
hardware: that is a model, made of what was measured here and of rates that were not.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gdsload import last_report, load_file
from gdsload.checkpoint import Checkpoint
from gdsload.planning.read_plan import Limits, byte_ranges_of, plan_reads

from . import large, records, tables, values
from .large import Shape
from .records import Refused
from .summary import median

TOTAL_BYTES = 409_600_000
# (tensors, bytes of all of them, shards) of each step; what varies is the section's name.
SECTIONS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "tensors": tuple((count, TOTAL_BYTES, 1) for count in (10, 100, 1_000, 10_000, 100_000)),
    "bytes": tuple(
        (1_000, total, 1) for total in (4_096_000, 40_960_000, 409_600_000, 1_638_400_000)
    ),
    "shards": tuple((10_000, TOTAL_BYTES, count) for count in (1, 10, 100, 1_000)),
}
LOADS = (1, 2, 4, 8)
PLANS = "plans"
# GB/s of storage and of the way to where the tensors shall be, by the makers' data sheets.
HARDWARE = {
    "one PCIe 4.0 NVMe disk, 7 GB/s": (7.0, 25.0),
    "eight of them, 50 GB/s, PCIe 5.0 GPU": (50.0, 55.0),
    "network storage, 100 Gbit/s": (12.5, 25.0),
}


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = records.parser_of("gdsload bench scale", __doc__)
    choices = [*SECTIONS, "loads", PLANS]
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"{', '.join(choices)}")
    parser.add_argument(
        "--repeats", type=values.whole, default=5, metavar="N", help="runs of each step (default 5)"
    )
    parser.add_argument(
        "--dir",
        type=Path,
        help="directory for sparse files; they are removed (default: the temporary directory)",
    )
    parser.add_argument(
        "--most-bytes", type=values.size, metavar="BYTES", help="largest file (64M)"
    )
    records.add_output(parser)
    options = parser.parse_args(words)
    unknown = set(options.sections) - set(choices)
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(choices)}")
    least = 2 * max(tensors for steps in SECTIONS.values() for tensors, _, _ in steps)
    if options.most_bytes is not None and options.most_bytes < least:
        parser.error(f"--most-bytes: {least:,} are the least: a number in each tensor")
    options.sections = options.sections or choices
    return options


def shapes(tensors: int, total: int) -> Iterator[Shape]:
    """BF16 vectors with a given total of bytes, all but the last alike."""
    each = total // tensors // 2
    for number in range(tensors):
        length = each if number < tensors - 1 else total // 2 - each * (tensors - 1)
        name = f"model.layers.{number // 100}.part.{number % 100}.weight"
        yield Shape(name, "BF16", (length,))


@contextmanager
def sparse(room: Path, tensors: int, total: int, shards: int) -> Iterator[Path]:
    """A checkpoint of holes, for as long as it is needed."""
    most = -(-total // shards)
    target = room / f"{tensors}-{total}-{shards}"
    large.write(target, large.sharded(shapes(tensors, total), most))
    try:
        yield target
    finally:
        shutil.rmtree(target, ignore_errors=True)


def loaded(source: Path, tensors: int, total: int) -> dict[str, Any]:
    """One load, all of it. Raises Refused where it is not all there."""
    gc.collect()
    began, worked = time.perf_counter(), time.process_time()
    state = load_file(source, cache="direct")
    took, cpu = time.perf_counter() - began, time.process_time() - worked
    report = last_report()
    require_whole(source, state, tensors, total)
    # How the reads went is the kernel's business with holes; what they cost beside is ours.
    return {"seconds": took, "cpu_s": cpu, "beside_s": took - report.phases.get("read", 0.0)}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What is kept of the repeats of a step: all seconds, and medians."""
    facts = {fact: median(runs, fact) for fact in ("cpu_s", "beside_s", "open_s", "plan_s")}
    return {
        **({"seconds": [run["seconds"] for run in runs]} if "seconds" in runs[0] else {}),
        **{fact: value for fact, value in facts.items() if value is not None},
    }


def require_whole(source: Path, state: dict[str, Any], tensors: int, total: int) -> None:
    held = sum(tensor.nbytes for tensor in state.values())
    if (len(state), held) != (tensors, total):
        raise Refused(
            f"{source}: {len(state):,} tensors of {held:,} bytes came, where there are"
            f" {tensors:,} of {total:,}"
        )


def against(section: str, room: Path, repeats: int, most: int | None) -> list[dict[str, Any]]:
    """The steps of one section, one after the other."""
    found: list[dict[str, Any]] = []
    for tensors, total, shards in SECTIONS[section]:
        if most is not None and total > most:
            if section == "bytes":
                continue
            total = most // 2 * 2
        with sparse(room, tensors, total, shards) as source:
            files = len(list(source.glob("*.safetensors")))
            loaded(source, tensors, total)  # first-use costs are not what is asked
            runs = [loaded(source, tensors, total) for _ in range(repeats)]
        entry = {"tensors": tensors, "bytes": total, "shards": files, **summary(runs)}
        found.append(entry)
        print(
            f"  {section}: {tensors:,} tensors, {total / 1e6:.0f} MB, {files} shards:"
            f" {tables.seconds_of(entry).median:.3f} s",
            file=sys.stderr,
            flush=True,
        )
    return found


def at_once(
    room: Path, repeats: int, tensors: int = 1_000, total: int = TOTAL_BYTES
) -> list[dict[str, Any]]:
    """Loads in threads of one process, each of a checkpoint of its own."""
    found = []
    sources = []
    for number in range(max(LOADS)):
        target = room / f"load-{number}"
        large.write(target, large.sharded(shapes(tensors, total)))
        sources.append(target)
    loaded(sources[0], tensors, total)
    for count in LOADS:
        runs = [together(sources[:count], tensors, total) for _ in range(repeats)]
        found.append({"loads": count, "tensors": tensors, "bytes": total, **summary(runs)})
        print(
            f"  loads: {count} at once: {tables.seconds_of(found[-1]).median:.3f} s",
            file=sys.stderr,
            flush=True,
        )
    return found


def together(sources: list[Path], tensors: int, total: int) -> dict[str, Any]:
    errors: list[Exception] = []

    def work(source: Path) -> None:
        try:
            require_whole(source, load_file(source, cache="direct"), tensors, total)
        except Exception as error:
            errors.append(error)

    gc.collect()
    threads = [threading.Thread(target=work, args=(source,)) for source in sources]
    began, worked = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took, cpu = time.perf_counter() - began, time.process_time() - worked
    if errors:
        raise errors[0]
    return {"seconds": took, "cpu_s": cpu}


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    began = time.perf_counter()
    result = action()
    return time.perf_counter() - began, result


def planned(room: Path, name: str, repeats: int) -> dict[str, Any]:
    """Opens and plans one of the large checkpoints: no byte of its data is read."""
    everything = list(large.MODELS[name]())
    source = large.write(room / name, large.sharded(everything))
    runs = []
    try:
        for _ in range(repeats + 1):
            opening, checkpoint = timed(lambda: Checkpoint.open(source))
            with checkpoint:
                sizes = [shard.size for shard in checkpoint.shards]
                planning, plan = timed(
                    lambda: plan_reads(byte_ranges_of(checkpoint), sizes, Limits())  # noqa: B023
                )
                if len(plan.locations) != len(everything):
                    raise Refused(
                        f"{name}: {len(plan.locations)} of {len(everything)} were planned"
                    )
                runs.append({"open_s": opening, "plan_s": planning})
    finally:
        shutil.rmtree(source, ignore_errors=True)
    return {
        "model": name,
        "parameters": sum(shape.parameters for shape in everything),
        "bytes": sum(shape.nbytes for shape in everything),
        "tensors": len(everything),
        "shards": len(sizes),
        "requests": len(plan.transfers),
        **summary(runs[1:]),
    }


def scale(room: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All sections. Raises Refused."""
    import torch  # noqa: F401 - its import is not what is measured

    found: dict[str, Any] = {}
    for section in options.sections:
        if section == PLANS:
            found[section] = [planned(room, name, options.repeats) for name in large.MODELS]
        elif section == "loads":
            total = min(TOTAL_BYTES, options.most_bytes or TOTAL_BYTES)
            found[section] = at_once(room, options.repeats, total=total)
        else:
            found[section] = against(section, room, options.repeats, options.most_bytes)
        if not found[section]:
            raise Refused(f"{section}: no step is of {options.most_bytes:,} bytes or less")
    return records.record("scale", room, repeats=options.repeats, sections=found)


def main(words: list[str] | None = None) -> int:
    options = arguments(words)

    def measured() -> tuple[dict[str, Any], str]:
        records.require_room(options)
        if options.dir is not None and not options.dir.is_dir():
            raise Refused(f"--dir {options.dir}: there is no such directory")
        with tempfile.TemporaryDirectory(prefix=".bench-", dir=options.dir) as room:
            return scale(Path(room), options), "scale"

    return records.publish("bench scale", options, measured)


if __name__ == "__main__":
    sys.exit(main())
