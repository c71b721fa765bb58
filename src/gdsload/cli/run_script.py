"""`gdsload run`: a Python script or module that loads its models by gdsload.

The process belongs to the script: `__main__`, the arguments and gdsload stay in place for its
threads and exit functions.
"""

from __future__ import annotations

import builtins
import io
import os
import pkgutil
import runpy
import sys
from collections.abc import Sequence
from functools import partial
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

from gdsload.cli.terminal import INTERRUPTED
from gdsload.errors import GdsloadError, one_line
from gdsload.integrations.transformers.model import install
from gdsload.readahead.prefetch import TIERS, Prefetch, PrefetchCancelled, prefetch
from gdsload.remote.urls import shown_source
from gdsload.system.threads import start_thread
from gdsload.warmup import VARIABLE, from_environment

USAGE = "Usage: gdsload run [OPTION]... (SCRIPT | -m MODULE) [ARGUMENT]..."
HELP = f"""{USAGE}

  Runs a Python script or module that loads its transformers models by gdsload.

  With --model, or GDSLOAD_PREFETCH=SOURCE[@DEVICE] in the environment, a
  prefetch starts before the script imports anything.

Options, in front of the script (-v, -vv and --debug: in front of "run"):
  --model SOURCE   The checkpoint to prefetch: a file, a directory, a cached
                   model or a URL.
  --device DEVICE  Where the script needs it: cpu (the default), cuda, cuda:1.
  --tier TIER      memory (the default): for the load of this script.
                   pagecache: fill the page cache only, for all processes.
  -m MODULE        Run a module instead of a script.
  -h, --help       Show this message and exit."""
OPTIONS = ("--model", "--device", "--tier")
# The exit code of `python` for a script that it cannot open, and of this command for its arguments.
NOT_FOUND = WRONG_ARGUMENTS = 2
# What the interpreter itself calls for `python -m`. `runpy.run_module` and `run_path` restore the
# old `__main__` at their end, while threads of the script may still need theirs.
_run_as_main: Any = runpy._run_module_as_main  # type: ignore[attr-defined]


def _wrong(text: str) -> SystemExit:
    """Prints what is wrong with the arguments."""
    print(text, file=sys.stderr)
    return SystemExit(WRONG_ARGUMENTS)


def from_words(words: Sequence[str]) -> tuple[Prefetch | None, list[str]]:
    """Starts a prefetch from the options at the front of a command line.

    The options are `--model SOURCE [--device DEVICE] [--tier TIER]`. Without them,
    `from_environment` decides.

    Args:
        words: The command line, without the name of the program.

    Returns:
        The prefetch, or None, and the words after the options.

    Raises:
        SystemExit: An option, or GDSLOAD_PREFETCH, has no value or a wrong one.
    """
    wanted = {"tier": "memory", "device": "cpu"}
    given: list[str] = []
    rest = list(words)
    while rest and rest[0].partition("=")[0] in OPTIONS:
        name, equals, value = rest.pop(0).partition("=")
        if not equals:
            if not rest:
                raise _wrong(f"gdsload: {name} needs a value")
            value = rest.pop(0)
        wanted[name[2:]] = value
        given.append(name)
    if rest and rest[0].startswith("-") and rest[0] != "-m":
        raise _wrong(
            f"gdsload: run has no option {one_line(rest[0])}; it has {', '.join(OPTIONS)}, -m, -h"
            ' (-v and --debug go before "run")'
        )
    if not given:
        try:
            return from_environment(), rest
        except ValueError as error:
            raise _wrong(f"gdsload: {VARIABLE}: {error}") from None
    if "model" not in wanted:
        raise _wrong(f"gdsload: {given[0]} needs --model")
    tier = wanted["tier"]
    if tier not in TIERS:
        raise _wrong(f"gdsload: --tier {tier} must be one of {', '.join(TIERS)}")
    try:
        return prefetch(wanted["model"], wanted["device"], tier=tier, strict=False), rest
    except ValueError as error:
        raise _wrong(f"gdsload: --model {shown_source(wanted['model'])}: {error}") from None


def _say(line: str) -> None:
    """Writes a line to stderr, at once: the process may be ending."""
    sys.stderr.write(f"{line}\n")


def _report_problems(ahead: Prefetch) -> None:
    """Prints why a prefetch failed, or read to host memory instead of the GPU's: the script knows
    nothing of it, and loads without it."""
    try:
        ahead.wait()
    except PrefetchCancelled:
        pass  # by the end of the process
    except GdsloadError as error:
        _say(f"gdsload: the prefetch failed: {error}")
    if refusal := ahead.report.refusals.get(ahead.report.device):
        _say(f"gdsload: the prefetch cannot use {ahead.report.device}: {refusal}")


def run(arguments: Sequence[str]) -> None:
    """Runs a script, or a module after -m, like `python`, with gdsload installed.

    Args:
        arguments: The command line of the script. `--model SOURCE [--device DEVICE] [--tier TIER]`
            in front of it, or GDSLOAD_PREFETCH, starts a prefetch before the script imports
            anything.

    Raises:
        SystemExit: There is no script, it cannot be run, or it has ended with an error, whose
            traceback is printed.
    """
    if list(arguments[:1]) in (["-h"], ["--help"]):  # later ones are options of the script
        print(HELP)
        return
    ahead, arguments = from_words(arguments)
    if ahead is not None:
        start_thread(partial(_report_problems, ahead), "gdsload-run")
    module = arguments[:1] == ["-m"]
    if not arguments[module:]:
        raise _wrong(USAGE)
    try:
        install(backend=os.environ.get("GDSLOAD_BACKEND") or "auto")
    except GdsloadError as error:
        raise _wrong(f"gdsload: GDSLOAD_BACKEND: {error}") from None
    sys.argv = list(arguments[module:])
    try:
        _run_main(module)
    except SystemExit:
        raise
    except BaseException as error:  # click would handle some of them itself
        _show_as_python(error)
        raise SystemExit(INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1) from None


def _show_as_python(error: BaseException) -> None:
    """Prints the traceback of an error of the script, without the frames of this module."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    sys.excepthook(type(error), error.with_traceback(frames), frames)


def _run_main(module: bool) -> None:
    """Runs the script, or the module, that `sys.argv` names."""
    # Python has put a directory in front, which the script does not need; but not with `python -P`.
    safe_path = bool(getattr(sys.flags, "safe_path", False))
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main)["__builtins__"] = builtins  # `exec` would put in its dictionary
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    path = os.path.abspath(sys.argv[0])
    if module:
        if not safe_path:
            sys.path[0] = os.getcwd()
        _run_as_main(sys.argv[0])
    elif pkgutil.get_importer(path) is not None:  # a directory or an archive with a __main__
        sys.path[: 0 if safe_path else 1] = [path]
        _run_as_main("__main__", alter_argv=False)
    else:
        try:
            with io.open_code(path) as opened:
                source = opened.read()
        except OSError as error:
            print(f"gdsload: can't open file {path!r}: {error.strerror}", file=sys.stderr)
            raise SystemExit(NOT_FOUND) from None
        if not safe_path:
            sys.path[0] = os.path.dirname(os.path.realpath(path))
        loader = SourceFileLoader("__main__", path)
        vars(main).update(__file__=path, __loader__=loader, __cached__=None)
        exec(compile(source, path, "exec", dont_inherit=True), vars(main))
