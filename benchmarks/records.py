"""Results of benchmarks: one small JSON file each, with the machine, the date and the commit; and
the checkpoint that a benchmark runs on, which is found or written for it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from . import layout, machine, places, values

FORMAT = 2
INTERRUPTED = 130  # the exit status after Ctrl-C
WRONG_ARGUMENTS = 2  # the exit status, as of argparse
DIGITS = 6  # of a stored number: no table shows as many
T = TypeVar("T")


class Refused(Exception):
    """A measurement that is inconsistent, or was not possible: it has no result."""


class WrongArguments(Refused):
    """Arguments that name nothing to measure."""


def record(kind: str, beside: Path, **facts: Any) -> dict[str, Any]:
    """A result of that kind, measured on the storage that holds `beside`."""
    return {
        "format": FORMAT,
        "kind": kind,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": machine.commits(),
        "machine": machine.describe(beside),
        **facts,
    }


def parser_of(prog: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser whose description is the first line of a module's docstring."""
    return argparse.ArgumentParser(prog=prog, description=(doc or "").partition("\n")[0])


def require_room(options: argparse.Namespace) -> None:
    """Raises Refused if a result could not be stored, before hours are spent on it."""
    path: Path = options.output or places.RESULTS / "result.json"
    if path.is_dir():
        raise Refused(f"--output {path} is a directory: name a file in it")
    if path.exists() and not path.is_file():
        return  # a pipe or a terminal
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".bench-"):
            pass
    except OSError as error:
        raise Refused(
            f"the result could not be kept in {path.parent}: {error.strerror}; name another file"
            " with --output"
        ) from error


def rounded(value: Any) -> Any:
    """The same with floats of a few digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(entry) for entry in value]
    return value


def written(result: dict[str, Any]) -> str:
    """A result as JSON, a line for each entry, and for each arm or line of a table."""
    parts = []
    for name, value in rounded(result).items():
        text = json.dumps(value)
        if isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
            text = "[\n  " + ",\n  ".join(json.dumps(entry) for entry in value) + "\n ]"
        parts.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def keep(result: dict[str, Any], options: argparse.Namespace, name: str) -> Path:
    """Writes a result to `--output`, or under its name among the others; says where.

    The write is atomic. An older result of this name stays, and the new one gets a number, unless
    `--replace` or `--output` is given: a quick trial must not replace the result of a long run, nor
    may one that was interrupted.
    """
    path: Path = options.output or places.RESULTS / f"{name}.json"
    replaces = options.output is not None or options.replace
    is_file = path.is_file() or not path.exists()
    if is_file and (not replaces or interrupted(options)):
        path = next(one for one in _numbered(path) if not one.exists())
    path.parent.mkdir(parents=True, exist_ok=True)
    text = written(result)
    if path.exists() and not path.is_file():
        path.write_text(text)
        return path
    half = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        half.write_text(text)
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)
    return path


def interrupted(options: argparse.Namespace) -> bool:
    """Whether Ctrl-C has ended the measurement."""
    return bool(getattr(options, "interrupted", False))


def _numbered(path: Path) -> Iterator[Path]:
    yield path
    for number in count(2):
        yield path.with_name(f"{path.stem}-{number}{path.suffix}")


def finish(result: dict[str, Any], options: argparse.Namespace, name: str, text: str) -> None:
    """Prints a result, as text or with `--json` as JSON, and stores it."""
    if options.json:
        print(written(result), end="")
    else:
        say("\n" + text)
    sys.stdout.flush()
    print(f"\nresult: {keep(result, options, name)}", file=sys.stderr)


def publish(
    prog: str, options: argparse.Namespace, measure: Callable[[], tuple[dict[str, Any], str]]
) -> int:
    """Measures, prints and stores a result: the exit status of a program.

    Args:
        prog: the program, for its error message.
        options: the arguments of `add_output`.
        measure: returns the result and the name of its file. May raise Refused.
    """
    from . import render  # which imports every program

    machine.note_start()
    try:
        result, name = measure()
    except WrongArguments as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return WRONG_ARGUMENTS
    except Refused as error:
        print(f"{prog}: no result: {error}", file=sys.stderr)
        return 1
    finish(result, options, name, render.KINDS[result["kind"]].text(result))
    return INTERRUPTED if interrupted(options) else 0


def say(text: str) -> None:
    """Prints a table; on a terminal so that it fits."""
    if sys.stdout.isatty():
        text = layout.fitted(text, shutil.get_terminal_size().columns)
    print(text)


def fill(document: Path, name: str, text: str) -> None:
    """Writes `text` into a page, between its marks `name: generated` and `name: end`."""
    begin, end = f"<!-- {name}: generated -->\n", f"<!-- {name}: end -->\n"
    head, _, rest = document.read_text().partition(begin)
    document.write_text(f"{head}{begin}\n{text}\n{end}{rest.partition(end)[2]}")


def described(result: dict[str, Any]) -> str:
    """The machine, the date and the commit of a result, in one line."""
    facts = result["machine"]
    disk = facts["disk"]
    gpu = "".join(f", {name}" for name in facts.get("gpus", []))
    backed = ", a file of another filesystem that may cache it" if disk.get("file") else ""
    return (
        f"{facts['cpu']}, {layout.several(facts['cores'], 'core')},"
        f" {facts['memory_bytes'] / 2**30:.0f} GiB{gpu}, Linux {facts['kernel']},"
        f" {facts['filesystem']} on {disk.get('name') or 'no disk of its own'}"
        f"{backed} ({facts['mount_options']}); {result['date']}, gdsload {result['commit']}"
    )


def add_source(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name a checkpoint, or a model to write one of."""
    parser.add_argument(
        "source", type=Path, nargs="?", help="a directory of .safetensors files, or one file"
    )
    parser.add_argument("--model", help="write a checkpoint with this model's shapes, and use it")
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path(),
        help="parent directory of the checkpoint of --model (default: the current directory)",
    )
    parser.add_argument("--keep", action="store_true", help="keep the checkpoint of --model")
    parser.add_argument(
        "--name",
        type=values.name,
        help="name of the checkpoint in the result (default: of its directory)",
    )
    add_output(parser)


