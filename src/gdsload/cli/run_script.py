"""Running somebody's script with gdsload in place: `python -m gdsload run script.py`.

The process is the script's from then on, and stays it: threads that go on, and what runs at exit,
find its ``__main__``, its arguments and gdsload. `activate` is for a sitecustomize: it installs
where the environment says GDSLOAD=1.
"""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import pkgutil
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from gdsload.integrations.transformers.model import install
from gdsload.warmup import from_words

USAGE = "usage: python -m gdsload run [--model source] (script.py | -m module) [argument ...]"
NOT_FOUND = 2  # the exit code of `python` for a script that it cannot open


def activate() -> bool:
    """Installs gdsload if GDSLOAD is "1"; GDSLOAD_BACKEND names a backend. Whether it did."""
    if os.environ.get("GDSLOAD") != "1":
        return False
    install(backend=os.environ.get("GDSLOAD_BACKEND", "auto"))
    return True


def run(arguments: Sequence[str]) -> None:
    """Runs a script, or a module after -m, as `python` would, with gdsload installed.

    ``--model SOURCE [--device DEVICE] [--tier TIER]`` in front of it, or GDSLOAD_PREFETCH in the
    environment, has the weights on their way before the script imports anything.

    Raises SystemExit with the usage where there is neither, or for what cannot be run, and whatever
    the script raises.
    """
    _, arguments = from_words(arguments)
    if not arguments or (arguments[0] == "-m" and len(arguments) < 2):
        raise SystemExit(USAGE)
    install(backend=os.environ.get("GDSLOAD_BACKEND", "auto"))
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        _run_module(arguments[1])
    else:
        sys.argv = list(arguments)
        _run_path(arguments[0])


def _run_path(path: str) -> None:
    file = os.path.abspath(path)
    importer: Any = pkgutil.get_importer(path)
    if importer is not None:  # a directory, or an archive, with a __main__
        sys.path[0] = file
        _run_spec(importer.find_spec("__main__"), path)
        return
    try:
        with io.open_code(file) as opened:
            source = opened.read()
    except OSError as error:
        print(f"gdsload: can't open file {file!r}: {error.strerror}", file=sys.stderr)
        raise SystemExit(NOT_FOUND) from None
    sys.path[0] = os.path.dirname(os.path.realpath(file))
    code = compile(source, file, "exec", dont_inherit=True)
    _execute(code, file, None, SourceFileLoader("__main__", file))


def _run_module(name: str) -> None:
    sys.path[0] = os.getcwd()
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ImportError as error:  # of a package that it is in
        raise SystemExit(f"gdsload: cannot find module {name}: {error}") from error
    if spec is not None:
        sys.argv[0] = spec.origin or name
    _run_spec(spec, name)


def _run_spec(spec: ModuleSpec | None, name: str) -> None:
    get_code = getattr(spec and spec.loader, "get_code", None)
    code = None if spec is None or get_code is None else get_code(spec.name)
    if spec is None or code is None:
        raise SystemExit(f"gdsload: nothing of {name} can be run")
    _execute(code, spec.origin, spec, spec.loader)


def _execute(code: CodeType, file: str | None, spec: ModuleSpec | None, loader: Any) -> None:
    """Runs it as the process's main module, which it stays: `runpy` would take it away again."""
    main = ModuleType("__main__")
    vars(main).update(
        __builtins__=builtins, __spec__=spec, __package__=None if spec is None else spec.parent,
        __file__=file, __cached__=None if spec is None else spec.cached, __loader__=loader,
    )  # fmt: skip
    sys.modules["__main__"] = main
    exec(code, vars(main))
