"""The command `warmup`: fills the page cache before somebody else reads, and proves that it did.

For init containers, snapshot builds and scripts; torch is not imported.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import click

from gdsload.cli.terminal import (
    Bytes,
    common,
    given,
    json_of,
    opened,
    plain,
    show_json,
    size,
    source_of,
)

COLD = 3  # the exit code where the page cache kept less than was read
_LOOK_SECONDS = 0.05


@click.command()
@source_of
@click.option(
    "--tier",
    type=click.Choice(["pagecache"]),
    default="pagecache",
    show_default=True,
    help="Where the bytes shall be: what one process has in its own memory dies with it.",
)
@click.option(
    "--limit",
    type=Bytes(),
    default="0",
    metavar="BYTES",
    help="At most so many bytes (64M, 8G); 0: what memory is available.",
)
@click.option("--wait", is_flag=True, help="Wait for all of it; else another process goes on.")
@json_of
@common
def warmup(source: str, tier: str, limit: int, wait: bool, as_json: bool, **where: Any) -> int:
    """Reads a checkpoint into the page cache, where every process finds it.

    With --wait the exit code is 0 where the page cache holds what was wanted, 3 where it kept less
    (memory is short, or its cgroup small), 1 where something failed. Without it another process
    goes on reading, and only a source that cannot be opened is noticed here.
    """
    from gdsload.readahead.prefetch import prefetch

    if not wait:
        with opened(source, where):
            pid = go_on(source, tier, limit, where)
        if as_json:
            show_json({"source": source, "tier": tier, "pid": pid})
            return 0
        click.echo(f"{plain(source)}: process {pid} reads it into the page cache")
        return 0
    with prefetch(source, tier=tier, limit_bytes=limit or None, **given(where)) as ahead:
        while not ahead.wait(_LOOK_SECONDS):
            pass
        progress = ahead.progress()
    if as_json:
        show_json({"source": source, "tier": tier} | progress._asdict())
    else:
        click.echo(
            f"{plain(source)}: {size(progress.resident_bytes)} of {size(progress.wanted_bytes)} in"
            f" the page cache after {progress.seconds:.2f} s"
        )
    return 0 if progress.resident_bytes >= progress.wanted_bytes else COLD


def go_on(source: str, tier: str, limit: int, where: dict[str, Any]) -> int:
    """Starts a process of its own that warms up and waits; returns its number."""
    words = ["warmup", source, "--tier", tier, "--limit", str(limit), "--wait"]
    for name, value in given(where).items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    null = subprocess.DEVNULL
    process = subprocess.Popen(
        [sys.executable, "-c", "from gdsload.cli import main; main()", *words],
        start_new_session=True, stdin=null, stdout=null, stderr=null,
    )  # fmt: skip
    process.returncode = 0  # nobody here will wait for it
    return process.pid
