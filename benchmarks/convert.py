"""Writes a checkpoint in an arm's own format, in that arm's environment: KIND SOURCE TARGET."""

from __future__ import annotations

import sys
from pathlib import Path

from .arms import KINDS


def main() -> None:
    kind, source, target = sys.argv[-3:]
    convert = KINDS[kind].convert
    if convert is None:
        raise SystemExit(f"{kind} reads safetensors as it is")
    convert(Path(source), Path(target))


if __name__ == "__main__":
    main()
