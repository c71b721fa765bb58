"""The command `bench`: finds the benchmarks and passes the arguments on.

The benchmarks are not part of the library: a wheel has them as `gdsload.benchmarks`, a checkout in
`benchmarks/` at its top. Not responsible for measuring.
"""

from __future__ import annotations

import importlib
import importlib.util
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import click

from gdsload.errors import GdsloadError

PACKAGE = "gdsload.benchmarks"
TERMINATED = 143  # 128 + SIGTERM: what a shell makes of it
COMMANDS = {
    "cold": ("cold", "Load a checkpoint cold, or warm, beside other loaders."),
    "io": ("sweep", "Sweep block sizes, batches and engines over a file."),
    "compare": ("compare", "Beside the Hugging Face loader, as the mini-gds study did."),
    "start": ("start", "Process start to a ready model, by phase."),
    "scale": ("scale", "Cost against tensors, bytes, shards and loads; plans of large models."),
    "engines": ("engines", "Each backend and engine, by request size and reads in flight."),
    "tune": ("tune", "Find the settings that each arm is fastest with here."),
    "report": ("render", "Tables and pictures of results that were kept."),
    "deps": ("deps", "Install the other loaders, in environments of their own."),
}


@click.group(short_help="Measure loads, with proof that they were what they say.")
def bench() -> None:
    """Benchmarks that refuse to print what does not add up.

    Each command has a --help of its own. Results are kept as JSON, with the machine described: in
    benchmarks/results of a checkout, elsewhere in ./gdsload-bench.
    """


def program(name: str) -> ModuleType:
    """A module of the benchmarks. Raises GdsloadError where they are not installed."""
    if PACKAGE not in sys.modules and importlib.util.find_spec(PACKAGE) is None:
        _adopt(Path(__file__).resolve().parents[3] / "benchmarks")
    return importlib.import_module(f"{PACKAGE}.{name}")


def _adopt(directory: Path) -> None:
    """Makes a checkout's directory the package that a wheel would have brought."""
    spec = importlib.util.spec_from_file_location(
        PACKAGE, directory / "__init__.py", submodule_search_locations=[str(directory)]
    )
    if spec is None or not (directory / "places.py").is_file():
        raise GdsloadError(
            "the benchmarks are not here: neither does this installation have gdsload.benchmarks,"
            f" nor is there a checkout's {directory}; install gdsload[bench] from a wheel or an"
            " sdist, or run from a checkout"
        )
    sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)


@contextmanager
def ended_in_order() -> Iterator[None]:
    """SIGTERM ends what is measured as Ctrl-C does: its processes end, its files are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        sys.exit(TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _command(name: str, module: str, what: str) -> click.Command:
    def run(words: tuple[str, ...]) -> int:
        main = program(module).main
        before = sys.argv
        sys.argv = [f"gdsload bench {name}", *words]  # where each of them finds its words
        try:
            with ended_in_order():
                return int(main() or 0)
        finally:
            sys.argv = before

    return click.Command(
        name,
        callback=run,
        params=[click.Argument(["words"], nargs=-1, type=click.UNPROCESSED)],
        short_help=what,
        help=what,
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
    )


for _name, (_module, _what) in COMMANDS.items():
    bench.add_command(_command(_name, _module, _what))
