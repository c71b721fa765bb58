"""What the commands share: common options, exit codes, and printing.

Text is for people and rounds sizes; JSON is for programs and has bytes. Text from a file is
escaped before it is printed, because a name may contain control sequences of a terminal.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import click

from gdsload.checkpoint.selection import Names, Selection, experts, layers
from gdsload.errors import GdsloadError, one_line
from gdsload.remote.urls import is_url, shown_source

INTERRUPTED, PIPE_CLOSED = 130, 141  # 128 + SIGINT, 128 + SIGPIPE, as in a shell
# Keys in the context's meta: show the traceback of errors; -v was given.
DEBUG, VERBOSE = "gdsload.debug", "gdsload.verbose"
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_BYTES = r"(\d{1,18})(?:\.(\d{1,18}))?\s*([KMGT]?)(I?B)?"  # int() takes 4,300 digits at most


class Commands(click.Group):
    """The group of all commands. A command returns its exit code; errors become one line."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Parses the arguments, which prints the help if it is asked for."""
        try:
            return super().make_context(*args, **kwargs)
        except OSError as error:
            closed = isinstance(error, BrokenPipeError)
            if not closed:
                click.echo(f"gdsload: {_named(error)}", err=True)
            _flush_or_forget()
            raise click.exceptions.Exit(PIPE_CLOSED if closed else 1) from None

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command and flushes its output."""
        try:
            code = super().invoke(ctx)
            # A script may have closed it, or put an object there that has no `closed`.
            if sys.stdout is not None and not getattr(sys.stdout, "closed", False):
                sys.stdout.flush()
        except KeyboardInterrupt:
            click.echo("gdsload: interrupted", err=True)
            code = INTERRUPTED
        except BrokenPipeError:  # the reader of the output ended, as `| head` does
            code = PIPE_CLOSED
        except ModuleNotFoundError as error:
            if error.name not in ("torch", "numpy") or ctx.meta.get(DEBUG):
                raise
            click.echo(
                f"gdsload: {error.name} is not installed: pip install {error.name}", err=True
            )
            code = 1
        except (GdsloadError, OSError) as error:
            if ctx.meta.get(DEBUG):
                raise
            notes = getattr(error, "__notes__", ())
            text = "; ".join([f"gdsload: {_named(error)}", *notes])
            click.echo("\n".join(map(one_line, text.split("\n"))), err=True)
            code = 1
        if code:
            _flush_or_forget()
            ctx.exit(code)


def _named(error: GdsloadError | OSError) -> str:
    """The text of an error. Python names neither standard output nor the working directory."""
    if isinstance(error, GdsloadError) or error.filename is not None:
        return str(error)
    if not _flush_or_forget():  # an unbuffered one has forgotten it, and has no name then
        return f"standard output: {error.strerror}"
    if error.errno == errno.ENOENT:
        return "the current directory does not exist any more"
    return str(error)


def _flush_or_forget() -> bool:
    """Whether all output is written. If it cannot be, it is dropped: Python would print the failure
    at exit."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError), open(os.devnull, "w") as devnull:
            os.dup2(devnull.fileno(), sys.stdout.fileno())
        return False
    return True


def _logs(ctx: click.Context, _: click.Parameter, count: int) -> None:
    """Logs to stderr: errors, with -v progress, with -vv every detail."""
    log = logging.getLogger("gdsload")
    if ctx.parent is None:
        handler, level = logging.StreamHandler(), log.level
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        log.addHandler(handler)
        ctx.call_on_close(lambda: log.removeHandler(handler))
        ctx.call_on_close(lambda: log.setLevel(level))
        log.setLevel(logging.ERROR)
    if count:
        ctx.meta[VERBOSE] = True
        log.setLevel(logging.INFO if count == 1 else logging.DEBUG)


