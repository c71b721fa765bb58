"""Installs the other loaders: `gdsload bench deps`, or `make bench-deps`. deps.sh does the work."""

from __future__ import annotations

import argparse
import subprocess
import sys

from . import places


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="gdsload bench deps", description=(__doc__ or "").partition("\n")[0]
    )
    parser.parse_args(words)
    script = places.PACKAGE / "deps.sh"
    return subprocess.run(["sh", script, places.CACHE, sys.executable], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
