"""C sources of the tests, compiled once in a process."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

_FLAGS = ("-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread")


def compiler() -> str:
    """The C compiler. Skips the test if there is none."""
    found = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if found is None:
        pytest.skip("no C compiler: neither $CC, cc nor gcc is on the path")
    return found


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not a forked child
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def compiled(source: Path, *flags: str) -> Path:
    """The library of a source; it stays as long as the process."""
    folder = Path(tempfile.mkdtemp(prefix="gdsload-compiled-"))
    atexit.register(_remove, folder, os.getpid())
    built = folder / f"lib{source.stem}.so"
    command = [compiler(), *_FLAGS, *flags, str(source), "-o", str(built)]
    subprocess.run(command, check=True)
    return built
