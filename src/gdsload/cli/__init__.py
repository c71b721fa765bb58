"""The command line: reads arguments, calls the library, prints the results.

Errors of the library become one line on stderr and exit code 1, wrong arguments exit code 2. Only
`load` and `serve` import torch.
"""

from __future__ import annotations

import sys
from contextlib import suppress

import click

from gdsload.checkpoint.file_io import open_error
from gdsload.cli.cached import cache
from gdsload.cli.headers import inspect, plan
from gdsload.cli.integrity import manifest, verify
from gdsload.cli.loading import load
from gdsload.cli.measuring import bench
from gdsload.cli.serving import serve
from gdsload.cli.terminal import (
    DIRECTORY,
    LOCAL_PATH,
    VERBOSE,
    Commands,
    common,
    json_of,
    show_json,
)
from gdsload.cli.warming import warmup
from gdsload.errors import CheckpointError, one_line
from gdsload.report import size
from gdsload.synthetic.model_shapes import MODELS
from gdsload.system.progress_bar import progress_bar, stderr_is_terminal

__all__ = ["main"]


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="gdsload", prog_name="gdsload")
@common
@click.pass_context
def main(ctx: click.Context) -> None:
    """Loads model checkpoints from storage into VRAM or DRAM at the speed of the hardware.

    SOURCE is a .safetensors file, a directory, a model in the local cache of the hub, or a URL: of
    an object store (s3://, gs://, az://, https://) or of a process that serves it (nixl://).
    """
    if ctx.invoked_subcommand != "run":
        for out in (sys.stdout, sys.stderr):  # names may have characters that the terminal lacks
            with suppress(AttributeError, ValueError):
                out.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


@main.command(short_help="What works on this machine, and what would help.")
@click.argument("path", required=False, type=LOCAL_PATH)
@json_of
@common
def doctor(path: str | None, as_json: bool) -> int:
    """Checks every I/O path of this machine: yes, partly or no, with the reason and a hint.

    PATH is a file or a directory on the storage to check. The exit code is 0 if the default path to
    DRAM works (engine threads and direct I/O), 1 if only slower ones work, 2 if none works.
    """
    from gdsload.doctor import examine

    try:
        diagnosis = examine(path)
    except OSError as error:
        if path is None or error.filename != path:
            raise
        raise open_error(error, path) from error
    if as_json:
        show_json(diagnosis.to_dict())
    else:
        click.echo(diagnosis.summary())
    return diagnosis.exit_code


@main.command("make-checkpoint", short_help="Write a checkpoint with a real model's shapes.")
@click.argument("model", type=click.Choice(list(MODELS)))
@click.argument("directory", type=DIRECTORY)
@click.option("--layers", type=click.IntRange(1), help="Number of decoder layers, if fewer.")
@click.option("--seed", default=0, show_default=True, help="Seed of the values.")
@json_of
@common
def make_checkpoint(
    model: str, directory: str, layers: int | None, seed: int, as_json: bool
) -> None:
    """Writes a checkpoint with the names, shapes and shards of MODEL, and random values.

    A directory that already holds this checkpoint is not changed.
    """
    from gdsload.synthetic import checkpoints

    try:
        total = checkpoints.total_bytes(model, layers)
    except CheckpointError as error:  # it has fewer layers
        raise click.UsageError(str(error)) from error
    found = checkpoints.holds(directory, model, layers=layers, seed=seed)
    if not found:
        with progress_bar(stderr_is_terminal(), total, title=model) as advance:
            try:
                checkpoints.write(model, directory, layers=layers, seed=seed, progress=advance)
            except CheckpointError:  # another process may have been faster
                found = checkpoints.holds(directory, model, layers=layers, seed=seed)
                if not found:
                    raise
    if as_json:
        show_json({"directory": directory, "model": model, "bytes": total, "written": not found})
    else:
        there = ", is there already" if found else ""
        click.echo(f"{one_line(directory)}: {model}, {size(total)}{there}")


@main.command(
    short_help="Run a script that loads by gdsload.",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(ctx: click.Context, arguments: tuple[str, ...]) -> None:
    """Runs a Python script that loads its transformers models by gdsload."""
    from gdsload.cli.run_script import run as run_script

    if not ctx.meta.get(VERBOSE):
        ctx.find_root().close()  # the logging of the script is not ours
    run_script(arguments)


for _command in (inspect, plan, load, manifest, verify, warmup, serve, cache, bench):
    main.add_command(_command)
