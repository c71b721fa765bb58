"""Installs the other loaders: `gdsload bench deps`, or `make bench-deps`. deps.sh does the work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from . import places, records


def main(words: list[str] | None = None) -> int:
    parser = records.parser_of("gdsload bench deps", __doc__)
    parser.add_argument(
        "--wheels",
        type=Path,
        metavar="DIR",
        help="install from this directory, without the network; use the packages of this Python"
        " environment for the rest",
    )
    options = parser.parse_args(words)
    if options.wheels and not options.wheels.is_dir():
        # Said before what is installed is removed for it.
        parser.error(f"--wheels {options.wheels}: there is no such directory")
    command = ["sh", places.PACKAGE / "deps.sh", places.CACHE, sys.executable]
    if options.wheels:
        command.append(options.wheels.absolute())
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
