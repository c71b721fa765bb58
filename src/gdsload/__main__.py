"""`python -m gdsload`: the command line. `run` skips click, so that the script starts sooner."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command that the arguments name."""
    if sys.argv[1:2] == ["run"] and sys.argv[2:3] not in (["-h"], ["--help"]):
        from gdsload.cli.run_script import run

        return run(sys.argv[2:])
    from gdsload.cli import main as command_line

    command_line(prog_name="gdsload")


if __name__ == "__main__":
    main()
