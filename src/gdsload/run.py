"""Running somebody's script with gdsload in place: `python -m gdsload run script.py`.

`activate` is for a sitecustomize: it installs where the environment says GDSLOAD=1.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from gdsload.model import install, uninstall

USAGE = "usage: python -m gdsload run (script.py | -m module) [argument ...]"


def activate() -> bool:
    """Installs gdsload if GDSLOAD is "1"; GDSLOAD_BACKEND names a backend. Whether it did."""
    if os.environ.get("GDSLOAD") != "1":
        return False
    install(backend=os.environ.get("GDSLOAD_BACKEND", "auto"))
    return True


def run(arguments: Sequence[str]) -> None:
    """Runs a script, or a module after -m, as `python` would, with gdsload installed.

    Raises SystemExit with the usage where there is neither, and whatever the script raises.
    """
    if not arguments or (arguments[0] == "-m" and len(arguments) < 2):
        raise SystemExit(USAGE)
    before = sys.argv, list(sys.path)
    install(backend=os.environ.get("GDSLOAD_BACKEND", "auto"))
    try:
        if arguments[0] == "-m":
            sys.argv = list(arguments[1:])
            sys.path[0] = os.getcwd()
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(arguments)
            sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        uninstall()
        sys.argv, sys.path[:] = before
