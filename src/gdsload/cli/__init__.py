"""The command line, thin: it reads arguments, calls the library, and prints what comes back.

Errors of the library become one line on stderr and exit code 1, mistakes in the arguments exit
code 2. `main` is the group that commands are added to; torch is imported by `load` alone.
"""

from __future__ import annotations

import sys
from contextlib import suppress

import click

from gdsload.cli.headers import inspect, plan
from gdsload.cli.loading import load
from gdsload.cli.measuring import bench
from gdsload.cli.terminal import DEBUG, Commands, common, json_of, moved_bar, plain, show_json, size
from gdsload.cli.warming import warmup
from gdsload.synthetic.model_shapes import MODELS

__all__ = ["main"]


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="gdsload", prog_name="gdsload")
@common
@click.pass_context
def main(ctx: click.Context) -> None:
    """Loads model checkpoints from storage into VRAM or DRAM at the speed of the hardware.

    SOURCE is a .safetensors file, a directory, or a model in the local cache of the hub.
    """
    if ctx.invoked_subcommand != "run":
        for out in (sys.stdout, sys.stderr):  # a terminal that cannot show a name shows escapes
            with suppress(AttributeError, ValueError):
                out.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


@main.command(short_help="What this machine can do, and the hints.")
@click.argument("path", required=False, type=click.Path())
@json_of
@common
def doctor(path: str | None, as_json: bool) -> int:
    """What this machine can do for a load, each road with yes or no, the reason and the hint.

    PATH is a file or a directory on the storage to be looked at. The exit code is 0 where the best
    road to DRAM works, 1 where only slower ones do, 2 where none does.
    """
    from gdsload.doctor import examine

    diagnosis = examine(path)
    if as_json:
        show_json(diagnosis.to_dict())
    else:
        click.echo(diagnosis.summary())
    return diagnosis.exit_code


@main.command("make-checkpoint", short_help="Write a checkpoint with a real model's shapes.")
@click.argument("model", type=click.Choice(list(MODELS)))
@click.argument("directory", type=click.Path(file_okay=False))
@click.option("--layers", type=click.IntRange(1), help="Keep only so many decoder layers.")
@click.option("--seed", default=0, show_default=True, help="Other values for another seed.")
@common
def make_checkpoint(model: str, directory: str, layers: int | None, seed: int) -> None:
    """Writes a checkpoint with the names, shapes and shards of MODEL, and made-up values.

    A directory that holds this very checkpoint already is left as it is.
    """
    from gdsload.synthetic import checkpoints

    total = checkpoints.total_bytes(model, layers)
    if checkpoints.holds(directory, model, layers=layers, seed=seed):
        click.echo(f"{plain(directory)}: {model}, {size(total)}, is there already")
        return
    with moved_bar(model, total) as moved:
        written = checkpoints.write(model, directory, layers=layers, seed=seed, progress=moved)
    click.echo(f"{plain(str(written))}: {model}, {size(total)}")


@main.command(
    short_help="Run a script with gdsload in place.",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    options_metavar="",
)
@click.argument(
    "arguments",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
    metavar="[--model SOURCE [--device DEVICE]] (SCRIPT | -m MODULE) [ARGUMENT]...",
)
@click.pass_context
def run(ctx: click.Context, arguments: tuple[str, ...]) -> None:
    """Runs a Python script, with gdsload in place of transformers' own loading.

    With --model, or GDSLOAD_PREFETCH=SOURCE[@DEVICE] in the environment, the weights are on their
    way before the script imports anything; --tier pagecache only fills the page cache.
    """
    from gdsload.cli.run_script import run as run_script

    ctx.meta[DEBUG] = True  # the script's errors are its own
    ctx.find_root().close()  # and so is its logging
    run_script(arguments)


for _command in (inspect, plan, load, warmup, bench):
    main.add_command(_command)
