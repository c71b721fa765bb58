"""The commands `inspect` and `plan`, which read headers only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from gdsload.api import plan as plan_reads
from gdsload.checkpoint import Checkpoint
from gdsload.cli import terminal
from gdsload.errors import one_line
from gdsload.remote.urls import shown_source
from gdsload.report import count, size


@click.command(short_help="What is in a checkpoint.")
@terminal.source_of
@click.option("--tensors", "listed", is_flag=True, help="List the tensors, in file order.")
@terminal.json_of
@terminal.common
def inspect(source: str, listed: bool, as_json: bool, **where: Any) -> None:
    """Prints files, sizes, tensors, dtypes and metadata of a checkpoint. Reads headers only."""
    with Checkpoint.open(source, **where) as checkpoint:
        facts = facts_of(checkpoint, listed)
    if as_json:
        return terminal.show_json(facts)
    click.echo(
        f"{one_line(facts['source'])}: {count(len(facts['files']), 'file')},"
        f" {count(facts['tensor_count'], 'tensor')}, {size(facts['total_bytes'])}"
    )
    entries = [(file["name"], file) for file in facts["files"]] + list(facts["dtypes"].items())
    terminal.show_table(
        (name, size(entry["bytes"]), count(entry["tensors"], "tensor")) for name, entry in entries
    )
    for key, value in facts["metadata"].items():
        click.echo(f"metadata {one_line(key)}: {one_line(value)}")
    if listed:
        click.echo()
        terminal.show_table(
            (name, info["dtype"], str(info["shape"]), size(info["bytes"]), info["file"])
            for name, info in facts["tensors"].items()
        )


def facts_of(checkpoint: Checkpoint, listed: bool) -> dict[str, Any]:
    """The output of `inspect --json`; sizes and offsets in bytes."""
    dtypes: dict[str, dict[str, int]] = {}
    counts = [0] * len(checkpoint.shards)
    for info in checkpoint.tensors.values():
        entry = dtypes.setdefault(info.dtype, {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += info.nbytes
        counts[info.shard] += 1
    files = [
        {"name": shard.name, "path": shard.path, "bytes": shard.size, "tensors": number}
        | {"data_start": shard.data_start, "metadata": shard.metadata or {}}
        for shard, number in zip(checkpoint.shards, counts, strict=True)
    ]
    facts: dict[str, Any] = {
        "source": checkpoint.source,
        "total_bytes": checkpoint.total_bytes,
        "tensor_count": len(checkpoint.tensors),
        "files": files,
        "dtypes": dtypes,
        "metadata": checkpoint.metadata,
    }
    if listed:
        facts["tensors"] = {
            info.name: {"dtype": info.dtype, "shape": list(info.shape), "bytes": info.nbytes}
            | {"file": checkpoint.shards[info.shard].name, "offset": info.offset}
            for info in checkpoint.tensors.values()
        }
    return facts


@click.command(short_help="The reads of a load.")
@terminal.source_of
@terminal.names_of
@terminal.bytes_option("--window", "Size of a read window (64K, 256M); 0 plans one window.")
@click.option("--transfers", "listed", is_flag=True, help="List every read.")
@terminal.json_of
@terminal.common
def plan(
    source: str,
    patterns: Sequence[str],
    layers: tuple[int, int | None] | None,
    experts: tuple[int, int | None] | None,
    window: int,
    listed: bool,
    as_json: bool,
    **where: Any,
) -> None:
    """Prints the reads of a cold load past the page cache. Reads headers only."""
    names = terminal.chosen(patterns, layers, experts)
    planned = plan_reads(source, names, window_bytes=window, **where)
    files: list[str] = []
    if listed or as_json:
        with Checkpoint.open(source, **where) as checkpoint:
            files = [shard.name for shard in checkpoint.shards]
    keys = ("offset", "length", "wanted", "target", "target_offset")
    reads = [
        {"tag": read.tag, "file": files[read.shard]} | {key: getattr(read, key) for key in keys}
        for read in (planned.transfers if listed else ())
    ]
    if as_json:
        merged = [dict(each._asdict(), shard=files[each.shard]) for each in planned.merged_ranges]
        facts = {
            "source": shown_source(source),
            "tensors": len(planned.locations),
            "wanted_bytes": planned.wanted_bytes,
            "read_bytes": planned.read_bytes,
            "requests": len(planned.transfers),
            "merged_ranges": merged,
            "windows": [list(window) for window in planned.windows],
        }
        return terminal.show_json(facts | ({"transfers": reads} if listed else {}))
    click.echo(planned.summary())
    if reads:
        click.echo()
        terminal.show_table([tuple(reads[0]), *(tuple(map(str, read.values())) for read in reads)])
