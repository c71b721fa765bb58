"""A process with `gdsload serve`, for benchmarks and tests of peers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .children import limited
from .records import Refused


@contextmanager
def serving(
    source: str | Path, *, stderr: int | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that serves a path or a URL, and the URL at which it does. It is killed at the end.

    Args:
        source: What is served.
        stderr: As for `subprocess.Popen`.

    Raises:
        Refused: It ended before it served, or takes too long.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "gdsload", "serve", str(source), "--json", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**os.environ, "NIXL_LOG_LEVEL": "ERROR"},
    )
    try:
        assert process.stdout is not None
        lines: list[str] = []
        with limited(process, "the server"):
            while lines[-1:] != ["}\n"]:
                line = process.stdout.readline()
                if not line:
                    raise Refused("the server ended")
                # Libraries may print lines before.
                lines = [line] if line == "{\n" else [*lines, line]
        yield process, json.loads("".join(lines))["url"]
    finally:
        process.kill()
        process.communicate()
