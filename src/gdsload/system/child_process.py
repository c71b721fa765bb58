"""Command lines of child processes that run a Python text. Not responsible for starting them."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def python_command(program: str, *words: str) -> list[str]:
    """The command that runs `program` with the module search path of this process.

    `python -c` puts the current directory in front of it: a json.py there would be imported.
    """
    entries: Sequence[object] = sys.path
    # Only those that importlib takes: some programs add a pathlib.Path.
    path = [entry for entry in entries if isinstance(entry, str)]
    return [sys.executable, "-c", f"import sys\nsys.path[:] = {path!r}\n{program}", *words]