def add_output(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the output of a result."""
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write the result to this file, and replace an older one unless Ctrl-C ended it",
    )
    parser.add_argument(
        "--replace",
        action="store_true",
        help="without --output: replace an older result, instead of adding a number to the name",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def in_turn(arms: Sequence[T], repeat: int) -> list[T]:
    """The order of a round: every second round is the one before it backwards, and each pair begins
    with another arm. So no arm is always first, or always follows the same one."""
    first = repeat // 2 % len(arms)
    turned = [*arms[first:], *arms[:first]]
    return turned[::-1] if repeat % 2 else turned


@contextmanager
def source_of(options: argparse.Namespace) -> Iterator[Path]:
    """The checkpoint that the arguments name. An existing one is never removed.

    Raises Refused if they name none, or two, or missing files.
    """
    if (options.source is None) == (options.model is None):
        raise WrongArguments(
            "name a checkpoint: a directory or a file, or --model NAME [--dir DIR]"
        )
    if options.source is not None:
        source = options.source.absolute()
        if not source.exists():
            raise Refused(f"{options.source}: no such file or directory")
        if not source.is_file() and not any(source.glob("*.safetensors")):
            raise Refused(f"there is no .safetensors file in {options.source}")
        yield source
        return
    from gdsload.synthetic import checkpoints
    from gdsload.synthetic.model_shapes import MODELS

    if options.model not in MODELS:
        raise WrongArguments(f"no model {options.model!r}: there are {', '.join(MODELS)}")
    target = (options.dir / options.model).absolute()
    there = checkpoints.holds(target, options.model)
    known = target.exists()
    made = [folder for folder in target.parents if not folder.exists()]
    try:
        if not there:
            checkpoints.write(options.model, target)
        yield target
    finally:
        if not known and not options.keep:
            shutil.rmtree(target, ignore_errors=True)
            with suppress(OSError):  # others use it
                for folder in made:
                    folder.rmdir()


def name_of(options: argparse.Namespace, source: Path) -> str:
    """What a checkpoint is called: a directory's dots are part of its name, as in qwen3-0.6b."""
    return str(options.name or (source.stem if source.is_file() else source.name))


def loads_program(
    kind: str,
    doc: str | None,
    measured: Callable[[Path, int], list[dict[str, Any]]],
    words: Sequence[str] | None,
    *,
    repeats: int,
) -> int:
    """A program that measures loads of one file, and stores them: its exit status.

    Args:
        kind: Of the result, such as "load-into".
        doc: The docstring of the program.
        measured: Returns the measured loads of a file, from so many repeats.
        words: The arguments; None for those of the process.
        repeats: The default.
    """
    module = kind.replace("-", "_")
    parser = parser_of(f"python -m benchmarks.{module}", doc)
    add_source(parser)
    parser.add_argument("--repeats", type=values.whole, default=repeats)
    options = parser.parse_args(words)

    def measure() -> tuple[dict[str, Any], str]:
        require_room(options)
        with source_of(options) as source:
            file = source if source.is_file() else min(source.glob("*.safetensors"))
            facts = {"bytes": file.stat().st_size, "loads": measured(file, options.repeats)}
            return record(kind, file, **facts), f"{kind}-{name_of(options, source)}"

    return publish(module, options, measure)
