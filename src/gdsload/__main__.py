"""`python -m gdsload`: the command line."""

from gdsload.cli import main

if __name__ == "__main__":
    main(prog_name="gdsload")
