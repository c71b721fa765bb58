"""Thousands of loads in one process, and in eight on one checkpoint: nothing may grow.

    make soak                              # 10,000 loads in one process, then 10,000 in eight
    make soak ARGS='--loads 500'
    python -m benchmarks.soak --loads 200 --processes 1 --kinds 'load_file *' 'prefetch *'

A load is of a random kind: those of `benchmarks.faults` (engines, I/O modes, streams, prefetches,
pools, `from_pretrained`), cancelled and abandoned ones, `load_into`, loads in a forked child, and
loads that fail: files that are cut while they are open, engines that return errors, too few
descriptors. One in eight steps runs four loads in four threads. Each load must return the bytes of
its files, or the error that was provoked. Memory, descriptors, threads, mappings and locked memory
are sampled; after the warm-up, their growth must stay within a bound.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from . import faults, records
from .faults import (
    LARGE,
    SHARDS,
    STALL_SECONDS,
    bytes_of,
    is_wanted,
    loads_of,
    write_checkpoint,
    write_model,
)

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = 100  # in one process
WARM_UP = 0.2  # of the loads: allocators, caches and thread pools have their size then
THREADS = 4
PARALLEL_EVERY = 8
PATIENCE_SECONDS = 5.0  # for threads that are ending
REQUEST_BYTES = faults.REQUEST_BYTES
# The growth that is allowed after the warm-up, in all. Memory: what glibc keeps of freed memory
# varies by some MiB, and with it the number of mappings; a leak of 2 KiB in each load is found.
BOUNDS = {
    "memory_bytes": 16 << 20,
    "descriptors": 0,
    "threads": 0,
    "mappings": 40,
    "locked_bytes": 0,
}
Sample = dict[str, int]
Kind = Callable[[], None]


class Wrong(Exception):
    """A load that did not return what it had to."""


class Growth(NamedTuple):
    """One measure: its value at the end of the warm-up and at the end, the most, and the growth by
    the slope of all samples between."""

    first: int
    last: int
    most: int
    growth: float


# --- samples ------------------------------------------------------------------------------------


def sample() -> Sample:
    """What this process has now, after its garbage was collected."""
    gc.collect()
    sizes: dict[str, int] = {}
    with open("/proc/self/status") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.startswith(("Rss", "VmLck", "VmPin")):
                sizes[name] = int(value.split()[0]) << 10
    with open("/proc/self/maps") as lines:
        mappings = sum(1 for _ in lines)
    return {
        "memory_bytes": sizes["RssAnon"] + sizes["RssShmem"],
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": mappings,
        "locked_bytes": sizes["VmLck"] + sizes["VmPin"],
    }


def settled_sample(most_threads: int) -> Sample:
    """A sample, once the threads of the last load have ended, or do not end."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(os.listdir("/proc/self/task")) > most_threads and time.monotonic() < deadline:
        time.sleep(0.005)
    return sample()


def growth_of(samples: Sequence[Sample]) -> dict[str, Growth]:
    """How each measure grew from the first of these samples to the last."""
    found = {}
    for name in BOUNDS:
        values = [each[name] for each in samples]
        slope = statistics.linear_regression(range(len(values)), values).slope
        found[name] = Growth(values[0], values[-1], max(values), slope * (len(values) - 1))
    return found


def faults_of(growth: Mapping[str, Growth]) -> list[str]:
    """The measures that grew beyond their bounds."""
    return [
        f"{name} grew by {each.growth:,.1f}, more than {BOUNDS[name]:,}: {each.first:,} after the"
        f" warm-up, {each.last:,} at the end"
        for name, each in growth.items()
        if each.growth >= BOUNDS[name] + 1
    ]


# --- kinds of loads -----------------------------------------------------------------------------


