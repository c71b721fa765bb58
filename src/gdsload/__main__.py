"""`python -m gdsload`: the command line, and `run` for scripts that shall load by gdsload."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command that the arguments name."""
    if sys.argv[1:2] == ["run"]:
        from gdsload.cli.run_script import run

        run(sys.argv[2:])
        return
    from gdsload.cli import main as command_line

    command_line(prog_name="gdsload")


if __name__ == "__main__":
    main()
