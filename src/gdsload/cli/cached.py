"""The command `cache`: what the local cache of files from object stores and peers holds."""

from __future__ import annotations

import os
import time

import click

from gdsload.checkpoint.file_io import open_error
from gdsload.cli import terminal
from gdsload.errors import one_line
from gdsload.remote.cache import LocalCache
from gdsload.report import count, size


@click.group(short_help="The local cache of remote files.")
@terminal.common
def cache() -> None:
    """Lists or removes files in the directory that loads from URLs were given as their cache_dir.

    Files in the hub's cache are not touched.
    """


def _cache_in(directory: str) -> LocalCache:
    try:
        os.scandir(directory).close()
    except OSError as error:
        raise open_error(error, directory) from error
    return LocalCache(directory)


@cache.command("list", short_help="List the cached files.")
@click.argument("directory", type=terminal.DIRECTORY)
@terminal.json_of
@terminal.common
def list_files(directory: str, as_json: bool) -> None:
    """Lists the cached files, those that were used last first."""
    found = sorted(_cache_in(directory).entries(), key=lambda each: -each.used)
    if as_json:
        return terminal.show_json([each._asdict() for each in found])
    for each in found:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.used))
        busy = ", in use" if each.busy else ""
        click.echo(
            f"{one_line(each.url) or '?'}: {size(each.cached_bytes)} of {size(each.size)},"
            f" used {used}{busy}"
        )
    click.echo(f"{count(len(found), 'file')}, {size(sum(each.cached_bytes for each in found))}")


@cache.command(short_help="Remove the cached files.")
@click.argument("directory", type=terminal.DIRECTORY)
@terminal.json_of
@terminal.common
def clear(directory: str, as_json: bool) -> None:
    """Removes all cached files that no process is reading."""
    removed = _cache_in(directory).clear()
    if as_json:
        return terminal.show_json([each._asdict() for each in removed])
    total = sum(each.cached_bytes for each in removed)
    click.echo(f"removed {count(len(removed), 'file')}, {size(total)}")