class Kinds:
    """Every kind of load, by name, with the bytes that it must return."""

    def __init__(self, folder: Path, own: Path, chance: random.Random) -> None:
        """`own` is a folder for files of this process."""
        import safetensors.torch
        import transformers

        self.plain, self.large, self.model = folder / "plain", folder / "large", folder / "model"
        self.own, self.chance = own, chance
        self.truth: dict[Path, dict[str, bytes]] = {}
        for source in (self.plain, self.large):
            tensors: dict[str, Any] = {}
            for file in sorted(source.glob("*.safetensors")):
                tensors |= safetensors.torch.load_file(file)
            self.truth[source] = {name: bytes_of(tensor) for name, tensor in tensors.items()}
        model = transformers.AutoModelForCausalLM.from_pretrained(self.model)
        self.truth[self.model] = {n: bytes_of(t) for n, t in model.state_dict().items()}
        self.plainly = loads_of(self.plain, self.large, self.model)
        self.alone: dict[str, Kind] = {  # kinds that change the process for a moment
            "error of an engine": self.failing_engine,
            "no descriptors": self.without_descriptors,
            "fork": self.forked,
        }
        self.others: dict[str, Kind] = {
            "load_into": self.into,
            "prefetch cancelled": self.cancelled_prefetch,
            "load cancelled": self.cancelled_load,
            "stream abandoned": self.abandoned_stream,
            "file cut": self.cut_file,
        }
        for name in self.plainly:
            whole = name.startswith("from_pretrained") or "ool" in name
            (self.alone if whole else self.others)[name] = lambda name=name: self.exact(name)

    def exact(self, name: str) -> None:
        if not name.endswith("warm") and self.chance.random() < 0.25:
            self.evict()
        source = self.model if name.startswith("from_pretrained") else self.plain
        source = self.large if faults.is_of_large(name) else source
        wanted = self.truth[source]
        if name.endswith("one file"):
            wanted = {each: wanted[each] for each in ("odd", "off", "none", "c")}
        require_equal(self.plainly[name](), wanted)

    def evict(self) -> None:
        for file in (*self.plain.glob("*.safetensors"), *self.large.glob("*.safetensors")):
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def load(self, source: Path | None = None, **words: Any) -> Mapping[str, Any]:
        import gdsload

        return gdsload.load_file(
            source or self.plain,
            stall_seconds=STALL_SECONDS,
            progress=False,
            options={"request_bytes": REQUEST_BYTES},
            **words,
        )

    def into(self) -> None:
        import torch

        import gdsload

        targets = {name: torch.zeros_like(tensor) for name, tensor in self.load().items()}
        gdsload.load_into(targets, self.plain, progress=False)
        require_equal(targets, self.truth[self.plain])

    def cancelled_prefetch(self) -> None:
        import gdsload

        tier = self.chance.choice(("memory", "pagecache"))
        with gdsload.prefetch(self.plain, tier=tier) as ahead:
            time.sleep(self.chance.choice((0, 0.0003, 0.002)))
            if self.chance.random() < 0.5:
                ahead.cancel()

    def cancelled_load(self) -> None:
        from gdsload.system.cancellation import CancelToken, LoadCancelled

        token = CancelToken()
        timer = threading.Timer(self.chance.choice((0, 0.001, 0.004)), token.ask)
        timer.start()
        with suppress(LoadCancelled):
            require_equal(token.run(self.load, cache="direct"), self.truth[self.plain])
        timer.join()

    def abandoned_stream(self) -> None:
        import gdsload

        for name, tensor in gdsload.stream(self.plain, window_bytes=1 << 18, progress=False):
            if bytes_of(tensor) != self.truth[self.plain][name]:
                raise Wrong(f"wrong bytes in {name}")
            if self.chance.random() < 0.5:
                break

    def cut_file(self) -> None:
        """A file that loses its end while it is open."""
        import gdsload

        with tempfile.TemporaryDirectory(dir=self.own) as folder:
            path = Path(folder, "cut.safetensors")
            shutil.copyfile(self.plain / "model-1-of-3.safetensors", path)
            with gdsload.safe_open(path, cache=self.chance.choice(("direct", "buffered"))) as file:
                os.truncate(path, path.stat().st_size // 2)
                require_error(lambda: file.get_tensor("b"))

    def failing_engine(self) -> None:
        """Reads of an engine that end in EIO, in nothing, or in a part of their bytes."""
        import pytest

        import faulty

        with pytest.MonkeyPatch.context() as patch, faulty.installed(patch) as engine:
            engine.script(faulty.rule(faulty.ERRNO, 5, times=faulty.FOR_EVER, first=70_000))
            require_error(lambda: self.load(cache="buffered"))
            engine.script(faulty.rule(faulty.SHORT, 4096, times=faulty.FOR_EVER))
            require_equal(self.load(cache="buffered"), self.truth[self.plain])

    def without_descriptors(self) -> None:
        """A limit of descriptors that a load meets somewhere: an error, or exact bytes."""
        import gdsload

        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = max(map(int, os.listdir("/proc/self/fd"))) + self.chance.randint(0, 8)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
        try:
            with suppress(gdsload.GdsloadError):
                require_equal(self.load(), self.truth[self.plain])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)

    def forked(self) -> None:
        """A load in a child, which ends without the parent's exit functions."""
        pid = os.fork()
        if pid == 0:
            with suppress(BaseException):
                require_equal(self.load(), self.truth[self.plain])
                os._exit(0)
            os._exit(1)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            raise Wrong("a child could not load")


