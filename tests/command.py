"""Runs the command line, in this process or in a new one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from gdsload.cli import main

PATIENCE_SECONDS = 240
EMBEDDING = "model.embed_tokens.weight"


def run(*words: str | Path) -> Result:
    """Runs a command in this process. Raises what the command does not handle."""
    return CliRunner().invoke(
        main, [str(word) for word in words], catch_exceptions=False, prog_name="gdsload"
    )


def answer(*words: str | Path) -> Any:
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def process(code: str, *words: str | Path, **how: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, words)]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | how
    return subprocess.run(command, text=True, timeout=PATIENCE_SECONDS, check=False, **how)
