"""C sources of the tests, compiled once in a run: its processes inherit the libraries."""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import pytest

_FOLDER = "GDSLOAD_TESTS_COMPILED"
_FLAGS = ("-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread")


def compiler() -> str:
    """The C compiler. Skips the test if there is none."""
    found = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if found is None:
        pytest.skip("no C compiler: neither $CC, cc nor gcc is on the path")
    return found


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:  # not a forked child
        shutil.rmtree(folder, ignore_errors=True)


def folder() -> Path:
    """Where the libraries are. The first process of a run makes it and removes it at its end."""
    if _FOLDER not in os.environ:
        os.environ[_FOLDER] = tempfile.mkdtemp(prefix="gdsload-compiled-")
        atexit.register(_remove, os.environ[_FOLDER], os.getpid())
    return Path(os.environ[_FOLDER])


def cython_module(source: Path, folder: Path) -> Any:
    """A module of the tests, compiled in a folder against the declarations of the native ones."""
    main = pytest.importorskip("Cython.Compiler.Main")
    made, built = folder / f"{source.stem}.c", folder / f"{source.stem}.so"
    native = Path(__file__).parents[1] / "src"
    settings = {"include_path": [str(native)], "output_file": str(made)}
    assert not main.compile(str(source), **settings).num_errors
    folders = [f"-I{sysconfig.get_path('include')}", f"-I{native / 'gdsload/_native'}"]
    command = [compiler(), "-shared", "-fPIC", "-w", "-pthread", *folders, str(made)]
    ran = subprocess.run([*command, "-o", str(built)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    spec = importlib.util.spec_from_file_location(source.stem, built)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def compiled(source: Path, *flags: str) -> Path:
    """The library of a source."""
    command = [compiler(), *_FLAGS, *flags, str(source)]
    built = folder() / hashlib.sha256(repr(command).encode()).hexdigest() / f"lib{source.stem}.so"
    if not built.exists():
        built.parent.mkdir(exist_ok=True)
        partial = built.with_suffix(f".{os.getpid()}")  # others may compile it at the same time
        subprocess.run([*command, "-o", str(partial)], check=True)
        partial.rename(built)
    return built