def require_equal(got: Mapping[str, Any], wanted: Mapping[str, bytes]) -> None:
    if got.keys() != wanted.keys():
        raise Wrong(f"too few or too many tensors: {sorted(got.keys() ^ wanted.keys())}")
    wrong = [name for name, tensor in got.items() if bytes_of(tensor) != wanted[name]]
    if wrong:
        raise Wrong(f"wrong bytes in {wrong}")


def require_error(load: Callable[[], object]) -> None:
    import gdsload

    try:
        load()
    except gdsload.GdsloadError:
        return
    raise Wrong("a load succeeded whose reads had failed")


# --- one process --------------------------------------------------------------------------------


def soak(folder: Path, loads: int, seed: int, patterns: Sequence[str]) -> dict[str, Any]:
    """Makes the loads in this process. Raises what a load raises that should not fail."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        kinds = Kinds(folder, Path(own), chance)
        others, alone = (
            {name: kind for name, kind in each.items() if is_wanted(name, patterns)}
            for each in (kinds.others, kinds.alone)
        )
        gc.collect()
        gc.freeze()  # a collection for each sample leaves out what was imported
        made: Counter[str] = Counter()
        samples: list[Sample] = []
        began = time.monotonic()
        every = max(loads // SAMPLES, 1)
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(time.sleep, [0.05] * THREADS))  # which starts all of them
            while made.total() < loads:
                if others and chance.randrange(PARALLEL_EVERY) == 0:
                    chosen = chance.choices(list(others), k=THREADS)
                    list(threads.map(lambda name: others[name](), chosen))
                else:
                    chosen = [chance.choice([*others, *alone])]
                    (others | alone)[chosen[0]]()
                before = made.total()
                made.update(chosen)
                if made.total() // every > before // every:
                    most_threads = samples[-1]["threads"] if samples else 1 << 30
                    samples.append(settled_sample(most_threads))
    gc.unfreeze()  # compiled modules report objects that exist at the end of the process
    growth = growth_of(samples[int(len(samples) * WARM_UP) :])
    return {
        "loads": made.total(),
        "seconds": round(time.monotonic() - began),
        "samples": len(samples),
        "growth": {name: each._asdict() for name, each in growth.items()},
        "kinds": dict(sorted(made.items())),
        "violations": faults_of(growth),
    }


# --- all processes ------------------------------------------------------------------------------


def in_processes(
    folder: Path, loads: int, count: int, seed: int, patterns: Sequence[str]
) -> list[dict[str, Any]]:
    """The results of `count` processes, which share the loads."""
    command = [
        sys.executable, "-m", "benchmarks.soak", "--child", str(folder),
        "--loads", str(max(loads // count, 1)), "--kinds", *patterns,
    ]  # fmt: skip
    found = []
    with ExitStack() as stack:
        children = []
        for number in range(count):
            words = [*command, "--seed", str(seed + number)]
            child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)
            children.append(stack.enter_context(child))
            stack.callback(child.kill)
        for number, child in enumerate(children):
            out, _ = child.communicate()
            if child.returncode:
                raise records.Refused(f"process {number} ended with {child.returncode}")
            found.append(json.loads(out))
    return found


def summed(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One row for all processes: of each measure, the process where it grew most."""
    kinds: Counter[str] = Counter()
    for each in results:
        kinds.update(each["kinds"])
    return {
        "processes": len(results),
        "loads": sum(each["loads"] for each in results),
        "seconds": max(each["seconds"] for each in results),
        "samples": sum(each["samples"] for each in results),
        "growth": {
            name: max((each["growth"][name] for each in results), key=lambda one: one["growth"])
            for name in BOUNDS
        },
        "kinds": dict(sorted(kinds.items())),
        "violations": [text for each in results for text in each["violations"]],
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| processes | loads | measure | after the warm-up | at the end | most | growth | bound |",
        "|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        for name, each in row["growth"].items():
            unit = 1 << 20 if name.endswith("bytes") else 1
            label = name.replace("_bytes", " (MiB)") if unit > 1 else name
            cells = [
                f"{each[field] / unit:,.{int(unit > 1)}f}" for field in ("first", "last", "most")
            ]
            growth, bound = each["growth"] / unit, BOUNDS[name] // unit
            lines.append(
                f"| {row['processes']} | {row['loads']:,} | {label} | {' | '.join(cells)} |"
                f" {growth:,.1f} | {bound} |"
            )
    return "\n".join(lines) + "\n"


def publish(result: Mapping[str, Any]) -> None:
    """Writes the table into its page."""
    kinds = max(len(row["kinds"]) for row in result["rows"])
    shown = f"{kinds} kinds of loads; {records.described(dict(result))}.\n\n"
    records.fill(faults.DOCUMENT, "soak", shown + table(result["rows"]))


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = records.parser_of("benchmarks.soak", __doc__)
    parser.add_argument("--loads", type=int, default=10_000, help="in each mode: 10000")
    parser.add_argument(
        "--processes", type=int, nargs="+", default=[1, 8], help="modes: 1 process, and 8"
    )
    parser.add_argument("--kinds", nargs="+", default=["*"], metavar="PATTERN", help="kinds: all")
    parser.add_argument("--seed", type=int, default=0, help="of the kinds and their order: 0")
    parser.add_argument(
        "--dir", type=Path, help="where the checkpoints are written: a temporary directory"
    )
    parser.add_argument("--publish", action="store_true", help="write the table into docs/")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    records.add_output(parser)
    return parser.parse_args(words)


def prepare_process() -> None:
    ctypes.CDLL(None).mallopt(-8, 1)  # M_ARENA_MAX: threads leave no arenas that look like leaks
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import torch

    torch.set_num_threads(1)  # OpenMP does not survive a fork


def main(words: Sequence[str] | None = None) -> int:
    """Runs the loads; 1 if something grew, or if a load did not end as it had to."""
    options = arguments(words)
    if options.child:
        prepare_process()
        print(json.dumps(soak(options.child, options.loads, options.seed, options.kinds)))
        return 0
    rows = []
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="gdsload-soak-") as name:
        folder = Path(name)
        write_checkpoint(folder / "plain", SHARDS)
        write_checkpoint(folder / "large", LARGE)
        write_model(folder / "model")
        for count in options.processes:
            try:
                found = in_processes(folder, options.loads, count, options.seed, options.kinds)
            except records.Refused as error:
                print(f"soak: {error}", file=sys.stderr)
                return 1
            rows.append(summed(found))
            print(f"{count} processes: {rows[-1]['seconds']} s", file=sys.stderr, flush=True)
        result = records.record("soak", folder, seed=options.seed, rows=rows)
    print("\n" + table(rows), file=sys.stderr)
    violations = [text for row in rows for text in row["violations"]]
    for text in violations:
        print(text, file=sys.stderr)
    if options.publish:
        publish(result)
    print(f"result: {records.keep(result, options, 'soak')}", file=sys.stderr)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
