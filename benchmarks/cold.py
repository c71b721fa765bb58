"""Cold and warm loads of a checkpoint, gdsload beside everything that people use today.

    gdsload bench cold MODEL_DIR --state backed --repeats 7
    gdsload bench cold --model qwen3-0.6b --dir /data --state idle --arms gdsload bare runai

Arms take turns, each run in a process of its own. A table is printed only when every run adds up:
cold when it started, as many bytes from the disk as were touched, and all arms agreeing on every
tensor. The raw runs go to benchmarks/results/ as JSON, with the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import fio, machine, places, records, tables
from .arms import KINDS, Arm, files_of, parse, ranges
from .judge import ArmFailed, Conditions, Judge, NotWhatItSays
from .records import Refused

ARMS = (
    "gdsload", "safetensors-mmap", "safetensors-pread", "fastsafetensors",
    "fastsafetensors-parallel", "runai", "runai:NUMPY_MADVISE_HUGEPAGE=0", "bare",
    "bare:pages=huge", "bare:memory=backed", "fio",
)  # fmt: skip
MODEL_ARMS = ("transformers", "gdsload-model")
ENGINES = tuple(f"gdsload:engine={name}" for name in ("uring", "linuxaio", "threads", "aio"))
CANNOT = {
    "safetensors 0.9 prefetch": "loads to CUDA devices only",
    "InstantTensor": "loads to CUDA devices only",
}
# Some loaders hold a second copy of a file for a while: enough is touched for them, too.
PREPARE_FACTOR = 2.1
SPARE_BYTES = 2 << 30
IDLE_SECONDS = 10.0


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gdsload bench cold", description=(__doc__ or "").partition("\n")[0]
    )
    records.add_source(parser)
    parser.add_argument("--arms", nargs="+", metavar="ARM", help=f"of {', '.join(KINDS)}, fio")
    parser.add_argument("--also", nargs="+", metavar="ARM", default=[], help="added to the others")
    parser.add_argument("--best", type=Path, metavar="FILE", help="settings that tune.py has found")
    parser.add_argument("--engines", action="store_true", help="each engine of gdsload, too")
    parser.add_argument("--models", action="store_true", help="from_pretrained, too")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--state",
        choices=("backed", "idle", "none"),
        default="backed",
        help="of memory: touched just before the clock, touched and then left alone, as it is",
    )
    parser.add_argument("--idle-seconds", type=float, default=IDLE_SECONDS)
    parser.add_argument(
        "--prepare-factor",
        type=float,
        default=PREPARE_FACTOR,
        help="memory touched before, in multiples of the checkpoint",
    )
    parser.add_argument("--warm", action="store_true", help="page cache full instead of empty")
    parser.add_argument(
        "--no-rehearsal",
        action="store_true",
        help="leave first-use costs of a library inside the clock",
    )
    parser.add_argument(
        "--neighbours",
        action="store_true",
        help="others may read from the disk meanwhile: the arm's own account must add up then",
    )
    parser.add_argument("--no-checksums", action="store_true", help="no CRC-32 in the first round")
    return parser.parse_args(words)


def build_bare() -> None:
    """Compiles the yardstick. Raises ArmFailed with what the compiler says."""
    source = places.PACKAGE / "bare.c"
    if places.BARE.exists() and places.BARE.stat().st_mtime > source.stat().st_mtime:
        return
    places.BARE.parent.mkdir(parents=True, exist_ok=True)
    command = [os.environ.get("CC", "cc"), "-O2", "-Wall", "-shared", "-fPIC"]
    ran = subprocess.run(
        [*command, "-o", str(places.BARE), str(source), "-luring"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if ran.returncode:
        raise ArmFailed(f"bare.c was not compiled: {ran.stderr.strip().splitlines()[0]}")


@contextmanager
def rehearsal(beside: Path, *, model: bool) -> Iterator[Path]:
    """A small checkpoint on the same filesystem, for what a library does only once."""
    directory = Path(tempfile.mkdtemp(prefix=".bench-", dir=beside))
    try:
        if model:
            from transformers import AutoConfig, AutoModelForCausalLM

            config = AutoConfig.for_model(
                "qwen3", hidden_size=64, intermediate_size=128, num_hidden_layers=1, head_dim=32,
                num_attention_heads=2, num_key_value_heads=1, vocab_size=256,
            )  # fmt: skip
            AutoModelForCausalLM.from_config(config).save_pretrained(directory)
        else:
            sizes = {f"rehearsal.{number}": 1 << 16 for number in range(4)}
            header, end = {}, 0
            for name, size in sizes.items():
                header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
                end += size
            text = json.dumps(header).encode()
            text += b" " * (-len(text) % 8)
            body = len(text).to_bytes(8, "little") + text + bytes(end)
            (directory / "model.safetensors").write_bytes(body)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def chosen(options: argparse.Namespace) -> tuple[list[Arm], dict[str, str]]:
    """The arms, and those that cannot run here with their reasons."""
    import gdsload

    names = list(options.arms or ARMS)
    if options.best:
        best = json.loads(options.best.read_text())["best"]
        # Beside the defaults, not instead: what people get, and what they could get.
        names = [label for name in names for label in (name, best.get(name, name))]
    if options.engines:
        names += ENGINES
    if options.models:
        names += MODEL_ARMS
    names += options.also
    left_out = {} if options.arms else dict(CANNOT)
    if "gdsload-model" in names and not hasattr(gdsload, "from_pretrained"):
        names.remove("gdsload-model")
        left_out["gdsload-model"] = "this gdsload has no from_pretrained"
    arms = [parse(name) for name in dict.fromkeys(names)]
    try:
        build_bare()
    except ArmFailed as error:
        left_out |= {arm.label: str(error) for arm in arms if arm.kind == "bare"}
        arms = [arm for arm in arms if arm.kind != "bare"]
    return arms, left_out


def order(arms: list[Arm], repeat: int) -> list[Arm]:
    """Another one first in each round, and every second round backwards: nobody always follows
    the same neighbour."""
    turned = arms[repeat % len(arms) :] + arms[: repeat % len(arms)]
    return turned[::-1] if repeat % 2 else turned


def measure(
    options: argparse.Namespace, conditions: dict[str, Conditions]
) -> tuple[list[Arm], list[dict[str, Any]], list[dict[str, Any]], dict[str, str]]:
    """All runs of all arms. Raises NotWhatItSays when they do not add up."""
    arms, left_out = chosen(options)
    judges = {kind: Judge(state) for kind, state in conditions.items()}
    judges["model"].sums = judges["tensors"].sums
    judges["model"].crcs = judges["tensors"].crcs
    runs: list[dict[str, Any]] = []
    for repeat in range(options.repeats):
        for position, arm in enumerate(order(arms, repeat)):
            if arm.label in left_out:
                continue
            try:
                if arm.kind == "fio":
                    facts = fio.run(conditions["tensors"], arm.settings)
                else:
                    judge = judges[KINDS[arm.kind].gives]
                    checked = repeat == 0 and not options.no_checksums
                    facts = judge.run(arm, checked=checked)
            except ArmFailed as error:
                left_out[arm.label] = f"failed in round {repeat + 1}: {error}"
                runs = [run for run in runs if run["arm"] != arm.label]
                print(f"  left out: {arm.label}: {error}", file=sys.stderr)
                continue
            runs.append({"arm": arm.label, "repeat": repeat, "position": position, **facts})
            print(f"  {repeat + 1}/{options.repeats} {arm.label}: {facts['seconds']:.3f} s",
                  file=sys.stderr, flush=True)  # fmt: skip
    discarded = [run for judge in judges.values() for run in judge.discarded]
    return arms, runs, discarded, left_out


def bench(options: argparse.Namespace) -> dict[str, Any]:
    """The whole result, as it is written to JSON. Raises NotWhatItSays, Refused."""
    with records.source_of(options) as source:
        return bench_source(source, options)


def bench_source(source: Path, options: argparse.Namespace) -> dict[str, Any]:
    files = files_of(source)
    nbytes = sum(file.stat().st_size for file in files)
    room = machine.available_bytes() - SPARE_BYTES
    if room < nbytes * (2 if options.warm else 1):
        raise Refused(f"{room / 1e9:.1f} GB of memory are too little for this checkpoint")
    prepare = 0
    if options.state != "none":
        # A page cache that is to stay warm needs its own.
        prepare = min(int(nbytes * options.prepare_factor), room - (nbytes if options.warm else 0))
    idle = options.idle_seconds if options.state == "idle" else 0.0
    beside = source if source.is_dir() else source.parent
    with (
        rehearsal(beside.parent, model=False) as small,
        rehearsal(beside.parent, model=True) if options.models else small_is(small) as model,
    ):
        conditions = {
            gives: Conditions(
                source, options.warm, options.state, prepare, idle,
                None if options.no_rehearsal else first, options.neighbours,
            )
            for gives, first in (("tensors", small), ("model", model))
        }  # fmt: skip
        arms, runs, discarded, left_out = measure(options, conditions)
    versions = {run["arm"]: run.pop("versions") for run in runs}
    for run in discarded:
        run.pop("versions", None)
        run["notes"] = {}
    return records.record(
        "loads",
        files[0],
        checkpoint={
            "name": records.name_of(options, source),
            "files": len(files),
            "bytes": nbytes,
            "tensors": sum(len(ranges(file)) for file in files),
        },
        conditions={
            "warm": options.warm,
            "state": options.state,
            "repeats": options.repeats,
            "prepare_bytes": prepare,
            "idle_seconds": idle,
            "rehearsal": not options.no_rehearsal,
            "checked": not options.no_checksums,
            "neighbours": options.neighbours,
            "cache": sorted({run.get("cache", "") for run in runs} - {""}),
        },
        arms=[
            {**arm._asdict(), "versions": versions[arm.label]}
            for arm in arms
            if arm.label in versions
        ],
        runs=runs,
        discarded=discarded,
        left_out=left_out,
    )


@contextmanager
def small_is(path: Path) -> Iterator[Path]:
    """A context for what somebody else cleans up."""
    yield path


def main(words: list[str] | None = None) -> int:
    options = arguments(words)
    try:
        result = bench(options)
    except Refused as error:
        print(f"bench: no table: {error}", file=sys.stderr)
        return 1
    state = result["conditions"]
    cache = "warm" if state["warm"] else "cold"
    name = f"{cache}-{result['checkpoint']['name']}-{state['state']}"
    output = records.keep(result, options.output, name)
    print(f"\n{tables.title(result)}\n\n{tables.table(result)}\n\n{tables.notes(result)}")
    print(f"\nraw runs: {output}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
