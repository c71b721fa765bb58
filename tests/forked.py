"""Processes that are forked from one that has imported torch, which takes seconds in each."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory
from textwrap import dedent
from types import ModuleType
from typing import NoReturn

PATIENCE_SECONDS = 240
_server = get_context("forkserver")
_server.set_forkserver_preload(["torch", "safetensors.torch"])


def fork() -> int:
    """As os.fork. What there is now is not for the collector, which would walk through all of torch
    when a child ends."""
    gc.freeze()
    return os.fork()


def end_with(main: Callable[[], object]) -> NoReturn:
    """Runs `main` in a forked child and ends it as an interpreter ends, with its exit handlers: not
    through the frames of the parent, whose `finally` clauses are not the child's."""
    status = 0
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, int):
            status = end.code
        elif end.code is not None:
            print(end.code, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    ctypes.pythonapi.Py_Exit(status)
    raise AssertionError("Py_Exit returned")


def run(program: str, *words: object) -> CompletedProcess[str]:
    """As `python -c`, in a process that is forked from one of this process of pytest, which has
    imported torch and no gdsload."""
    code, texts = dedent(program), [str(word) for word in words]
    with TemporaryDirectory() as folder:
        child = _server.Process(target=_main, args=(code, texts, dict(os.environ), folder))
        child.start()
        child.join(PATIENCE_SECONDS)
        if child.exitcode is None:
            child.kill()
            child.join()
        assert child.exitcode is not None
        output, errors = ((Path(folder) / name).read_text() for name in _OUTPUTS)
        return CompletedProcess([code, *texts], child.exitcode, output, errors)


_OUTPUTS = ("output", "errors")


def _main(code: str, words: list[str], environment: dict[str, str], folder: str) -> None:
    gc.freeze()
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, name in enumerate(_OUTPUTS, start=1):
        with open(os.path.join(folder, name), "wb") as file:
            os.dup2(file.fileno(), descriptor)
    faulthandler.enable()
    sys.argv = ["-c", *words]
    main = sys.modules["__main__"] = ModuleType("__main__")
    end_with(lambda: exec(compile(code, "<string>", "exec"), main.__dict__))
