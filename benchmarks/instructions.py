"""Instructions of each step of a load, compared with a baseline.

    make bench-compare                           exit code 1 if a step takes more instructions
    python -m benchmarks.instructions --keep     makes the current counts the baseline

Seconds depend on other work on the machine, instructions hardly: callgrind counts those of a
process that takes a step a few times and of one that takes it once; the difference is the step's.
The exit code is 2 if the baseline is of another Python or processor, or valgrind is missing.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from . import places, records, tables
from .records import Refused

TENSORS, SHARDS = 2_000, 4
FEW, MANY = 1, 4
# Hashing, threads and the allocator cause smaller differences than this.
PLAY = 0.05
BASELINE = places.PACKAGE / "instructions.json"


def step_open(source: Path) -> Callable[[], object]:
    from gdsload.checkpoint import Checkpoint

    def opened() -> None:
        Checkpoint.open(source).close()

    return opened


def _opened(source: Path) -> tuple[Any, list[Any], list[int]]:
    from gdsload.checkpoint import Checkpoint
    from gdsload.planning.read_plan import byte_ranges_of

    checkpoint = Checkpoint.open(source)
    return checkpoint, byte_ranges_of(checkpoint), [shard.size for shard in checkpoint.shards]


def step_plan(source: Path, window_bytes: int = 0) -> Callable[[], object]:
    from gdsload.planning.read_plan import Limits, plan_reads

    _, ranges, sizes = _opened(source)
    return lambda: plan_reads(ranges, sizes, Limits(), window_bytes=window_bytes)


def step_scatter(source: Path) -> Callable[[], object]:
    from gdsload.memory.host_buffers import HostBuffers
    from gdsload.planning.read_plan import Limits, plan_reads

    _, ranges, sizes = _opened(source)
    plan = plan_reads(ranges, sizes, Limits())
    return lambda: HostBuffers(plan, {}.__getitem__).views()


def step_engine(source: Path) -> Callable[[], object]:
    from gdsload.checkpoint import Checkpoint
    from gdsload.loading.batch import Batch
    from gdsload.loading.session import Session
    from gdsload.loading.settings import ReadSettings
    from gdsload.planning.read_plan import byte_ranges_of
    from gdsload.report import LoadReport

    def read() -> None:
        options = {"engine": "threads", "depth": 1, "pages": "small"}
        with (
            Checkpoint.open(source) as checkpoint,
            Session(
                checkpoint,
                LoadReport(""),
                ReadSettings("posix", "buffered", "keep", options),
            ) as session,
        ):
            batch = Batch(session, *session.arrange(byte_ranges_of(checkpoint)))
            try:
                batch.wait()
            finally:
                batch.release()

    return read


STEPS: dict[str, Callable[[Path], Callable[[], object]]] = {
    "open": step_open,
    "plan": step_plan,
    "plan in windows": partial(step_plan, window_bytes=1 << 20),
    "scatter": step_scatter,
    "open, read by threads": step_engine,
}


def counted(step: str, times: int, source: Path) -> int:
    """Instructions of a process that takes a step `times` times. Raises Refused."""
    ran = subprocess.run(
        ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null",
         *places.command(sys.executable, "instructions"), "--take", step, str(times), str(source)],
        env={**places.own_environment(), "PYTHONHASHSEED": "0"},
        cwd="/", capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = re.search(r"Collected\s*:\s*(\d+)", ran.stderr)
    if ran.returncode or found is None:
        words = ran.stderr.strip().splitlines() or ["without a word"]
        raise Refused(f"{step}: valgrind ended with {ran.returncode}: {words[-1]}")
    return int(found[1])


def valgrind() -> str:
    """Its version. Raises Refused if it is not installed."""
    if shutil.which("valgrind") is None:
        raise Refused("valgrind is not installed (Debian, Ubuntu: apt-get install valgrind)")
    ran = subprocess.run(["valgrind", "--version"], capture_output=True, text=True, check=True)
    return ran.stdout.strip()


def conditions() -> dict[str, Any]:
    """The conditions of a count: others give other counts."""
    return {
        "python": platform.python_version(),
        "processor": platform.machine(),
        "valgrind": valgrind(),
        "tensors": TENSORS,
        "shards": SHARDS,
    }


def measure(steps: list[str]) -> dict[str, int]:
    """Instructions of each step, once."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="gdsload-bench-") as room:
        source = checkpoint(Path(room) / "many")
        for step in steps:
            few, many = (counted(step, times, source) for times in (FEW, MANY))
            found[step] = (many - few) // (MANY - FEW)
            print(f"  {step}: {found[step]:,}", file=sys.stderr, flush=True)
    return found


def checkpoint(target: Path) -> Path:
    from .parse import write

    return write(target, TENSORS, SHARDS)


def verdict(found: dict[str, int], known: dict[str, int]) -> list[str]:
    """One line for each step that takes more instructions than the baseline."""
    return [
        f"{step}: {now:,} instructions, {now / known[step] - 1:+.1%} against the baseline"
        for step, now in found.items()
        if step in known and now > known[step] * (1 + PLAY)
    ]


def table(found: dict[str, int], known: dict[str, int]) -> str:
    rows = [
        [
            step,
            f"{now:,}",
            f"{now / TENSORS:,.0f}",
            f"{now / known[step] - 1:+.1%}" if step in known else "new",
        ]
        for step, now in found.items()
    ]
    return tables.markdown(["step", "instructions", "a tensor", "against the baseline"], rows)


def compared(words: argparse.Namespace) -> int:
    here = conditions()
    found = measure(words.steps or list(STEPS))
    if words.keep:
        words.baseline.write_text(json.dumps({**here, "steps": found}, indent=1) + "\n")
        print(f"{table(found, {})}\n\nkept: {words.baseline}")
        return 0
    if not words.baseline.exists():
        raise Refused(f"there is no baseline {words.baseline}: make one with --keep")
    try:
        known = json.loads(words.baseline.read_text())
    except ValueError as error:
        raise Refused(f"{words.baseline} is no baseline: {error}") from error
    print(table(found, known["steps"]))
    other = [
        f"{name} {known.get(name)}, here {value}"
        for name, value in here.items()
        if known.get(name) != value
    ]
    if other:
        raise Refused(f"the baseline is of {'; '.join(other)}: make one here with --keep")
    worse = verdict(found, known["steps"])
    for line in worse:
        print(f"worse: {line}", file=sys.stderr)
    if worse:
        print(
            f"bench-compare: {PLAY:.0%} more is allowed. A change since {words.baseline.name}"
            " (see git log) made this slower: fix it, or accept it with make bench-baseline",
            file=sys.stderr,
        )
    return 1 if worse else 0


def main(words: list[str] | None = None) -> int:
    parser = records.parser_of("python -m benchmarks.instructions", __doc__)
    parser.add_argument(
        "--take", nargs=3, metavar=("STEP", "TIMES", "SOURCE"), help=argparse.SUPPRESS
    )
    parser.add_argument("--steps", nargs="+", choices=list(STEPS))
    parser.add_argument("--keep", action="store_true", help="make this the baseline")
    parser.add_argument("--baseline", type=Path, default=BASELINE)
    options = parser.parse_args(words)
    if options.take:
        step, times, source = options.take
        action = STEPS[step](Path(source))
        for _ in range(int(times)):
            action()
        return 0
    try:
        return compared(options)
    except Refused as error:
        print(f"bench-compare: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