def _debug(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        ctx.meta[DEBUG] = True


def _options(*parameters: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        for parameter in reversed(parameters):
            function = parameter(function)
        return function

    return decorate


_eager: Any = {"expose_value": False, "is_eager": True}
_VERBOSE = "Log progress to stderr; -vv logs every detail."
_TRACEBACK = "Show the traceback of an error."
common = _options(
    click.option("-v", "--verbose", count=True, callback=_logs, help=_VERBOSE, **_eager),
    click.option("--debug", is_flag=True, callback=_debug, help=_TRACEBACK, **_eager),
)


class Path(click.Path):
    """A path; or a URL, which messages would show with its secrets, only with `urls`. The storage,
    which may hang, is asked only if one kind of path is wanted. A file that this user may not read
    is no wrong argument, and the library's error has a hint."""

    def __init__(self, *, urls: bool = False, **kind: Any) -> None:
        super().__init__(readable=False, **kind)
        self._urls = urls

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not self._urls and is_url(value):
            self.fail(f"{shown_source(value)} is a URL, and must be a local path", param, ctx)
        if self.file_okay and self.dir_okay:
            return self.coerce_path_result(value)
        return super().convert(value, param, ctx)


PATH = Path(urls=True)
LOCAL_PATH = Path()
FILE = Path(dir_okay=False)
DIRECTORY = Path(file_okay=False)
source_of = _options(
    click.argument("source", type=PATH),
    click.option("--revision", help="Branch, tag or commit of a model in the hub's cache."),
    click.option("--subfolder", default="", help="A folder inside the model."),
    click.option("--variant", help='Such as "fp16", for model.fp16.safetensors.'),
    click.option(
        "--cache-dir",
        type=PATH,
        help="The hub's cache, if not in its usual place; for a URL, where its files are kept.",
    ),
)
json_of = click.option("--json", "as_json", is_flag=True, help="Print JSON; sizes are in bytes.")


class Bytes(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes: 4096, 64K or 64KiB (1024 bytes each), 64KB (1000 bytes each)."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = re.fullmatch(_BYTES, str(value).strip().upper())
        if found is None:
            self.fail(f"{value!r} is not a number of bytes, such as 4096, 64K or 1.5GB", param, ctx)
        whole, part, unit, suffix = found.groups(default="")
        factor = 1000 ** (_UNITS[unit] // 10) if suffix == "B" else 1 << _UNITS[unit]
        # Exact for every size, unlike the product of a float.
        nbytes: int = int(whole + part) * factor // 10 ** len(part)
        if not nbytes and int(whole + part):  # 0 has a meaning of its own
            self.fail(f"{value!r} is less than one byte", param, ctx)
        if nbytes >= 10**18:
            self.fail(f"{value!r} is too much", param, ctx)
        return nbytes


class Pattern(click.ParamType):  # type: ignore[type-arg]
    """A name, a glob, or re:REGEX."""

    name = "pattern"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value).startswith("re:"):
            return value
        try:
            return re.compile(value[3:])
        except (re.error, OverflowError, RecursionError) as error:
            self.fail(f"{value!r} is not a regular expression: {error}", param, ctx)


class Numbers(click.ParamType):  # type: ignore[type-arg]
    """The first number and the one after the last: 3, 0:16, or 16: for all from 16."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = re.fullmatch(r"(\d{1,18})(:(\d{0,18}))?", str(value))
        if found is None or (found[3] and int(found[3]) <= int(found[1])):
            self.fail(f"{value!r} is not FIRST:END, such as 0:16", param, ctx)
        first = int(found[1])
        return first, int(found[3]) if found[3] else None if found[2] else first + 1


names_of = _options(
    click.option("--names", "patterns", multiple=True, metavar="PATTERN", type=Pattern(),
                 help="Only tensors of this name, or that match this glob or re:REGEX; may be"
                 " repeated."),
    click.option("--layers", metavar="FIRST:END", type=Numbers(),
                 help="Only tensors of these layers: 0:16, 5, or 2: for all from 2."),
    click.option("--experts", metavar="FIRST:END", type=Numbers(),
                 help="Only tensors of these experts: 0:16, 5, or 2: for all from 2."),
)  # fmt: skip


def chosen(
    patterns: Sequence[str | re.Pattern[str]],
    layer_numbers: tuple[int, int | None] | None,
    expert_numbers: tuple[int, int | None] | None,
) -> Names:
    """The argument `names` of a load, for `names_of`: tensors that fit all options given."""
    wanted: Selection | None = None
    for make, numbers in ((layers, layer_numbers), (experts, expert_numbers)):
        if numbers is not None:
            wanted = make(*numbers) if wanted is None else wanted & make(*numbers)
    if wanted is None:
        return list(patterns) or None
    return [wanted & pattern for pattern in patterns] or wanted


def bytes_option(name: str, text: str) -> Callable[[Any], Any]:
    """An option that takes a number of bytes, 0 by default."""
    return click.option(name, type=Bytes(), default="0", metavar="BYTES", help=text)


def show_json(facts: object) -> None:
    click.echo(json.dumps(facts, indent=2))


def show_table(rows: Iterable[Sequence[str]]) -> None:
    table = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())
