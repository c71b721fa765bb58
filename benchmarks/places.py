"""The directories of the benchmarks, and how their modules run in other environments.

in a checkout    results in benchmarks/results, build output in .cache/bench
in a wheel       results in ./gdsload-bench, build output in the user's cache directory
"""

from __future__ import annotations

import compileall
import os
import sys
from functools import cache
from pathlib import Path

from .loaded import OURS

PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parent
CHECKOUT = (ROOT / "benchmarks/places.py").exists() and (ROOT / "pyproject.toml").exists()


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gdsload/bench"


RESULTS = PACKAGE / "results" if CHECKOUT else Path("gdsload-bench").absolute()
CACHE = ROOT / ".cache/bench" if CHECKOUT else _user_cache()
BARE = CACHE / "bare.so"

# Runs a module of this package by itself: in a peer's environment there is no gdsload to find it
# in, and its directory on the path would hide modules of others behind ours.
_BOOT = """
import importlib.util, runpy, sys
where, name = sys.argv[1:3]
sys.argv[1:3] = []
spec = importlib.util.spec_from_file_location(
    "benchmarks", where + "/__init__.py", submodule_search_locations=[where])
sys.modules["benchmarks"] = importlib.util.module_from_spec(spec)
runpy.run_module("benchmarks." + name, run_name="__main__")
"""


def python_of(environment: str) -> Path:
    """The interpreter of an environment: this one for OURS, else one that deps.sh may have made."""
    return Path(sys.executable) if environment == OURS else CACHE / environment / "bin/python"


def command(python: Path | str, module: str) -> list[str]:
    """The command that runs a module of this package with any interpreter."""
    return [str(python), "-c", _BOOT, str(PACKAGE), module]


def environment(**more: str) -> dict[str, str]:
    """Environment variables without those that change the imports of Python."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**kept, "HF_HUB_OFFLINE": "1", **more}


def own_environment(**more: str) -> dict[str, str]:
    """The same for a process that imports the gdsload of this process, compiled as an installation
    has it."""
    import gdsload

    package = Path(gdsload.__file__).resolve().parent
    _compile(package)
    return environment(PYTHONPATH=str(package.parent), **more)


def environment_of(python: Path, **more: str) -> dict[str, str]:
    """The same for a process of this interpreter: that of a peer's environment has no gdsload."""
    ours = python == python_of(OURS)
    return own_environment(**more) if ours else environment(**more)


@cache
def _compile(package: Path) -> None:
    compileall.compile_dir(package, quiet=2)
