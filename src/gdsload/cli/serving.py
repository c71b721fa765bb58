"""The command `serve`: shows a checkpoint in this machine's memory to readers on other machines."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from contextlib import suppress
from typing import Any

import click

from gdsload.cli import terminal
from gdsload.errors import one_line
from gdsload.remote.peer import DEFAULT_PORT
from gdsload.report import count, size
from gdsload.system import lifecycle


def _parameters(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    pairs = [value.partition("=") for value in values]
    if any(not (name and equals) for name, equals, _ in pairs):
        raise click.BadParameter("give NAME=VALUE", ctx, param)
    return {name: value for name, _, value in pairs}


@click.command(short_help="Let other machines load a checkpoint from memory here.")
@click.argument("source", type=terminal.PATH)
@click.option("--name", default="model", show_default=True, help="The name in the URL.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=DEFAULT_PORT,
    show_default=True,
    help="The port; 0: any.",
)
@click.option(
    "--nixl-backend",
    type=click.Choice(["UCX", "LIBFABRIC"]),
    default="UCX",
    show_default=True,
    help="The backend of NIXL.",
)
@click.option(
    "--nixl-parameter",
    "nixl_parameters",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_parameters,
    help="A parameter of that backend; may be repeated.",
)
@click.option(
    "--no-checksums",
    is_flag=True,
    help="Serve without a manifest, when all bytes have arrived.",
)
@terminal.json_of
@terminal.common
def serve(source: str, no_checksums: bool, as_json: bool, **options: Any) -> None:
    """Loads SOURCE into memory, and serves it by NIXL until SIGINT or SIGTERM.

    SOURCE is a path or a URL. If it has a manifest, as peers have one, it is served while it is
    still loaded. Others load it as nixl://HOST:PORT/NAME. Every client that reaches the port can
    read the weights: listen in trusted networks only.
    """
    from gdsload.peers.server import serve as serve_weights

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    _allow_all_descriptors()
    code = 1  # of an error
    lifecycle.at_exit(lifecycle.PROCESS, lambda: _leave(code))
    try:
        with (
            suppress(KeyboardInterrupt),
            serve_weights(source, checksums=not no_checksums, **options) as server,
        ):
            status = server.status()
            if as_json:
                terminal.show_json(status._asdict())
            else:
                facts = (
                    count(status.tensors, "tensor"),
                    size(status.nbytes),
                    f"version {status.version}",
                )
                click.echo(f"{one_line(status.url)}: {', '.join(facts)}")
            server.wait()
            while True:
                time.sleep(3600)
    except BrokenPipeError:
        code = terminal.PIPE_CLOSED
        raise
    code = 0


def _allow_all_descriptors() -> None:
    """Each reader has a connection for each of its threads, 16 to 64: the usual soft limit of 1024
    descriptors would be reached by some tens of readers."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _leave(code: int) -> None:
    """Ends the process without the exit handlers of libraries: NIXL has libnl of its own, which
    crashes there if the system's is loaded too, as Debian's ibverbs-providers does."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(code)
