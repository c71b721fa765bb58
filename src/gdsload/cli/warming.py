"""The command `warmup`: fills the page cache before another process reads, and checks it.

For init containers, snapshot builds and scripts; torch is not imported.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

import click

from gdsload.checkpoint import Checkpoint
from gdsload.cli import terminal
from gdsload.errors import one_line
from gdsload.remote.urls import is_url
from gdsload.report import size
from gdsload.system.cancellation import WAKE_SECONDS
from gdsload.system.child_process import python_command
from gdsload.system.progress_bar import progress_bar

if TYPE_CHECKING:
    from gdsload.readahead.prefetch import Prefetch

COLD = 3  # the exit code if the page cache holds less than is wanted


@click.command(short_help="Read a checkpoint into the page cache.")
@terminal.source_of
@click.option(
    "--tier",
    type=click.Choice(["pagecache"]),
    default="pagecache",
    show_default=True,
    help="The kind of memory. Other tiers end with the process.",
)
@terminal.bytes_option("--limit", "Bytes to read at most (64M, 8G); 0: the available memory.")
@click.option("--wait", is_flag=True, help="Wait for the end. Else a background process reads.")
@terminal.json_of
@terminal.common
def warmup(source: str, tier: str, limit: int, wait: bool, as_json: bool, **where: Any) -> int:
    """Reads a checkpoint into the page cache, for all processes.

    With --wait the exit code is 0 if the page cache holds all wanted bytes, 3 if it holds less
    (memory is short, or the limit of the cgroup), 1 if the reads failed. Without --wait a
    background process reads, and only a source that cannot be opened is reported.
    """
    from gdsload.readahead.prefetch import prefetch

    if is_url(source):
        raise click.UsageError(
            "SOURCE is a URL: the page cache is for files, and those of a local cache are"
            " complete after `gdsload load SOURCE --cache-dir DIR`"
        )
    if not wait:
        with Checkpoint.open(source, strict=False, **where):
            pid = in_background(source, tier, limit, where)
        if as_json:
            terminal.show_json({"source": source, "tier": tier, "pid": pid})
        else:
            click.echo(f"{one_line(source)}: process {pid} reads it into the page cache")
        return 0
    # Not strict: transformers loads a tensor that is in two shards, and only the bytes count here.
    limit_bytes = limit or None
    with prefetch(source, tier=tier, limit_bytes=limit_bytes, strict=False, **where) as ahead:
        wait_with_bar(ahead)
        progress = ahead.progress()
    if as_json:
        terminal.show_json({"source": source, "tier": tier} | progress._asdict())
    else:
        click.echo(
            f"{one_line(source)}: {size(progress.resident_bytes)} of"
            f" {size(progress.wanted_bytes)} in the page cache after {progress.seconds:.2f} s"
        )
    return 0 if progress.resident_bytes >= progress.wanted_bytes else COLD


def wait_with_bar(ahead: Prefetch) -> None:
    """Waits for a prefetch, with a progress bar if stderr is a terminal. Raises as `wait`."""
    total_bytes = shown_bytes = 0
    while not (ended := ahead.wait(WAKE_SECONDS)) and not total_bytes:
        total_bytes = ahead.progress().wanted_bytes  # 0 while it opens the files
    with progress_bar(None, total_bytes) as advance:
        while not ended:
            landed_bytes = ahead.progress().landed_bytes
            advance(landed_bytes - shown_bytes)
            shown_bytes = landed_bytes
            ended = ahead.wait(WAKE_SECONDS)


def in_background(source: str, tier: str, limit: int, where: dict[str, Any]) -> int:
    """Starts a background process that runs `warmup --wait`; returns its process id."""
    words = ["warmup", "--tier", tier, "--limit", str(limit), "--wait"]
    for name, value in where.items():
        words += [f"--{name.replace('_', '-')}={value}"] if value else []
    words += ["--", source]
    program = python_command("from gdsload.cli import main; main()", *words)
    files: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    process: subprocess.Popen[bytes] = subprocess.Popen(program, start_new_session=True, **files)
    process.returncode = 0  # not waited for: without this, Popen warns
    return process.pid
