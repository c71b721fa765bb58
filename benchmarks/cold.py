"""Cold and warm loads of a checkpoint, by gdsload and by other loaders.

    gdsload bench cold MODEL_DIR --repeats 7
    gdsload bench cold MODEL_DIR --state huge small idle none
    gdsload bench cold --model qwen3-0.6b --dir /data --state idle --arms gdsload bare runai

Arms take turns, each run in a process of its own. A table is printed only when every run adds up:
cold when it started, as many bytes from the disk as were touched, and all arms agreeing on every
tensor. Seconds of each round and medians of the rest go to
benchmarks/results/ as JSON, with the machine.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from gdsload.checkpoint import Checkpoint
from gdsload.errors import GdsloadError
from gdsload.system.available import available_bytes

from . import cache, machine, mounts, pages, records, states, values
from .arms import KINDS, Arm, parse
from .choice import chosen, reasons
from .judge import Conditions, Judge
from .loaded import CPU, ArmFailed, files_of, ranges
from .pages import Memory
from .prepare import converted, converts, rehearsal
from .records import Refused
from .summary import summary

# Some loaders hold a second copy of a file for a while: enough is touched for them, too.
PREPARE_FACTOR = 2.1
SPARE_BYTES = 2 << 30
IDLE_SECONDS = 12.0


def arguments(
    words: list[str] | None = None, *, prog: str = "gdsload bench cold", about: str = __doc__ or ""
) -> argparse.Namespace:
    parser = records.parser_of(prog, about)
    records.add_source(parser)
    parser.add_argument(
        "--arms", nargs="+", metavar="ARM", help=f"loaders: {', '.join(KINDS)}, fio"
    )
    parser.add_argument("--also", nargs="+", metavar="ARM", default=[], help="further loaders")
    parser.add_argument("--best", type=Path, metavar="FILE", help="settings of bench tune")
    parser.add_argument(
        "--device", type=values.device, default=CPU, help="target device: cpu, cuda:0"
    )
    parser.add_argument(
        "--repeats",
        type=values.whole,
        default=7,
        metavar="N",
        help="runs of each loader (default 7)",
    )
    parser.add_argument(
        "--state",
        nargs="+",
        choices=pages.STATES,
        default=["small"],
        help="state of the memory before a load: touched as huge or as small pages, touched and"
        " left alone (idle), or as it is (none); several states make one table",
    )
    parser.add_argument(
        "--idle-seconds",
        type=values.amount(0, "seconds"),
        default=IDLE_SECONDS,
        metavar="S",
        help="pause after touching, for --state idle (default 12)",
    )
    parser.add_argument(
        "--prepare-factor",
        type=values.amount(0, "multiples"),
        default=PREPARE_FACTOR,
        metavar="F",
        help="memory to touch, as a multiple of the checkpoint (default 2.1)",
    )
    parser.add_argument("--warm", action="store_true", help="start with a full page cache")
    parser.add_argument(
        "--no-rehearsal",
        action="store_true",
        help="include what the first use of a library costs",
    )
    parser.add_argument(
        "--neighbours",
        action="store_true",
        help="other programs use the disk meanwhile: check the bytes of this process alone",
    )
    parser.add_argument(
        "--storage",
        choices=(*mounts.KINDS, "cgroup"),
        default="",
        help="mount a filesystem of this kind for the files, or limit the loads by a cgroup",
    )
    parser.add_argument(
        "--storage-option",
        dest="script",
        action="append",
        metavar="NAME=VALUE",
        default=[],
        help="setting of slowfs.c (latency_us=2000) or the cgroup (parent=DIR, io_max, memory_max)",
    )
    parser.add_argument("--no-checksums", action="store_true", help="no CRC-32 in the first round")
    options = parser.parse_args(words)
    try:
        for name in (*(options.arms or ()), *options.also):
            parse(name)
    except ValueError as error:
        parser.error(str(error))
    options.state = list(dict.fromkeys(options.state))
    return options


class Measured(NamedTuple):
    """All runs of all arms, why some did not count, and the arms that could not run."""

    arms: list[Arm]
    runs: list[dict[str, Any]]
    discarded: list[dict[str, str]]
    left_out: dict[str, str]
    page_costs: dict[str, dict[str, list[float]]]


def measure(
    options: argparse.Namespace,
    conditions: dict[str, Conditions],
    memories: list[Memory],
    arms: list[Arm],
    left_out: dict[str, str],
) -> Measured:
    """Ctrl-C ends it, and the rounds that are complete count. Raises NotWhatItSays when runs do not
    add up."""
    with ExitStack() as copies:
        judges = judges_of(arms, conditions, left_out, copies)
        distinct = {id(judge): judge for judge in judges.values()}.values()
        runs: list[dict[str, Any]] = []
        discarded: list[dict[str, str]] = []
        costs: dict[str, dict[str, list[float]]] = {
            memory.state: {"huge": [], "small": []} for memory in memories if len(memories) > 1
        }
        for repeat in range(options.repeats):
            try:
                found, round_costs = one_round(
                    options, conditions["tensors"], memories, arms, judges, left_out, repeat
                )
            except KeyboardInterrupt:
                if repeat == 0:
                    raise
                print(f"interrupted: {repeat} rounds are complete", file=sys.stderr)
                options.repeats, options.interrupted = repeat, True
                break
            discarded = [run for judge in distinct for run in judge.discarded]
            runs += found
            for state, kinds in round_costs.items():
                for kind, took in kinds.items():
                    costs[state][kind].append(round(took, 7))
    runs = [run for run in runs if run["arm"] not in left_out]
    return Measured(arms, runs, discarded, left_out, costs)


def one_round(
    options: argparse.Namespace,
    tensors: Conditions,
    memories: list[Memory],
    arms: list[Arm],
    judges: dict[str, Judge],
    left_out: dict[str, str],
    repeat: int,
) -> tuple[list[dict[str, Any]], dict[str, dict[str, float]]]:
    """A run of each arm in each state, and the costs of a first touch in each of several states.
    An arm that fails is added to `left_out`."""
    runs: list[dict[str, Any]] = []
    costs: dict[str, dict[str, float]] = {}
    checked = repeat == 0 and not options.no_checksums
    for memory in records.in_turn(memories, repeat):
        if len(memories) > 1:
            tensors.make_cache()
            costs[memory.state] = pages.costs(memory, tensors.file_bytes)
        for arm in records.in_turn(arms, repeat):
            if arm.label in left_out:
                continue
            try:
                facts = judges[arm.label].run(arm, memory, checked=checked)
            except ArmFailed as error:
                left_out[arm.label] = f"failed in round {repeat + 1}: {error}"
                print(f"  left out: {arm.label}: {error}", file=sys.stderr)
                continue
            runs.append({"arm": arm.label, "state": memory.state, **facts})
            print(
                f"  {repeat + 1}/{options.repeats} {memory.state} {arm.label}:"
                f" {facts['seconds']:.3f} s",
                file=sys.stderr,
                flush=True,
            )
    return runs, costs


def judges_of(
    arms: list[Arm], conditions: dict[str, Conditions], left_out: dict[str, str], copies: ExitStack
) -> dict[str, Judge]:
    """A judge for each arm, all comparing with the same sums. An arm whose library does not convert
    the checkpoint is left out."""
    common = {kind: Judge(state) for kind, state in conditions.items()}
    first = common["tensors"]
    casts: dict[str, Judge] = {}  # what was cast is compared with what others cast to the same
    judges: dict[str, Judge] = {}
    for arm in arms:
        if arm.kind == "fio":
            judges[arm.label] = first
            continue
        judge = common.get(KINDS[arm.kind].gives, first)
        dtype = arm.settings.get("dtype")
        if dtype is not None:
            known = casts.setdefault(dtype, Judge(judge.conditions))
            judges[arm.label] = replace(known, conditions=judge.conditions, discarded=[])
            continue
        if converts(arm):
            try:
                judge = Judge(copies.enter_context(converted(arm, conditions["tensors"])))
            except ArmFailed as error:
                left_out[arm.label] = str(error)
                continue
        judge.sums, judge.crcs, judge.names = first.sums, first.crcs, first.names
        judges[arm.label] = judge
    return judges


def bench(options: argparse.Namespace) -> dict[str, Any]:
    """The whole result, as it is written to JSON. Raises NotWhatItSays, Refused."""
    script = dict(word.partition("=")[::2] for word in options.script)
    with records.source_of(options) as source, ExitStack() as stack:
        try:
            Checkpoint.open(source).close()
        except GdsloadError as error:  # or else each arm reports it
            raise Refused(str(error)) from error
        name, members = records.name_of(options, source), None
        if options.storage == "cgroup":
            parent = Path(script.pop("parent", "/sys/fs/cgroup"))
            members = stack.enter_context(mounts.cgroup(parent, **script))
        elif options.storage:
            numbers = {word: int(value) for word, value in script.items()}
            if options.storage == "fuse":
                Conditions(source).fill()  # for the daemon
            source = stack.enter_context(mounts.mounted(options.storage, source, **numbers))
        options.name = name
        return bench_source(source, options, members)


def bench_source(
    source: Path, options: argparse.Namespace, members: Path | None = None
) -> dict[str, Any]:
    """`members` is the list of processes of a cgroup for the loads."""
    files = files_of(source)
    nbytes = sum(file.stat().st_size for file in files)
    records.require_room(options)
    (cache.require_visible if options.warm else cache.require_cold_can_be)(files)
    free = available_bytes() or 0
    room = free - min(SPARE_BYTES, free // 4)
    if room < nbytes:
        raise Refused(f"{room / 1e9:.1f} GB of memory are too little for this checkpoint")
    prepare = 0
    if options.state != ["none"]:
        # A page cache that is to stay warm needs its own.
        prepare = min(int(nbytes * options.prepare_factor), room - (nbytes if options.warm else 0))
    idle = options.idle_seconds if "idle" in options.state else 0.0
    memories = [
        Memory(state, prepare if state != "none" else 0, idle if state == "idle" else 0.0)
        for state in options.state
    ]
    found_free = machine.free_memory()
    common = Conditions(
        source,
        options.warm,
        None,
        options.neighbours,
        options.device,
        options.storage,
        members,
    )
    with ExitStack() as stack:
        arms, left_out = chosen(options, source, room)
        models = any(KINDS[arm.kind].gives == "model" for arm in arms if arm.kind in KINDS)
        conditions = {}
        for kind in ("tensors", "model") if models else ("tensors",):
            first = None
            if not options.no_rehearsal:
                first = stack.enter_context(rehearsal(source.parent, model=kind == "model"))
            conditions[kind] = replace(common, rehearsal=first)
        arms, runs, discarded, left_out, page_costs = measure(
            options, conditions, memories, arms, left_out
        )
    if not runs:
        raise Refused("no arm ran\n" + reasons(left_out))
    several = len(memories) > 1
    return records.record(
        "states" if several else "loads",
        files[0],
        checkpoint={
            "name": records.name_of(options, source),
            "files": len(files),
            "bytes": nbytes,
            "tensors": sum(len(ranges(file)) for file in files),
        },
        conditions={
            "warm": options.warm,
            "state": "states" if several else options.state[0],
            **({"states": options.state} if several else {}),
            "repeats": options.repeats,
            "prepare_bytes": prepare,
            "idle_seconds": idle,
            "rehearsal": not options.no_rehearsal,
            "checked": not options.no_checksums,
            "neighbours": options.neighbours,
            "device": options.device,
            "storage": " ".join([options.storage, *options.script]),
            "cache": sorted({run.get("cache", "") for run in runs} - {""}),
        },
        **({"free_memory": found_free, "page_costs": page_costs} if several else {}),
        arms=[
            {**arm._asdict(), "versions": found[0]["versions"], **kept(found, options.state)}
            for arm in arms
            if (found := [run for run in runs if run["arm"] == arm.label])
        ],
        discarded=discarded,
        left_out=left_out,
    )


def kept(runs: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """The stored form of the runs of one arm, by state if there are several."""
    if len(names) == 1:
        return summary(runs)
    return {
        "states": {
            name: states.stored(summary([run for run in runs if run["state"] == name]))
            for name in names
        }
    }


def name_of(result: dict[str, Any]) -> str:
    """What a result of these arms is called: the checkpoint, the state, and a device if any."""
    state = result["conditions"]
    where = "" if state["device"] == CPU else f"-{state['device'].partition(':')[0]}"
    storage = "".join(f"-{word}" for word in state["storage"].split()[:1])
    return f"{result['checkpoint']['name']}-{state['state']}{where}{storage}"


def main(words: list[str] | None = None) -> int:
    options = arguments(words)

    def measured() -> tuple[dict[str, Any], str]:
        result = bench(options)
        return result, f"{'warm' if options.warm else 'cold'}-{name_of(result)}"

    return records.publish("bench cold", options, measured)


if __name__ == "__main__":
    sys.exit(main())
