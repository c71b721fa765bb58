"""The command `bench`: finds the benchmarks and passes the arguments on.

The benchmarks are not part of the library: a wheel has them as `gdsload.benchmarks`, a checkout in
`benchmarks/` at its top. Not responsible for measuring.
"""

from __future__ import annotations

import importlib
import importlib.util
import signal
import sys
from pathlib import Path
from types import ModuleType

import click

from gdsload.errors import GdsloadError

PACKAGE = "gdsload.benchmarks"
TERMINATED = 143  # 128 + SIGTERM, as in a shell
COMMANDS = {
    "cold": ("cold", "Load a checkpoint cold, or warm, with gdsload and other loaders."),
    "io": ("sweep", "Sweep block sizes, batches and engines over a file."),
    "compare": ("compare", "Compare with the Hugging Face loader, as in the mini-gds study."),
    "start": ("start", "Time from process start to a ready model, by phase."),
    "scale": ("scale", "Cost against tensors, bytes, shards and loads; plans of large models."),
    "engines": ("engines", "Each backend and engine, by request size and reads in flight."),
    "tune": ("tune", "Find the fastest settings of other loaders on this machine."),
    "report": ("render", "Tables and pictures of stored results."),
    "deps": ("deps", "Install the other loaders, in environments of their own."),
}


@click.group(short_help="Measure loads, and validate the measurements.")
def bench() -> None:
    """Benchmarks that print no invalid result.

    Each command has a --help. Results are stored as JSON with a description of the machine: in
    benchmarks/results of a checkout, elsewhere in ./gdsload-bench.
    """


def program(name: str) -> ModuleType:
    """A module of the benchmarks. Raises GdsloadError if they are not installed."""
    if PACKAGE not in sys.modules and importlib.util.find_spec(PACKAGE) is None:
        # A checkout's directory becomes the package that a wheel has.
        directory = Path(__file__).resolve().parents[3] / "benchmarks"
        spec = importlib.util.spec_from_file_location(
            PACKAGE, directory / "__init__.py", submodule_search_locations=[str(directory)]
        )
        if spec is None or not (directory / "places.py").is_file():
            raise GdsloadError(
                f"no benchmarks in this installation (gdsload.benchmarks) or in {directory}:"
                " install gdsload with its extra 'bench', or run from a checkout"
            )
        sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{PACKAGE}.{name}")


def _command(name: str, module: str, help_line: str) -> click.Command:
    def run(words: tuple[str, ...]) -> int:
        main = program(module).main
        arguments, sys.argv = sys.argv, [f"gdsload bench {name}", *words]
        # As with Ctrl-C, the benchmark ends its processes and removes its files.
        handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
        try:
            return int(main() or 0)
        finally:
            signal.signal(signal.SIGTERM, handler)
            sys.argv = arguments

    return click.Command(
        name,
        callback=run,
        params=[click.Argument(["words"], nargs=-1, type=click.UNPROCESSED)],
        short_help=help_line,
        help=help_line,
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
    )


for _name, (_module, _help_line) in COMMANDS.items():
    bench.add_command(_command(_name, _module, _help_line))
