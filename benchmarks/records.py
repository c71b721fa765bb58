"""What is kept of a benchmark: one JSON file each, with the machine, the date and the commit, and
the checkpoint it ran on, which is found or written for it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from . import machine, places

FORMAT = 1
T = TypeVar("T")


class Refused(Exception):
    """What was measured cannot be what it says, or was not measured at all: there is no record."""


def record(kind: str, beside: Path, **facts: Any) -> dict[str, Any]:
    """A result of that kind, measured on the storage that holds `beside`."""
    return {
        "format": FORMAT,
        "kind": kind,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": machine.commit(),
        "machine": machine.describe(beside),
        **facts,
    }


def keep(result: dict[str, Any], output: Path | None, name: str) -> Path:
    """Writes a result to `output`, or under its name among the others; says where."""
    path = output or places.RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def described(result: dict[str, Any]) -> str:
    """The machine, the date and the commit of a result, in one line."""
    facts = result["machine"]
    disk = facts["disk"]
    gpu = "".join(f", {name}" for name in facts.get("gpus", []))
    return (
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_bytes'] / 2**30:.0f} GiB{gpu}, "
        f"Linux {facts['kernel']}, {facts['filesystem']} on {disk.get('name', '?')} "
        f"({facts['mount_options']}); {result['date']}, gdsload {result['commit']}"
    )


def add_source(parser: argparse.ArgumentParser) -> None:
    """The arguments that name a checkpoint, or have one written."""
    parser.add_argument(
        "source", type=Path, nargs="?", help="a directory of .safetensors files, or one file"
    )
    parser.add_argument("--model", help="write a checkpoint with this model's shapes, and take it")
    parser.add_argument(
        "--dir", type=Path, default=Path(), help="where --model writes: a directory of that name"
    )
    parser.add_argument("--keep", action="store_true", help="leave what --model wrote")
    parser.add_argument("--name", help="of the checkpoint; its directory's by default")
    parser.add_argument("--output", type=Path, help="JSON; named by what was measured if absent")


def in_turn(arms: Sequence[T], repeat: int) -> list[T]:
    """Another one first in each round, and every second round backwards: nobody always follows
    the same neighbour."""
    first = repeat % len(arms)
    turned = [*arms[first:], *arms[:first]]
    return turned[::-1] if repeat % 2 else turned


@contextmanager
def source_of(options: argparse.Namespace) -> Iterator[Path]:
    """The checkpoint that the arguments mean. What was there before is never removed.

    Raises Refused where they name none, or two, or files that are not there.
    """
    if (options.source is None) == (options.model is None):
        raise Refused("name a checkpoint: a directory or a file, or --model NAME [--dir DIR]")
    if options.source is not None:
        source = options.source.absolute()
        if not source.is_file() and not any(source.glob("*.safetensors")):
            raise Refused(f"there is no .safetensors file in {options.source}")
        yield source
        return
    from gdsload import synth

    target = (options.dir / options.model).absolute()
    there = synth.holds(target, options.model)
    if not there:
        synth.write(options.model, target)
    try:
        yield target
    finally:
        if not there and not options.keep:
            shutil.rmtree(target, ignore_errors=True)


def name_of(options: argparse.Namespace, source: Path) -> str:
    """What a checkpoint is called: a directory's dots are part of its name, as in qwen3-0.6b."""
    return str(options.name or (source.stem if source.is_file() else source.name))
